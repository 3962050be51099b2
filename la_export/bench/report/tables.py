"""The figures of a run as tables of text, for a page or a terminal alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from la_export.bench.speed.record import (
    OVERALL,
    AnswerFigures,
    BundleRun,
    DecodeRun,
    Interval,
    SpeedFigures,
    SpeedRecord,
    Timing,
)

__all__ = [
    "NOTHING",
    "Table",
    "make_tables",
    "show_interval",
    "show_number",
    "show_percent",
    "show_timing",
]

NOTHING: Final = "–"
_MEGABYTE: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under titles; `note` says what a reader has to know of them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def show_number(value: float | None, digits: int = 2) -> str:
    """A figure with so many digits behind the point."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def show_percent(share: float | None) -> str:
    """A share as a percentage."""
    return NOTHING if share is None else f"{share:.1%}"


def show_interval(interval: Interval | None) -> str:
    """A ratio and its 95 % interval."""
    if interval is None:
        return NOTHING
    return f"{interval.value:.2f}x ({interval.low:.2f}–{interval.high:.2f})"


def show_timing(timing: Timing | None) -> str:
    """A median and its quartiles."""
    if timing is None:
        return NOTHING
    return f"{timing.median_ms:.2f} ({timing.low_ms:.2f}–{timing.high_ms:.2f})"


def _show_size(num_bytes: int | None) -> str:
    return NOTHING if num_bytes is None else f"{num_bytes / _MEGABYTE:,.1f}"


def make_tables(record: SpeedRecord) -> tuple[Table, ...]:
    """A table for each kind of figure of which the run measured something."""
    tables = (
        _bundles(record),
        _decoding(record, "Decoding, all answers", lambda run: run.answers),
        _decoding(record, "Decoding, answers that do not loop", lambda run: run.without_loops),
        _categories(record),
        _peers(record),
        _step_times(record),
        _growth(record),
        _reserved(record),
        _prefill(record),
        _outside(record),
        _memory(record),
        _transient(record),
    )
    return tuple(table for table in tables if table.rows)


def _bundles(record: SpeedRecord) -> Table:
    return Table(
        title="Bundles",
        columns=(
            *("bundle", "model", "precision", "perplexity", "weights of a step, MB", "backend"),
            *("graph", "cache", "lookahead vectors", "plain decoding of"),
        ),
        rows=tuple(
            (
                *(bundle.name, bundle.model, bundle.precision),
                *(show_number(bundle.perplexity, 3), _show_size(bundle.weight_bytes)),
                f"{bundle.backend} {bundle.backend_version}",
                f"{bundle.graph} {bundle.graph_sha256[:12]}",
                f"{bundle.cache_form} {bundle.kv_order}",
                *(bundle.vectors, bundle.plain_bundle or NOTHING),
            )
            for bundle in record.bundles
        ),
    )


def _decoding(
    record: SpeedRecord, title: str, choose: Callable[[DecodeRun], Sequence[AnswerFigures]]
) -> Table:
    def rows() -> Iterator[tuple[str, ...]]:
        for bundle, run in _runs(record):
            figures = next(entry for entry in choose(run) if entry.category == OVERALL)
            yield (
                *(bundle.name, run.name, *_speed_cells(figures)),
                show_number(figures.ceiling_tokens_per_s, 1),
                *(show_number(figures.tokens_per_pass), show_number(figures.rows_per_pass, 1)),
                *(show_interval(figures.speedup), show_number(figures.yielded)),
                f"{figures.equal} of {figures.samples}",
                f"{figures.looping} of {figures.samples}",
            )

    return Table(
        title=title,
        note="Intervals hold 95 % of 2,000 draws of the prompts. Yield is the speedup that the "
        "step times promise. Ceiling: decoding if a step took no longer than reading the weights, "
        "or its operations.",
        columns=(
            *("bundle", "way", *_SPEED_COLUMNS, "ceiling, tokens/s", "tokens/pass", "rows/pass"),
            *("speedup", "yield", "as plain", "looping"),
        ),
        rows=tuple(rows()),
    )


_SPEED_COLUMNS: Final = ("decode tokens/s", "end to end tokens/s", "first token, s")


def _speed_cells(figures: SpeedFigures) -> tuple[str, ...]:
    return (
        show_number(figures.decode_tokens_per_s, 1),
        show_number(figures.end_to_end_tokens_per_s, 1),
        show_number(figures.ttft_s, 3),
    )


def _categories(record: SpeedRecord) -> Table:
    return Table(
        title="Decoding by category",
        columns=(
            *("bundle", "way", "category", "prompts", *_SPEED_COLUMNS, "tokens/pass", "speedup"),
            "yield",
        ),
        rows=tuple(
            (
                *(bundle.name, run.name, figures.category, str(figures.samples)),
                *(*_speed_cells(figures), show_number(figures.tokens_per_pass)),
                *(show_interval(figures.speedup), show_number(figures.yielded)),
            )
            for bundle, run in _runs(record)
            for figures in run.answers
            if figures.category != OVERALL
        ),
    )


def _runs(record: SpeedRecord) -> Iterator[tuple[BundleRun, DecodeRun]]:
    for bundle in record.bundles:
        for run in bundle.decoding:
            yield bundle, run


