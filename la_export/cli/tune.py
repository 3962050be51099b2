"""`la-export tune`: teach a model's lookaheads on text that it writes itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from la_export.tune.options import TuneOptions, parse_adapter
from la_runtime.group_mask import GroupMask

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from la_export.tune.trainer import Evaluation
    from la_export.tune.tuning import TuneReport

__all__ = ["tune_command"]


@click.command("tune")
@click.option(
    "--model",
    required=True,
    metavar="MODEL",
    help="Folder, .gguf file, hub id (owner/name) or known name such as smollm2-135m.",
)
@click.option(
    "--k",
    type=int,
    default=8,
    show_default=True,
    metavar="K",
    help="Lookahead vectors; a bundle may serve any k up to it.",
)
@click.option(
    "--adapter",
    default="lora:16",
    show_default=True,
    metavar="none|lora:R",
    help="none: vectors alone. lora:R: also weights of rank R for the rows of lookaheads.",
)
@click.option(
    "--group-mask",
    type=click.Choice([mask.value for mask in GroupMask]),
    default=GroupMask.STRICT.value,
    show_default=True,
    help="strict: a lookahead sees itself alone among lookaheads. causal: also those before it.",
)
@click.option(
    "--minutes",
    type=float,
    default=30.0,
    show_default=True,
    metavar="T",
    help="Wall time for everything, whatever of it went into earlier runs included.",
)
@click.option(
    "--steps",
    type=int,
    metavar="N",
    help="Steps of training, at most.  [default: as many as there is time for]",
)
@click.option(
    "--texts",
    type=int,
    default=2048,
    show_default=True,
    metavar="N",
    help="Texts that the model writes, at most.",
)
@click.option(
    "--text-tokens",
    type=int,
    default=256,
    show_default=True,
    metavar="N",
    help="Tokens of a text, question and answer.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File to write.  [default: engines/<name>-lookahead.safetensors]",
)
@click.option("--revision", metavar="REV", help="Hub revision: branch, tag or commit.")
@click.option("--threads", type=int, metavar="N", help="CPU threads.")
@click.option("--allow-bin", is_flag=True, help="Read pickle-based .bin weights, weights-only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no table.")
def tune_command(
    model: str,
    k: int,
    adapter: str,
    group_mask: str,
    minutes: float,
    steps: int | None,
    texts: int,
    text_tokens: int,
    out: Path | None,
    revision: str | None,
    threads: int | None,
    *,
    allow_bin: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Tune the lookaheads of MODEL, whose own weights stay as they are.

    No data is needed: the model asks itself questions, answers them greedily, and its lookaheads
    learn to propose what it wrote. What is learned goes into one small file for
    `la-export build --lookahead FILE`.

    Prints the file's path to stdout. A run that is broken off goes on where it was when the same
    command is given again: texts and training lie in a folder beside the file, FILE.tuning.
    """
    options = TuneOptions(
        model=model,
        k=k,
        rank=parse_adapter(adapter),
        group_mask=GroupMask(group_mask),
        minutes=minutes,
        steps=steps,
        texts=texts,
        text_tokens=text_tokens,
        out=out,
        revision=revision,
        threads=threads,
        allow_bin=allow_bin,
    )
    from la_export.cli.console import make_console, quiet_libraries

    console = make_console(quiet=quiet)
    quiet_libraries(verbose=False)
    from la_export.tune.tuning import tune

    with _Lines(console) as progress:
        report = tune(options, progress)
    _print_report(report, console)
    if as_json:
        click.echo(json.dumps(_record(report), indent=2))
    else:
        click.echo(str(report.path))


class _Lines:
    """A line for every look at held-out texts; in a terminal, the running step is shown too."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None

    def __enter__(self) -> _Lines:
        if self._console.is_terminal and not self._console.quiet:
            self._status = self._console.status("loading the model")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def wrote(self, num_texts: int, seconds: float) -> None:
        if num_texts:
            self._console.print(f"  {num_texts:5} texts written   {seconds:6.0f} s")
        self._show("writing texts")

    def took_step(self, step: int, seconds: float, loss: float) -> None:
        self._show(f"step {step}, {seconds:.0f} s, loss {loss:.3f}")

    def evaluated(self, evaluation: Evaluation) -> None:
        shares = "  ".join(f"{share:.3f}" for share in evaluation.by_slot[:4])
        loss = f"   loss {evaluation.loss:.3f}" if evaluation.loss else ""
        self._console.print(
            f"  step {evaluation.step:5}   {evaluation.seconds:6.0f} s   right by slot {shares}"
            f"   accepted {evaluation.accepted:.3f}{loss}"
        )

    def _show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)


def _print_report(report: TuneReport, console: Console) -> None:
    from rich.table import Table

    held_out = report.held_out
    table = Table(title=f"proposals right on {held_out.num_anchors:,} held-out prefixes")
    table.add_column("slot", justify="right")
    table.add_column("untuned", justify="right")
    table.add_column("tuned", justify="right")
    for slot, (before, after) in enumerate(zip(held_out.untuned, held_out.tuned, strict=True), 1):
        table.add_row(str(slot), f"{before:.3f}", f"{after:.3f}")
    console.print(table)
    chains = ", ".join(
        f"{value:.2f} with {drafts}" for drafts, value in held_out.chain_tokens_per_pass.items()
    )
    console.print(f"tokens per pass of chains of drafts: {chains}")
    extra = report.num_vector_weights + report.num_adapter_weights
    console.print(
        f"extra weights: {report.num_vector_weights:,} of vectors, {report.num_adapter_weights:,} "
        f"of the adapter, {extra / report.num_model_weights:.2%} of the model's "
        "(the paper's method promises 0)"
    )


def _record(report: TuneReport) -> dict[str, Any]:
    held_out, learned = report.held_out, report.learned
    return {
        "path": str(report.path),
        "k": report.k,
        "group_mask": report.group_mask.value,
        "extra_weights": {
            "vectors": report.num_vector_weights,
            "adapter": report.num_adapter_weights,
            "share": (report.num_vector_weights + report.num_adapter_weights)
            / report.num_model_weights,
        },
        "texts": report.num_texts,
        "writing_s": report.writing_seconds,
        "training_s": learned.seconds,
        "steps": learned.steps,
        "stopped_early": learned.stopped_early,
        "dtype": report.dtype,
        "device": report.device,
        "held_out": {
            "anchors": held_out.num_anchors,
            "untuned_by_slot": list(held_out.untuned),
            "tuned_by_slot": list(held_out.tuned),
            "gain": held_out.gain,
            "gain_error": held_out.gain_error,
            "chain_texts": held_out.num_chain_texts,
            "chain_tokens_per_pass": {
                str(drafts): value for drafts, value in held_out.chain_tokens_per_pass.items()
            },
        },
        "history": [
            {
                "step": look.step,
                "seconds": look.seconds,
                "by_slot": list(look.by_slot),
                "accepted": look.accepted,
                "loss": look.loss,
            }
            for look in learned.history
        ],
    }
