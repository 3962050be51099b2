"""The tables under docs/results that show a run: the second half of `scripts/bench_speed`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from la_export.bench.results import Cell, Column, write_result
from la_export.bench.speed.record import (
    AnswerFigures,
    BundleRun,
    DecodeRun,
    Section,
    SpeedRecord,
    StepPoint,
    read_record,
)
from la_runtime.errors import LookaheadError

__all__ = ["ResultTable", "make_tables"]

Row = dict[str, Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTable:
    """One result file: its name, what its table shows, and the figures."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


def make_tables(record: SpeedRecord) -> tuple[ResultTable, ...]:
    """The tables of everything that was measured; those without rows are left out.

    Figures of bundles go with their memory: a run of other parts would leave gaps in that table.
    """
    has_memory = Section.MEMORY in record.settings.sections
    tables = (
        _table("speed", _DECODING, _decoding_rows(record)),
        _table("speed_without_loops", _DECODING, _decoding_rows(record, without_loops=True)),
        _table("speed_categories", _CATEGORIES, _category_rows(record)),
        _table("speed_acceptance", _ACCEPTANCE, _acceptance_rows(record)),
        _table("speed_steps", _STEPS, _step_rows(record)),
        _table("speed_growth", _GROWTH, _growth_rows(record)),
        *(
            (
                _table("speed_bundles", _BUNDLES, _bundle_rows(record)),
                _table("speed_transient", _TRANSIENT, _transient_rows(record)),
            )
            if has_memory
            else ()
        ),
    )
    return tuple(table for table in tables if table.rows)


def _table(name: str, columns: tuple[Column, ...], rows: Iterator[Row]) -> ResultTable:
    return ResultTable(name=name, columns=columns, rows=tuple(rows))


_DECODING: Final = (
    Column(key="bundle", title="Bundle"),
    Column(key="way", title="Decoding"),
    Column(key="prompts", title="Prompts"),
    Column(key="decode_tokens_per_s", title="Tokens/s", digits=1),
    Column(key="end_to_end_tokens_per_s", title="End to end", digits=1),
    Column(key="ttft_s", title="First token, s", digits=3),
    Column(key="tokens_per_pass", title="Tokens per pass"),
    Column(key="yield", title="Yield"),
    Column(key="speedup", title="Speedup over plain"),
    Column(key="speedup_low", title="95 % from"),
    Column(key="speedup_high", title="to"),
    Column(key="equal", title="Answers as plain"),
    Column(key="looping", title="Looping"),
)


def _decoding_rows(record: SpeedRecord, *, without_loops: bool = False) -> Iterator[Row]:
    for bundle, run in _runs(record):
        figures = (run.without_loops if without_loops else run.answers)[-1]
        if figures.samples:
            yield {"bundle": bundle.name, "way": run.name, **_figures(figures)}


def _runs(record: SpeedRecord) -> Iterator[tuple[BundleRun, DecodeRun]]:
    return ((bundle, run) for bundle in record.bundles for run in bundle.decoding)


def _figures(figures: AnswerFigures) -> Row:
    speedup = figures.speedup
    return {
        "category": figures.category,
        "prompts": figures.samples,
        "tokens": figures.tokens,
        "decode_tokens_per_s": figures.decode_tokens_per_s,
        "end_to_end_tokens_per_s": figures.end_to_end_tokens_per_s,
        "ttft_s": figures.ttft_s,
        "tokens_per_pass": figures.tokens_per_pass,
        "rows_per_pass": figures.rows_per_pass,
        "yield": figures.yielded,
        "ceiling_tokens_per_s": figures.ceiling_tokens_per_s,
        "speedup": None if speedup is None else speedup.value,
        "speedup_low": None if speedup is None else speedup.low,
        "speedup_high": None if speedup is None else speedup.high,
        "equal": figures.equal,
        "looping": figures.looping,
    }


