"""The result of `la-export bench` as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from la_export.bench.speed.record import (
    AnswerFigures,
    BundleRun,
    DecodeRun,
    Section,
    SpeedRecord,
    StepPoint,
    Timing,
)
from la_export.cli.console import format_bytes

__all__ = ["print_record"]


def print_record(record: SpeedRecord, console: Console) -> None:
    """Print what was measured, a table for each kind of figure."""
    settings = record.settings
    console.print(
        f"{record.processor}, {record.cores} cores, {settings.threads} threads a pass; times are "
        "medians (first to third quartile); n is the number of samples"
    )
    if record.rates is not None:
        rates = record.rates
        console.print(
            f"the machine reads {rates.bandwidth_bytes_per_s / 1e9:.1f} GB/s and multiplies, at "
            f"{rates.gemm_rows} rows, {rates.float_operations_per_s / 1e9:.0f} float32 and "
            f"{rates.integer_operations_per_s / 1e9:.0f} u8 x s8 billion operations/s "
            f"(best of {rates.samples})"
        )
    for bundle in record.bundles:
        console.print(f"\n{bundle.name}: {_describe(bundle)}")
        for table in _tables(bundle, record):
            console.print(table)
    if not record.complete:
        console.print("note: the run ended early; these figures are those it had measured")


def _describe(bundle: BundleRun) -> str:
    parts = [
        f"{bundle.model}, {bundle.precision}, {bundle.backend} {bundle.backend_version}",
        f"{bundle.cache_form} {bundle.kv_order}",
        f"{format_bytes(bundle.weight_bytes)} of weights a step",
    ]
    if bundle.perplexity is not None:
        parts.append(f"perplexity {bundle.perplexity:.3f}")
    if bundle.plain_bundle not in (None, bundle.name):
        parts.append(f"plain is that of {bundle.plain_bundle}")
    return "; ".join(parts)


def _tables(bundle: BundleRun, record: SpeedRecord) -> Iterator[Table]:
    """Those of which there is something to show."""
    if bundle.step_times:
        yield _step_times(bundle)
    if bundle.outside:
        yield _outside(bundle)
    if any(point.time for point in bundle.growth):
        yield _growth(bundle)
    if bundle.reserved:
        yield _reserved(bundle)
    if bundle.prefill:
        yield _prefill(bundle)
    if bundle.decoding:
        yield _decoding(bundle, without_loops=False)
        yield _decoding(bundle, without_loops=True)
        yield _categories(bundle)
        yield _acceptance(bundle)
    if bundle.memory is not None:
        yield _memory(bundle)
    if Section.DECODING in record.settings.sections and bundle.transient:
        yield _transient(bundle)


def _time(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    return (
        f"{timing.median_ms:.2f} ({timing.low_ms:.2f} to {timing.high_ms:.2f}) n={timing.samples}"
    )


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _step_times(bundle: BundleRun) -> Table:
    past = bundle.step_times[0].past
    table = Table(
        "T",
        "all rows scored, ms",
        "over L(1)",
        "verified rows scored, ms",
        "weights read, ms",
        "operations, ms",
        title=f"L(T): one exact step of T rows behind {past} tokens",
    )
    full = {p.rows: p for p in bundle.step_times if p.scored_rows == p.rows}
    verified = {p.rows: p for p in bundle.step_times if p.scored_rows == 1 + p.rows // 2}
    for rows, point in full.items():
        first = full.get(1)
        ratio = None if first is None else point.time.median_ms / first.time.median_ms
        table.add_row(
            str(rows),
            _time(point.time),
            _number(ratio),
            _time(_timing(verified.get(rows))),
            _number(point.weights_ms),
            _number(point.operations_ms),
        )
    return table


def _timing(point: StepPoint | None) -> Timing | None:
    return None if point is None else point.time


def _outside(bundle: BundleRun) -> Table:
    table = Table("k", "outside, % of the run", "run, ms", "n", title="a step outside its run")
    for share in bundle.outside:
        table.add_row(
            str(share.k), _number(100 * share.share), _number(share.run_ms), str(share.samples)
        )
    return table


def _growth(bundle: BundleRun) -> Table:
    pasts = list(dict.fromkeys(point.past for point in bundle.growth))
    table = Table("batch", "T", *(f"past {past:,}, ms" for past in pasts), title="cost with growth")
    for batch, rows in dict.fromkeys((point.batch, point.rows) for point in bundle.growth):
        cells = [
            _time(point.time) if point.time else f"none: {point.absent}"
            for point in bundle.growth
            if (point.batch, point.rows) == (batch, rows)
        ]
        table.add_row(str(batch), str(rows), *cells)
    return table


def _reserved(bundle: BundleRun) -> Table:
    past = bundle.reserved[0].past
    table = Table("places reserved", "L(1), ms", title=f"reserved places behind {past} tokens")
    for point in bundle.reserved:
        table.add_row(f"{point.reserved:,}", _time(point.time))
    return table


def _prefill(bundle: BundleRun) -> Table:
    table = Table("prompt tokens", "ms", "tokens/s", title="reading a prompt")
    for found in bundle.prefill:
        table.add_row(f"{found.prompt_tokens:,}", _time(found.time), _number(found.tokens_per_s, 0))
    return table


def _decoding(bundle: BundleRun, *, without_loops: bool) -> Table:
    what = "answers that do not loop" if without_loops else "all answers"
    table = Table(
        "way",
        "decode tok/s",
        "ceiling",
        "end to end tok/s",
        "first token, s",
        "tokens/pass",
        "rows/pass",
        "yield",
        "speedup (95 %)",
        "as plain",
        "looping",
        title=f"decoding, {what}",
    )
    for run in bundle.decoding:
        figures = _overall(run, without_loops=without_loops)
        table.add_row(
            run.name,
            _number(figures.decode_tokens_per_s, 1),
            _number(figures.ceiling_tokens_per_s, 1),
            _number(figures.end_to_end_tokens_per_s, 1),
            _number(figures.ttft_s, 3),
            _number(figures.tokens_per_pass),
            _number(figures.rows_per_pass, 1),
            _number(figures.yielded),
            _speedup(figures),
            f"{figures.equal} of {figures.samples}",
            f"{figures.looping} of {figures.samples}",
        )
    return table


def _overall(run: DecodeRun, *, without_loops: bool) -> AnswerFigures:
    return (run.without_loops if without_loops else run.answers)[-1]


def _speedup(figures: AnswerFigures) -> str:
    found = figures.speedup
    return "-" if found is None else f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def _categories(bundle: BundleRun) -> Table:
    figures = bundle.decoding[0].answers
    table = Table(
        "way",
        *(f"{entry.category} (n={entry.samples})" for entry in figures),
        title="decode tokens/s, and speedup over plain, by category",
    )
    for run in bundle.decoding:
        known = {entry.category: entry for entry in run.answers}
        cells = []
        for entry in figures:
            found = known.get(entry.category)
            if found is None:
                cells.append("-")
                continue
            ratio = "" if found.speedup is None else f" x{found.speedup.value:.2f}"
            cells.append(f"{_number(found.decode_tokens_per_s, 1)}{ratio}")
        table.add_row(run.name, *cells)
    return table


def _acceptance(bundle: BundleRun) -> Table:
    positions = max(len(run.overall.accepted) for run in bundle.decoding)
    table = Table(
        "way",
        *(str(position) for position in range(1, positions + 1)),
        title="share of drafts accepted, by position (n of the first)",
    )
    for run in bundle.decoding:
        accepted = run.overall.accepted
        if accepted:
            cells = [_number(entry.share) for entry in accepted]
            cells[0] = f"{cells[0]} n={accepted[0].drafted}"
            table.add_row(run.name, *cells)
    return table


def _memory(bundle: BundleRun) -> Table:
    table = Table("figure", "measured", title="a process with the bundle open")
    found = bundle.memory
    assert found is not None, "there is something to show"
    table.add_row("opening it, digests included, s (n=1)", _number(found.open_s))
    table.add_row("PSS alone", format_bytes(found.pss_bytes))
    table.add_row("peak RSS", format_bytes(found.peak_rss_bytes))
    pair = " + ".join(format_bytes(size) for size in found.shared_pss_bytes)
    table.add_row("PSS of two at the same time", pair)
    return table


def _transient(bundle: BundleRun) -> Table:
    tokens = [share.tokens for share in bundle.transient[0].shares]
    table = Table(
        "k",
        "layout",
        "rows (slots)",
        "K/V",
        *(f"% of {count:,} tokens" for count in tokens),
        "under 2 % from",
        title="K/V that a step throws away, at most",
    )
    for found in bundle.transient:
        table.add_row(
            str(found.k),
            found.layout.value,
            f"{found.rows} ({found.lookahead_rows})",
            format_bytes(found.num_bytes),
            *(_number(100 * share.share) for share in found.shares),
            f"{found.small_from:,} tokens",
        )
    return table
