"""`la-export bench`: how fast bundles decode here, and what holds them back."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from la_export.cli.bench_report import RunReport, report_options, show_record
from la_runtime.errors import HostError, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from la_export.bench.speed.questions import Question
    from la_export.bench.speed.record import MemoryFigures, SpeedRecord
    from la_export.bench.speed.subjects import Subject

__all__ = ["bench_command"]

# Spelt here so that --help loads nothing; the tests compare them with the enums.
SECTIONS: Final = ("step-times", "growth", "prefill", "decoding", "memory")
SELECTIONS: Final = ("exact", "planned", "threshold")
SOURCES: Final = ("lookahead", "suffix", "recycled")
LAYOUTS: Final = ("root-only", "full")

_SHIPPED_PROMPTS: Final = "spec-bench"


def _split(
    known: tuple[str, ...],
) -> Callable[[click.Context, click.Parameter, str | None], tuple[str, ...]]:
    """Reads names with commas between them; those in the order of `known`."""

    def read(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...]:
        if value is None:
            return ()
        names = [name.strip() for name in value.split(",")]
        for name in names:
            if name not in known:
                raise click.BadParameter(f"{name!r} is none of {', '.join(known)}")
        return tuple(name for name in known if name in names)

    return read


def _read_sources(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """Sets of sources, each with commas between its names; all of them if none is given."""
    read = _split(SOURCES)
    return tuple(read(context, parameter, value) for value in values) or (SOURCES,)


def _read_lengths(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[int]:
    """Numbers, given one by one or with commas between them."""
    lengths: set[int] = set()
    for part in ",".join(values).split(",") if values else ():
        if not part.strip().isdecimal():
            raise click.BadParameter(f"{part!r} is no lookahead length; give one such as 4 or 2,4")
        lengths.add(int(part))
    return sorted(lengths)


@click.command("bench")
@click.argument("bundles", type=click.Path(path_type=Path), nargs=-1)
@click.option(
    "--k",
    "lookahead_lengths",
    multiple=True,
    callback=_read_lengths,
    metavar="K",
    help="Lookahead length to decode with, or several: 2,4.  [default: 1,2,4,8,12,16 if built]",
)
@click.option(
    "--layout",
    "layouts",
    callback=_split(LAYOUTS),
    metavar="NAMES",
    default=",".join(LAYOUTS),
    show_default=True,
    help="Where groups stand in exact decoding.",
)
@click.option(
    "--selection",
    "selections",
    callback=_split(SELECTIONS),
    metavar="NAMES",
    default="planned,exact",
    show_default=True,
    help="How drafts are made and become output: exact (k slots, verified), planned (--sources, "
    "as many drafts as pay, verified), threshold (k slots, unverified).",
)
@click.option(
    "--sources",
    multiple=True,
    callback=_read_sources,
    metavar="NAMES",
    help="Where planned drafts come from; repeat for several sets.  "
    f"[default: {','.join(SOURCES)}]",
)
@click.option(
    "--tau",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="Probability from which --selection threshold emits a proposal.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="CPU threads of a pass.  [default: as many as there are cores]",
)
@click.option(
    "--per-category",
    type=click.IntRange(min=1),
    metavar="N",
    help="Prompts of each category.  [default: 2, or all of --prompts]",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Prompts: one a line, or .jsonl with 'prompt' or 'turns'.  [default: Spec-Bench's]",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    metavar="N",
    help="Most tokens of an answer.",
)
@click.option(
    "--only",
    "sections",
    callback=_split(SECTIONS),
    metavar="PARTS",
    help=f"What to measure: {', '.join(SECTIONS)}.  [default: all]",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="About how long to take: fewer rounds and prompts if need be.  [default: no limit]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="RESULT.json",
    help="Where the result is written, again and again while it grows.",
)
@click.option(
    "--no-store", is_flag=True, help="Leave the manifests alone: record no step times in them."
)
@report_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def bench_command(
    bundles: tuple[Path, ...],
    lookahead_lengths: list[int],
    layouts: tuple[str, ...],
    selections: tuple[str, ...],
    sources: tuple[tuple[str, ...], ...],
    tau: float,
    threads: int | None,
    per_category: int | None,
    prompts: Path | None,
    new_tokens: int,
    sections: tuple[str, ...],
    minutes: float | None,
    out: Path | None,
    report: RunReport,
    *,
    no_store: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure one or more BUNDLES in one run, side by side.

    Times of single steps, their growth, prefill, decoding plainly and with lookaheads, and memory;
    the times of steps are stored in the bundles' manifests. What was measured before Ctrl-C is
    printed and written as well, marked as incomplete.
    """
    if out is not None:
        _check_writable(out)
    from la_export.bench.speed.questions import hash_questions
    from la_export.bench.speed.record import Section, Selection, Settings
    from la_export.bench.speed.run import SpeedRun
    from la_export.bench.speed.subjects import open_subjects
    from la_export.cli.console import make_console
    from la_runtime.layout import Layout
    from la_runtime.source_names import SourceName

    threads = threads or len(os.sched_getaffinity(0))
    wanted = tuple(Section(name) for name in sections or SECTIONS)

    def keep(record: SpeedRecord) -> None:
        if out is not None:
            _write(record, out)

    with _Lines(make_console(quiet=quiet)) as progress, ExitStack() as opened:
        memory = {}
        if Section.MEMORY in wanted:
            memory = _measure_memory(bundles, threads, progress)
        progress.begin("opening the bundles")
        subjects = opened.enter_context(open_subjects(bundles, threads=threads))
        _check_lengths(subjects, lookahead_lengths)
        questions: tuple[Question, ...] = ()
        if Section.DECODING in wanted:
            questions = _load_questions(subjects, prompts, per_category, new_tokens)
        settings = Settings(
            threads=threads,
            sections=wanted,
            lookahead_lengths=tuple(lookahead_lengths),
            layouts=tuple(Layout(name) for name in layouts),
            selections=tuple(Selection(name) for name in selections),
            sources=tuple(tuple(map(SourceName, names)) for names in sources),
            tau=tau if "threshold" in selections else None,
            prompts=_SHIPPED_PROMPTS if prompts is None else prompts.name,
            prompts_sha256=hash_questions(questions) if questions else None,
            per_category=per_category,
            new_tokens=new_tokens,
            minutes=minutes,
        )
        run = SpeedRun(subjects, questions, settings, memory=memory, progress=progress, keep=keep)
        complete = False
        try:
            run.measure()
            complete = True
        finally:
            progress.end()
            record = run.record(complete=complete)
            keep(record)
            show_record(record, as_json=as_json)
        if not no_store:
            _store(record, subjects)
    report.make(record, as_json=as_json)


