"""`la-export perplexity`: how well a bundle foretells texts, beside the model it was made from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from la_runtime.errors import NotRunError

if TYPE_CHECKING:
    from rich.console import Console

    from la_export.perplexity import Perplexity, Texts
    from la_runtime.bundle import Manifest, PerplexityFacts

__all__ = ["perplexity_command"]

# Sequences that write together, if text must be written.
_WRITERS = 32
_DEFAULT_TOKENS = 50_000


@click.command("perplexity")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--model",
    metavar="MODEL",
    help="Where the checkpoint is now.  [default: where the bundle was made from]",
)
@click.option(
    "--lora",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The PEFT adapter that was merged into the bundle's weights, if one was.",
)
@click.option(
    "--tokens",
    "num_tokens",
    type=click.IntRange(min=100),
    default=_DEFAULT_TOKENS,
    show_default=True,
    metavar="N",
    help="Tokens to score.",
)
@click.option(
    "--threads",
    type=click.IntRange(0, 1024),
    default=0,
    metavar="N",
    help="CPU threads of a pass.  [default: the library's choice]",
)
@click.option("--no-store", is_flag=True, help="Leave the manifest as it is.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def perplexity_command(
    bundle: Path,
    model: str | None,
    lora: Path | None,
    num_tokens: int,
    threads: int,
    *,
    no_store: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Take the perplexity of BUNDLE and of its checkpoint in PyTorch over the same tokens.

    Four fifths of them are answers that the model wrote itself, at temperature 1, one fifth are
    pages in the public domain. What the model has not written yet it writes first, and that stays
    in the cache folder for the next bundle of the same checkpoint. The figures go into the
    bundle's manifest, and `la-export inspect` shows them.
    """
    from la_export.cli.console import make_console, make_output_console, quiet_libraries

    quiet_libraries(verbose=False)
    from la_export.cli.facts import perplexity_table
    from la_export.perplexity import BackendScorer, load_texts, make_facts, measure
    from la_runtime.certificate import change_manifest
    from la_runtime.generation import Engine

    console = make_console(quiet=quiet)
    with Engine.open(bundle, threads=threads, max_batch=_WRITERS) as engine:
        opened = engine.bundle
        texts = load_texts(engine, num_tokens=num_tokens, progress=_tell_written(console))
        _note_writer(texts, opened.manifest, console)
        scorer = BackendScorer(engine.backend, context=opened.manifest.model.context)
        of_bundle = measure(scorer, texts, _tell_measured("bundle", console))
    of_source = _measure_source(opened.manifest, model, lora, texts, threads, console)
    facts = make_facts(
        texts, of_bundle, of_source, backend="ort-cpu", source=_describe(opened.manifest)
    )
    if not no_store:
        change_manifest(
            opened,
            lambda manifest: manifest.model_copy(update={"perplexity": facts}),
            what="perplexity",
        )
    if as_json:
        click.echo(json.dumps(_record(bundle, facts, is_stored=not no_store), indent=2))
    else:
        make_output_console().print(perplexity_table(facts))


def _measure_source(
    manifest: Manifest,
    model: str | None,
    lora: Path | None,
    texts: Texts,
    threads: int,
    console: Console,
) -> tuple[Perplexity, ...] | None:
    """The source's perplexity; None, with a line, where only the manifest said where it is.

    Raises:
        NotRunError: the checkpoint that was named cannot be read, or is another one.
    """
    import torch

    from la_export.perplexity import ReferenceScorer, measure
    from la_export.reference import TorchReference
    from la_export.verify.source_model import open_checkpoint

    try:
        checkpoint = open_checkpoint(
            manifest, model, otherwise="do without the source's figures", lora=lora
        )
    except NotRunError as error:
        if model is not None:
            raise
        console.print(f"note: the bundle alone is measured: {error}")
        return None
    if threads:
        torch.set_num_threads(threads)
    reference = TorchReference(checkpoint.load_model())
    return measure(ReferenceScorer(reference), texts, _tell_measured("source", console))


def _describe(manifest: Manifest) -> str:
    model = manifest.model
    stored = "" if model.source_quantization == "none" else f" ({model.source_quantization})"
    return f"{model.source} @ {model.revision}{stored}"


def _note_writer(texts: Texts, manifest: Manifest, console: Console) -> None:
    """What a bundle wrote it foretells better than its source does."""
    if texts.own_written_by == manifest.precision != "fp32":
        console.print(
            f"note: a bundle in {manifest.precision} wrote the model's own answers, which favours "
            "such bundles: measure one in fp32 first, with an empty cache folder"
        )


def _tell_written(console: Console) -> Callable[[int], None]:
    began = time.perf_counter()

    def tell(num_tokens: int) -> None:
        seconds = time.perf_counter() - began
        console.print(f"  the model has written {num_tokens:,} tokens   {seconds:.0f} s")

    return tell


def _tell_measured(who: str, console: Console) -> Callable[[str, Perplexity], None]:
    before = time.perf_counter()

    def tell(kind: str, found: Perplexity) -> None:
        nonlocal before
        now = time.perf_counter()
        console.print(
            f"  {who:<8} {found.value:9.4f}   {kind}, {found.num_tokens:,} tokens   "
            f"{now - before:.1f} s"
        )
        before = now

    return tell


def _record(bundle: Path, facts: PerplexityFacts, *, is_stored: bool) -> dict[str, Any]:
    rows = (*facts.texts, facts.overall)
    return {
        "bundle": str(bundle),
        "stored": is_stored,
        **facts.model_dump(mode="json", exclude={"texts"}),
        "texts": [{**row.model_dump(mode="json"), "ratio": row.ratio} for row in rows],
    }