_CATEGORIES: Final = (
    Column(key="bundle", title="Bundle"),
    Column(key="way", title="Decoding"),
    Column(key="category", title="Category"),
    Column(key="prompts", title="Prompts"),
    Column(key="decode_tokens_per_s", title="Tokens/s", digits=1),
    Column(key="tokens_per_pass", title="Tokens per pass"),
    Column(key="speedup", title="Speedup over plain"),
    Column(key="speedup_low", title="95 % from"),
    Column(key="speedup_high", title="to"),
)


def _category_rows(record: SpeedRecord) -> Iterator[Row]:
    for bundle, run in _runs(record):
        for figures in run.answers[:-1]:
            yield {"bundle": bundle.name, "way": run.name, **_figures(figures)}


_ACCEPTANCE: Final = (
    Column(key="bundle", title="Bundle"),
    Column(key="way", title="Decoding"),
    Column(key="position", title="Position"),
    Column(key="drafted", title="Drafts"),
    Column(key="share", title="Accepted"),
)


def _acceptance_rows(record: SpeedRecord) -> Iterator[Row]:
    for bundle, run in _runs(record):
        for found in run.overall.accepted:
            yield {
                "bundle": bundle.name,
                "way": run.name,
                "position": found.position,
                "drafted": found.drafted,
                "share": found.share,
            }


_STEPS: Final = (
    Column(key="bundle", title="Bundle"),
    Column(key="rows", title="T"),
    Column(key="median_ms", title="L(T), ms"),
    Column(key="low_ms", title="Quartiles: from"),
    Column(key="high_ms", title="to"),
    Column(key="samples", title="Samples"),
    Column(key="relative", title="L(T)/L(1)"),
    Column(key="verified_ms", title="Head on verified rows only, ms"),
    Column(key="weights_ms", title="Reading the weights, ms"),
    Column(key="operations_ms", title="Operations, ms"),
)


