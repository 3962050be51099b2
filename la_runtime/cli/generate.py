"""`la-runtime generate`: text from a bundle, streamed as it becomes certain."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from la_runtime.backends import BACKENDS
from la_runtime.errors import UsageError
from la_runtime.layout import Layout
from la_runtime.sampling import DEFAULT_MAX_NEW_TOKENS, Select
from la_runtime.source_names import SourceName

if TYPE_CHECKING:
    from la_runtime.results import GenerationResult

__all__ = ["generate"]


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompt", help="The prompt.")
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Read the prompt from a UTF-8 file, used as it is, its last newline included. Without "
    "--prompt and --prompt-file it comes from stdin.",
)
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option(
    "--k",
    type=int,
    help="Slots of each pass, a draft each; 0 is plain decoding.  [default: as many as pay]",
)
@click.option(
    "--sources",
    metavar="NAMES",
    help=f"Where drafts come from, some of {','.join(SourceName)}.  "
    "[default: all, or with --k or --layout the lookaheads alone]",
)
@click.option(
    "--drafts",
    type=int,
    metavar="N",
    help="Most drafts of --sources in a pass.  [default: as many as pay]",
)
@click.option(
    "--select",
    type=click.Choice([rule.value for rule in Select]),
    default=Select.EXACT.value,
    show_default=True,
    help="exact: lossless. threshold: the paper's rule, lossy.",
)
@click.option("--tau", type=float, help="Probability from which 'threshold' emits a proposal.")
@click.option(
    "--layout",
    type=click.Choice([layout.value for layout in Layout]),
    help=f"Where 'exact' puts lookaheads.  [default: {Layout.ROOT_ONLY.value}]",
)
@click.option(
    "--max-new-tokens", type=int, default=DEFAULT_MAX_NEW_TOKENS, show_default=True, metavar="N"
)
@click.option(
    "--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.", metavar="T"
)
@click.option("--top-k", type=int, default=0, help="Keep the N best tokens.", metavar="N")
@click.option("--top-p", type=float, default=1.0, help="Keep this much probability.", metavar="P")
@click.option(
    "--min-p", type=float, default=0.0, help="Keep tokens of this share of the best.", metavar="P"
)
@click.option("--repetition-penalty", type=float, default=1.0, metavar="X")
@click.option("--presence-penalty", type=float, default=0.0, metavar="X")
@click.option("--frequency-penalty", type=float, default=0.0, metavar="X")
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the noise.")
@click.option("--stop", multiple=True, help="End before this text; may be repeated.")
@click.option("--min-new-tokens", type=int, default=0, metavar="N", help="No end before N tokens.")
@click.option("--ignore-eos", is_flag=True, help="Go on past end-of-sequence tokens.")
@click.option(
    "--strict",
    is_flag=True,
    help="Make close choices again by passes of one row, as plain decoding.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default=BACKENDS[0],
    show_default=True,
    help="What runs the graph.",
)
@click.option("--threads", type=int, default=0, help="CPU threads per pass.  [default: all cores]")
@click.option(
    "--calibrate",
    is_flag=True,
    help="Measure how long passes take before the first one, and plan by that.",
)
@click.option("--stats", is_flag=True, help="Print statistics to stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def generate(
    bundle: Path,
    *,
    prompt: str | None,
    prompt_file: Path | None,
    chat: bool,
    k: int | None,
    sources: str | None,
    drafts: int | None,
    select: str,
    tau: float | None,
    layout: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    seed: int,
    stop: tuple[str, ...],
    min_new_tokens: int,
    ignore_eos: bool,
    strict: bool,
    backend: str,
    threads: int,
    calibrate: bool,
    stats: bool,
    as_json: bool,
) -> None:
    """Generate text from BUNDLE.

    The text streams to stdout; statistics go to stderr.
    """
    from la_runtime.generation import Engine
    from la_runtime.sampling import SamplingParams

    text = _read_prompt(prompt, prompt_file)
    # Made before the bundle is opened: a wrong option should not cost seconds.
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop,
        k=k,
        select=Select(select),
        tau=tau,
        layout=None if layout is None else Layout(layout),
        sources=None if sources is None else _split(sources),  # type: ignore[arg-type]  # by name
        drafts=drafts,
        ignore_eos=ignore_eos,
        strict=strict,
    )
    with Engine.open(bundle, backend=backend, k=k, threads=threads) as engine:
        if calibrate:
            engine.calibrate()
        with engine.stream(text, params, chat=chat) as stream:
            for chunk in stream:
                if not as_json:
                    click.echo(chunk.text, nl=False)
            result = stream.result
    click.echo(_to_json(_as_record(result)) if as_json else "")
    if stats:
        click.echo(_describe(result), err=True)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise UsageError("give one of --prompt and --prompt-file, not both")
    if prompt is not None:
        return prompt
    source = "standard input" if prompt_file is None else str(prompt_file)
    if prompt_file is None and sys.stdin is None:
        raise UsageError("standard input is closed; give --prompt or --prompt-file")
    try:
        content = sys.stdin.buffer.read() if prompt_file is None else prompt_file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{source} cannot be read: {error.strerror or error}; give the prompt another way"
        ) from error
    try:
        return content.decode("utf-8").removeprefix("\ufeff")  # a byte order mark is no text
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source} is not valid UTF-8: byte {error.start} is 0x{content[error.start]:02x}; "
            "convert it to UTF-8"
        ) from error


def _as_record(result: GenerationResult) -> dict[str, Any]:
    """The result's fields, the statistics' derived figures among them."""
    stats = result.stats
    record = dataclasses.asdict(result)
    record["stats"] |= {
        "tokens_per_pass": stats.tokens_per_pass,
        "tokens_per_s": stats.tokens_per_s,
        "agreement": stats.agreement,
    }
    return record


def _to_json(record: dict[str, Any]) -> str:
    is_unicode = sys.stdout is None or sys.stdout.encoding.lower().startswith("utf")
    return json.dumps(record, ensure_ascii=not is_unicode)


def _describe(result: GenerationResult) -> str:
    """The statistics as aligned lines."""
    stats = result.stats
    rows = [
        ("prompt tokens", f"{stats.prompt_tokens}"),
        ("new tokens", f"{stats.new_tokens} (ended by: {result.finish_reason})"),
        ("passes", f"{stats.passes} ({stats.prefill_passes} of them prefill)"),
        ("tokens per pass", f"{stats.tokens_per_pass:.2f}"),
        ("k", f"{stats.k}"),
    ]
    for position, (drafted, accepted) in enumerate(
        zip(stats.drafted, stats.accepted, strict=True), 1
    ):
        if drafted:
            found = f"{accepted} of {drafted} accepted ({accepted / drafted:.0%})"
            rows.append((f"  position {position}", found))
    for source in stats.sources:
        share = f" ({source.accepted / source.drafted:.0%})" if source.drafted else ""
        found = f"{source.accepted} of {source.drafted} accepted{share}"
        rows.append((f"  by {source.source}", found))
    if stats.without_drafts:
        rows.append(("plain passes", f"{stats.without_drafts}, nothing was proposed"))
    if stats.not_worth_drafts:
        found = f"{stats.not_worth_drafts}, no draft was worth its row"
        rows.append(("plain passes", found))
    if stats.rechecked:
        rows.append(("chosen again", f"{stats.rechecked} close choices, by passes of one row"))
    if stats.agreement is not None:
        rows.append(("agreement", f"{stats.agreement:.1%} of {stats.reread} emitted proposals"))
    if stats.tokens_per_s is not None:
        rows.append(("tokens/s", f"{stats.tokens_per_s:.1f}"))
    rows.append(("first token after", f"{stats.ttft_s:.3f} s"))
    width = max(len(title) for title, _ in rows)
    return "\n".join(f"{title:<{width}}  {value}" for title, value in rows)