def _peers(record: SpeedRecord) -> Table:
    def rows() -> Iterator[tuple[str, ...]]:
        for peer in record.peers:
            overall = next((f for f in peer.figures if f.category == OVERALL), None)
            speed = (NOTHING,) * len(_SPEED_COLUMNS) if overall is None else _speed_cells(overall)
            yield (
                *(peer.name, peer.version or NOTHING, peer.precision, peer.mode_name),
                *(str(peer.threads), *speed, show_number(peer.perplexity, 3)),
                *(_show_size(peer.pss_bytes), peer.build_flags, peer.absent or ""),
            )

    return Table(
        title="Other programs on the same prompts",
        columns=(
            *("program", "version", "weights", "mode", "threads", *_SPEED_COLUMNS, "perplexity"),
            *("PSS, MB", "built with", "absent because"),
        ),
        rows=tuple(rows()),
    )


def _step_times(record: SpeedRecord) -> Table:
    def rows() -> Iterator[tuple[str, ...]]:
        for bundle in record.bundles:
            everything = {p.rows: p for p in bundle.step_times if p.scored_rows == p.rows}
            fewer = {p.rows: p.time for p in bundle.step_times if p.scored_rows < p.rows}
            first = everything.get(1)
            for count, point in everything.items():
                ratio = None if first is None else point.time.median_ms / first.time.median_ms
                yield (
                    *(bundle.name, str(count), show_timing(point.time), show_number(ratio)),
                    show_timing(fewer.get(count)),
                    *(show_number(point.weights_ms), show_number(point.operations_ms)),
                )

    return Table(
        title="L(T): one exact step of T rows",
        note="Medians and quartiles. Verified rows: the head is asked for the root and the drafts "
        "alone. No step can take less than the larger of the last two columns.",
        columns=(
            *("bundle", "T", "all rows scored, ms", "L(T)/L(1)", "verified rows scored, ms"),
            *("weights read, ms", "operations, ms"),
        ),
        rows=tuple(rows()),
    )


def _growth(record: SpeedRecord) -> Table:
    return Table(
        title="A step as cache and batch grow",
        columns=("bundle", "batch", "T", "tokens in the cache", "ms", "absent because"),
        rows=tuple(
            (
                *(bundle.name, str(point.batch), str(point.rows), f"{point.past:,}"),
                *(show_timing(point.time), point.absent or ""),
            )
            for bundle in record.bundles
            for point in bundle.growth
        ),
    )


def _reserved(record: SpeedRecord) -> Table:
    return Table(
        title="L(1) with more places reserved than used",
        columns=("bundle", "places used", "places reserved", "ms"),
        rows=tuple(
            (bundle.name, f"{point.past:,}", f"{point.reserved:,}", show_timing(point.time))
            for bundle in record.bundles
            for point in bundle.reserved
        ),
    )


def _prefill(record: SpeedRecord) -> Table:
    return Table(
        title="Reading a prompt",
        columns=("bundle", "prompt tokens", "ms", "tokens/s"),
        rows=tuple(
            (
                *(bundle.name, f"{found.prompt_tokens:,}", show_timing(found.time)),
                show_number(found.tokens_per_s, 0),
            )
            for bundle in record.bundles
            for found in bundle.prefill
        ),
    )


def _outside(record: SpeedRecord) -> Table:
    return Table(
        title="Time of a step outside the backend's run",
        columns=("bundle", "k", "of the run", "run, ms", "steps"),
        rows=tuple(
            (
                *(bundle.name, str(found.k), show_percent(found.share)),
                *(show_number(found.run_ms), f"{found.samples:,}"),
            )
            for bundle in record.bundles
            for found in bundle.outside
        ),
    )


def _memory(record: SpeedRecord) -> Table:
    return Table(
        title="A process with the bundle open",
        columns=("bundle", "opening, s", "PSS, MB", "peak RSS, MB", "two at once, PSS of each, MB"),
        rows=tuple(
            (
                *(bundle.name, show_number(found.open_s), _show_size(found.pss_bytes)),
                _show_size(found.peak_rss_bytes),
                " + ".join(map(_show_size, found.shared_pss_bytes)),
            )
            for bundle in record.bundles
            if (found := bundle.memory) is not None
        ),
    )


def _transient(record: SpeedRecord) -> Table:
    found = [(bundle, share) for bundle in record.bundles for share in bundle.transient]
    tokens = dict.fromkeys(part.tokens for _, share in found for part in share.shares)

    def rows() -> Iterator[tuple[str, ...]]:
        for bundle, share in found:
            parts = {part.tokens: part.share for part in share.shares}
            yield (
                *(bundle.name, str(share.k), share.layout.value, str(share.rows)),
                *(str(share.lookahead_rows), _show_size(share.num_bytes)),
                *(show_percent(parts.get(count)) for count in tokens),
                f"{share.small_from:,} tokens",
            )

    return Table(
        title="K/V that a step throws away, at most, of the cache",
        note="The paper says: under 2 %. That holds from the last column on.",
        columns=(
            *("bundle", "k", "layout", "rows", "of them slots", "MB"),
            *(f"of {count:,} tokens" for count in tokens),
            "under 2 % from",
        ),
        rows=tuple(rows()),
    )