def _step_rows(record: SpeedRecord) -> Iterator[Row]:
    for bundle in record.bundles:
        full = {p.rows: p for p in bundle.step_times if p.scored_rows == p.rows}
        verified = {p.rows: p for p in bundle.step_times if p.scored_rows == 1 + p.rows // 2}
        for rows, point in full.items():
            yield {
                "bundle": bundle.name,
                "rows": rows,
                "past": point.past,
                **_timing(point),
                "relative": _median(point, over=full.get(1)),
                "verified_ms": None if rows not in verified else verified[rows].time.median_ms,
                "weights_ms": point.weights_ms,
                "operations_ms": point.operations_ms,
            }


def _timing(point: StepPoint) -> Row:
    time = point.time
    return {
        "median_ms": time.median_ms,
        "low_ms": time.low_ms,
        "high_ms": time.high_ms,
        "samples": time.samples,
    }


def _median(point: StepPoint, *, over: StepPoint | None) -> float | None:
    return None if over is None else point.time.median_ms / over.time.median_ms


_GROWTH: Final = (
    Column(key="bundle", title="Bundle"),
    Column(key="batch", title="Batch"),
    Column(key="rows", title="T"),
    Column(key="past", title="Past"),
    Column(key="median_ms", title="L(T), ms"),
    Column(key="low_ms", title="Quartiles: from"),
    Column(key="high_ms", title="to"),
    Column(key="samples", title="Samples"),
    Column(key="absent", title="Not measured because"),
)


def _growth_rows(record: SpeedRecord) -> Iterator[Row]:
    for bundle in record.bundles:
        for point in bundle.growth:
            time = point.time
            yield {
                "bundle": bundle.name,
                "batch": point.batch,
                "rows": point.rows,
                "past": point.past,
                "median_ms": None if time is None else time.median_ms,
                "low_ms": None if time is None else time.low_ms,
                "high_ms": None if time is None else time.high_ms,
                "samples": None if time is None else time.samples,
                "absent": point.absent,
            }


_BUNDLES: Final = (
    Column(key="bundle", title="Bundle"),
    Column(key="figure", title="Figure"),
    Column(key="value", title="Measured", digits=3),
    Column(key="unit", title="Unit"),
    Column(key="samples", title="Samples"),
)


def _bundle_rows(record: SpeedRecord) -> Iterator[Row]:
    for bundle in record.bundles:
        for figure, value, unit, samples in _bundle_figures(bundle):
            yield {
                "bundle": bundle.name,
                "figure": figure,
                "value": value,
                "unit": unit,
                "samples": samples,
            }


def _bundle_figures(bundle: BundleRun) -> Iterator[tuple[str, float, str, int | None]]:
    yield "weights that a step reads", bundle.weight_bytes / 1e6, "MB", None
    if bundle.perplexity is not None:
        yield "perplexity, recorded in the bundle", bundle.perplexity, "", None
    for found in bundle.prefill:
        what = f"reading a prompt of {found.prompt_tokens:,} tokens"
        yield what, found.tokens_per_s, "tokens/s", found.time.samples
    for share in bundle.outside:
        what = f"time of a step outside the run, batch 1, k = {share.k}"
        yield what, 100 * share.share, "% of the run", share.samples
    for point in bundle.reserved:
        what = f"L(1) behind {point.past} tokens, {point.reserved:,} places reserved"
        yield what, point.time.median_ms, "ms", point.time.samples
    memory = bundle.memory
    if memory is not None:
        yield "opening, digests included", memory.open_s, "s", 1
        yield "PSS of a process", memory.pss_bytes / 1e6, "MB", 1
        yield "its peak RSS", memory.peak_rss_bytes / 1e6, "MB", 1
        mean = sum(memory.shared_pss_bytes) / len(memory.shared_pss_bytes)
        what = f"PSS of each of {len(memory.shared_pss_bytes)} at the same time"
        yield what, mean / 1e6, "MB", len(memory.shared_pss_bytes)


_TRANSIENT: Final = (
    Column(key="bundle", title="Bundle"),
    Column(key="k", title="k"),
    Column(key="layout", title="Layout"),
    Column(key="rows", title="Rows thrown away"),
    Column(key="256", title="% of 256 tokens"),
    Column(key="1024", title="% of 1,024"),
    Column(key="4096", title="% of 4,096"),
    Column(key="small_from", title="Under 2 % from, tokens"),
)


def _transient_rows(record: SpeedRecord) -> Iterator[Row]:
    for bundle in record.bundles:
        for found in bundle.transient:
            yield {
                "bundle": bundle.name,
                "k": found.k,
                "layout": found.layout.value,
                "rows": found.rows,
                "lookahead_rows": found.lookahead_rows,
                "bytes": found.num_bytes,
                **{str(share.tokens): 100 * share.share for share in found.shares},
                "small_from": found.small_from,
            }


def _facts(record: SpeedRecord) -> Mapping[str, Any]:
    """What holds for all rows."""
    return {
        "complete": record.complete,
        "seconds": record.seconds,
        "settings": record.settings.model_dump(mode="json"),
        "rates": None if record.rates is None else record.rates.model_dump(mode="json"),
        "plain": {bundle.name: bundle.plain_bundle for bundle in record.bundles},
        "statistic": "median, first and third quartile; speedups: bootstrap over prompts",
    }


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("record_path", type=click.Path(exists=True, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("docs/results"), show_default=True
)
def _main(record_path: Path, arguments: Sequence[str], *, folder: Path) -> None:
    """Publish RECORD_PATH, which `scripts/bench_speed ARGUMENTS` measured."""
    try:
        record = read_record(record_path)
        for table in make_tables(record):
            write_result(
                folder / f"{table.name}.json",
                command=" ".join(["scripts/bench_speed", *arguments]),
                columns=table.columns,
                rows=table.rows,
                facts=_facts(record),
            )
            click.echo(f"wrote {folder / table.name}.json", err=True)
    except LookaheadError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    _main()