def _measure_memory(
    bundles: tuple[Path, ...], threads: int, progress: _Lines
) -> dict[str, MemoryFigures]:
    """Memory of processes, by bundle. Before this one opens any: pages it shares would not count.

    Raises:
        LookaheadError: a bundle cannot be opened.
    """
    from la_export.bench.speed.processes import measure_memory
    from la_export.bench.speed.subjects import name_bundles
    from la_runtime.bundle import open_bundle

    names = name_bundles(bundles)
    for folder in bundles:
        open_bundle(folder)
    memory = {}
    for name, folder in zip(names, bundles, strict=True):
        progress.begin(f"memory of processes over {name}")
        memory[name] = measure_memory(folder, threads=threads)
    return memory


def _check_writable(out: Path) -> None:
    """Refuse a place for the result before the long work."""
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--out {out} cannot be written; give a file in a writable folder")


def _check_lengths(subjects: tuple[Subject, ...], lengths: list[int]) -> None:
    """Refuse a length that no bundle was built for."""
    built = {k for subject in subjects for k in subject.manifest.lookahead_lengths}
    unknown = [k for k in lengths if k != 0 and k not in built]
    if unknown:
        raise UsageError(
            f"no bundle was built for k = {unknown[0]}; they have "
            f"{', '.join(map(str, sorted(built)))}: choose of these or build one with --k"
        )


def _load_questions(
    subjects: tuple[Subject, ...], prompts: Path | None, per_category: int | None, new_tokens: int
) -> tuple[Question, ...]:
    """The questions that leave room for their answers in every bundle."""
    from la_export.bench.speed.questions import load_questions

    def fits(text: str) -> bool:
        return all(
            len(subject.engine.encode(text, chat=True)) + new_tokens <= subject.context
            for subject in subjects
        )

    return load_questions(prompts, per_category=per_category, fits=fits)


def _store(record: SpeedRecord, subjects: tuple[Subject, ...]) -> None:
    """Record the step times in the manifests."""
    from la_export.bench.speed.stored import make_step_times, store_step_times

    for subject, run in zip(subjects, record.bundles, strict=True):
        times = make_step_times(record, run)
        if times is not None:
            store_step_times(subject.engine.bundle, times)


def _write(record: SpeedRecord, out: Path) -> None:
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(partial, out)
    except OSError as error:
        raise HostError(
            f"could not write the result {out}: {error.strerror or error}; free some space or "
            "choose another --out"
        ) from error


class _Lines:
    """A line for each part of a run; in a terminal, how far the running one has come.

    Args:
        console: where to write.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._title = ""

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, title: str) -> None:
        self.end()
        self._title = title
        if self._console.is_terminal and not self._console.quiet:
            self._status = self._console.status(title)
            self._status.start()
        else:
            self._console.print(title)

    def advance(self, done: int, total: int) -> None:
        if self._status is not None:
            self._status.update(f"{self._title}   {done} of {total}")

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
            self._console.print(f"  {self._title}")
