"""What the paper reports, as data, and our figures in the same shape beside it.

The paper's acceptance rate is taken as what it is called: accepted proposals of those tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from la_export.bench.report.tables import Table, show_interval, show_percent
from la_export.bench.speed.record import AnswerFigures, DecodeRun, Selection, SpeedRecord

__all__ = ["ACCEPTANCE", "LENGTHS", "SOURCE", "SPEEDUPS", "PaperRow", "beside_the_paper"]

SOURCE: Final = (
    "Lookahead Attention: Self-Speculative Verification via Parallel Token Proposals, "
    "Solstice-AI Technical Report, 2026, section 4.2"
)
LENGTHS: Final = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """A row of one of the paper's tables: a model, and a figure for each of `LENGTHS`."""

    model: str
    values: tuple[float, float, float]


SPEEDUPS: Final = (
    PaperRow(model="LLaMA-7B", values=(1.6, 2.1, 2.4)),
    PaperRow(model="Qwen-7B", values=(1.5, 2.0, 2.3)),
    PaperRow(model="DeepSeek-7B", values=(1.4, 1.9, 2.2)),
)
ACCEPTANCE: Final = (
    PaperRow(model="LLaMA-7B", values=(0.942, 0.897, 0.831)),
    PaperRow(model="Qwen-7B", values=(0.931, 0.883, 0.814)),
)


def beside_the_paper(record: SpeedRecord) -> tuple[Table, Table]:
    """Speedup and acceptance rate: the paper's rows, marked as such, then ours."""
    speedups = _table(
        "Speedup over plain decoding",
        paper=[(row.model, [f"{value:.1f}x" for value in row.values]) for row in SPEEDUPS],
        ours=_rows(record, lambda figures: show_interval(figures.speedup)),
    )
    acceptance = _table(
        "Acceptance rate",
        paper=[(row.model, [f"{value:.1%}" for value in row.values]) for row in ACCEPTANCE],
        ours=_rows(record, lambda figures: show_percent(acceptance_rate(figures))),
    )
    return speedups, acceptance


def acceptance_rate(figures: AnswerFigures) -> float | None:
    """Accepted drafts of all that were tested, whatever their position."""
    drafted = sum(entry.drafted for entry in figures.accepted)
    return sum(entry.accepted for entry in figures.accepted) / drafted if drafted else None


def _table(
    title: str,
    *,
    paper: Sequence[tuple[str, Sequence[str]]],
    ours: Iterator[tuple[str, Sequence[str]]],
) -> Table:
    rows = [("the paper's", model, *cells) for model, cells in paper]
    rows += [("measured here", name, *cells) for name, cells in ours]
    return Table(
        title=title,
        note=f"The paper's figures: {SOURCE}. It names neither hardware nor prompts.",
        columns=("", "model", *(f"k={k}" for k in LENGTHS)),
        rows=tuple(rows),
    )


def _rows(
    record: SpeedRecord, show: Callable[[AnswerFigures], str]
) -> Iterator[tuple[str, Sequence[str]]]:
    """A row for every bundle and way of decoding."""
    for bundle in record.bundles:
        ways: dict[str, dict[int, DecodeRun]] = {}
        for run in bundle.decoding:
            if run.k in LENGTHS and run.selection is not Selection.PLANNED:
                ways.setdefault(_way(run), {})[run.k] = run
        for way, runs in ways.items():
            yield f"{bundle.name}, {way}", _cells(runs, show)


def _way(run: DecodeRun) -> str:
    return f"{run.selection} {run.layout or ''}".strip()


def _cells(runs: Mapping[int, DecodeRun], show: Callable[[AnswerFigures], str]) -> list[str]:
    return [show(runs[k].overall) if k in runs else "–" for k in LENGTHS]
