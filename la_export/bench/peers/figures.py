"""What a race came to, as rows of a table and as records of `la-export bench`. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from la_export.bench.peers.contest import Standing
from la_export.bench.peers.race import Alone, Entry, Lap
from la_export.bench.results import Cell, Column
from la_export.bench.speed.record import OVERALL, PeerMode, PeerRun, SpeedFigures

__all__ = [
    "COLUMNS",
    "lap_rows",
    "make_columns",
    "make_row",
    "make_rows",
    "make_run",
    "make_runs",
    "paired_ratio",
    "quartiles",
]

COLUMNS: Final = (
    Column(key="peer", title="Program"),
    Column(key="precision", title="Weights"),
    Column(key="mode", title="Decoding"),
    Column(key="decode", title="Tokens/s", digits=1),
    Column(key="decode_low", title="Lower quartile", digits=1),
    Column(key="decode_high", title="Upper quartile", digits=1),
    Column(key="ours_over_this", title="Ours over this"),
    Column(key="ttft_ms", title="First token (ms)", digits=0),
    Column(key="end_to_end", title="Tokens/s, end to end", digits=1),
    Column(key="pss_mb", title="Memory (MB)", digits=0),
    Column(key="perplexity_own", title="Perplexity, own answers"),
    Column(key="perplexity_pages", title="Perplexity, pages"),
)
_ABSENT: Final = Column(key="absent", title="Absent because")
_MEGABYTE: Final = 1e6


def make_columns(standing: Standing) -> tuple[Column, ...]:
    """The table's columns; reasons have one only if somebody is absent."""
    return (*COLUMNS, _ABSENT) if standing.absent else COLUMNS


def quartiles(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Lower quartile, median and upper quartile; None of nothing."""
    if not values:
        return None
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def paired_ratio(ours: Sequence[Lap], theirs: Sequence[Lap]) -> float | None:
    """Median of our decoding speed over theirs, prompt by prompt and round by round."""
    speeds = {_turn(lap): lap.decode_tokens_per_s for lap in theirs}
    ratios = []
    for lap in ours:
        own, other = lap.decode_tokens_per_s, speeds.get(_turn(lap))
        if own is not None and other is not None:
            ratios.append(own / other)
    return statistics.median(ratios) if ratios else None


def _turn(lap: Lap) -> tuple[int, str]:
    return lap.round_index, lap.prompt.name


def make_rows(standing: Standing, reference: Mapping[PeerMode, str]) -> tuple[dict[str, Cell], ...]:
    """The table, an entry a row.

    Args:
        standing: what was found.
        reference: by mode, name of the entry of ours that others are compared with.
    """
    return tuple(
        make_row(
            entry,
            alone=standing.alone.get(entry.name),
            laps=standing.laps[entry.name],
            ours=standing.laps[reference[entry.mode]],
            absent=standing.absent.get(entry.name),
        )
        for entry in standing.field.entries
    )


def make_row(
    entry: Entry,
    *,
    alone: Alone | None,
    laps: Sequence[Lap],
    ours: Sequence[Lap],
    absent: str | None,
) -> dict[str, Cell]:
    """An entry's row of the table.

    Args:
        entry: whose.
        alone: what was found of it; None if it is absent.
        laps: its own.
        ours: of the bundle that it is compared with, in the same mode.
        absent: why there are none.
    """
    row: dict[str, Cell] = dict.fromkeys(column.key for column in (*COLUMNS, _ABSENT))
    row |= {
        "peer": entry.peer,
        "precision": entry.precision,
        "mode": entry.mode_name,
        "absent": absent,
    }
    if absent is not None or alone is None:
        return row
    speeds = [lap.decode_tokens_per_s for lap in laps]
    decode = quartiles([speed for speed in speeds if speed is not None])
    if decode is not None:
        row |= {"decode_low": decode[0], "decode": decode[1], "decode_high": decode[2]}
    return row | {
        "version": alone.version,
        "build": alone.build,
        "answers": len(laps),
        "tokens": sum(len(lap.answer.token_ids) for lap in laps),
        "ours_over_this": paired_ratio(ours, laps),
        "ttft_ms": 1000 * statistics.median(lap.answer.ttft_s for lap in laps),
        "end_to_end": statistics.median(lap.end_to_end_tokens_per_s for lap in laps),
        "open_s": alone.open_s,
        "pss_mb": alone.pss_bytes / _MEGABYTE,
        "peak_rss_mb": alone.peak_rss_bytes / _MEGABYTE,
        "perplexity_own": alone.perplexity_own,
        "perplexity_pages": alone.perplexity_pages,
    }


def make_runs(standing: Standing, *, threads: int) -> tuple[PeerRun, ...]:
    """All entries as `la-export bench` records them, in the order of the table."""
    return tuple(
        _absent_run(entry, threads=threads, reason=standing.absent[entry.name])
        if entry.name in standing.absent
        else make_run(entry, standing.alone[entry.name], standing.laps[entry.name], threads=threads)
        for entry in standing.field.entries
    )


def make_run(entry: Entry, alone: Alone, laps: Sequence[Lap], *, threads: int) -> PeerRun:
    """An entry as `la-export bench` records it."""
    categories = tuple(dict.fromkeys(lap.prompt.category for lap in laps))
    figures = [
        _figures(category, [lap for lap in laps if lap.prompt.category == category])
        for category in categories
    ]
    return PeerRun(
        name=entry.peer,
        version=alone.version,
        build_flags=alone.build,
        mode=entry.mode,
        mode_name=entry.mode_name,
        precision=entry.precision,
        threads=threads,
        figures=(*figures, _figures(OVERALL, laps)),
        pss_bytes=alone.pss_bytes,
        perplexity=alone.perplexity_own,
    )


def _absent_run(entry: Entry, *, threads: int, reason: str) -> PeerRun:
    """An entry of which nothing was measured."""
    return PeerRun(
        name=entry.peer,
        version=None,
        mode=entry.mode,
        mode_name=entry.mode_name,
        precision=entry.precision,
        threads=threads,
        absent=reason,
    )


def _figures(category: str, laps: Sequence[Lap]) -> SpeedFigures:
    decoded = sum(len(lap.answer.token_ids) - lap.answer.first_tokens for lap in laps)
    decode_s = sum(lap.answer.decode_s for lap in laps)
    tokens = sum(len(lap.answer.token_ids) for lap in laps)
    return SpeedFigures(
        category=category,
        samples=len(laps),
        tokens=tokens,
        decode_tokens_per_s=decoded / decode_s if decoded and decode_s > 0 else None,
        end_to_end_tokens_per_s=tokens / sum(lap.answer.total_s for lap in laps),
        ttft_s=statistics.median(lap.answer.ttft_s for lap in laps),
    )


def lap_rows(laps: Sequence[Lap]) -> list[Mapping[str, Cell]]:
    """Every answer's counts and times, for who wants to see behind the medians."""
    return [
        {
            "contestant": lap.contestant,
            "round": lap.round_index + 1,
            "question": lap.prompt.name,
            "category": lap.prompt.category,
            "prompt_tokens": len(lap.prompt.token_ids),
            "tokens": len(lap.answer.token_ids),
            "first_tokens": lap.answer.first_tokens,
            "ttft_s": round(lap.answer.ttft_s, 4),
            "decode_s": round(lap.answer.decode_s, 4),
            "total_s": round(lap.answer.total_s, 4),
        }
        for lap in laps
    ]
