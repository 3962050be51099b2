"""What commands show on stderr while they work, and how they keep libraries quiet."""

from __future__ import annotations

import logging
import os
import time
import warnings
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.status import Status

if TYPE_CHECKING:
    from la_export.pipeline import Stage, StageReport
    from la_export.plan import PlanReport

__all__ = ["StageLines", "format_bytes", "make_console", "make_output_console", "quiet_libraries"]

# Columns when nobody sees them on a screen.
_FILE_WIDTH: Final = 200
# Seconds from one word of a long stage to the next, on a screen and in a file.
_TERMINAL_S: Final = 0.5
_FILE_S: Final = 60.0


def make_console(*, quiet: bool) -> Console:
    """A console on stderr: plain text unless it is a terminal, silent when `quiet`."""
    return _make(stderr=True, quiet=quiet)


def make_output_console() -> Console:
    """A console on stdout, for results meant for people."""
    return _make(stderr=False, quiet=False)


def _make(*, stderr: bool, quiet: bool) -> Console:
    """Shows text as it is: names and paths may hold brackets and colons.

    A file has no width to fold digests and paths at.
    """
    console = Console(
        stderr=stderr, quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=True
    )
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def quiet_libraries(*, verbose: bool) -> None:
    """Let only our own lines through, or everything with `verbose`.

    Must run before the heavy libraries are imported: some read the environment then.
    """
    if verbose:
        logging.basicConfig(level=logging.INFO)
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


class StageLines:
    """Progress as one line a stage; in a terminal, the running one is shown too.

    Args:
        console: where to write.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._plan = ""
        self._stage = ""
        self._began = self._told = 0.0

    def __enter__(self) -> StageLines:
        self._show("loading libraries")
        return self

    def __exit__(self, *_: object) -> None:
        self._hide()

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}")

    def start(self, stage: Stage) -> None:
        self._stage = stage.value
        self._began = self._told = time.monotonic()
        self._show(self._stage)

    def advance_bytes(self, done: int, total: int) -> None:
        """In a terminal the running line; in a file a line now and then."""
        now = time.monotonic()
        if done >= total or now - self._told < (_FILE_S if self._status is None else _TERMINAL_S):
            return
        self._told = now
        text = f"{self._stage}   {format_bytes(done)} of {format_bytes(total)}"
        if done:
            left = (now - self._began) * (total - done) / done
            text += f", about {format_seconds(left)} left"
        if self._status is not None:
            self._status.update(text)
        else:
            self._console.print(f"  {text}")

    def finish(self, report: StageReport) -> None:
        self._hide()
        self._console.print(
            f"  {report.stage.value:<10} {report.seconds:6.1f} s   "
            f"peak {format_bytes(report.peak_rss_bytes)}"
        )

    def start_plan(self, path: str) -> None:
        self._plan = path
        self._show(path)

    def advance(self, phase: str, step: int, num_steps: int) -> None:
        if self._status is not None:
            self._status.update(f"{self._plan}   {phase} {step}/{num_steps}")

    def finish_plan(self, plan: PlanReport) -> None:
        self._hide()
        self._console.print(f"  {plan.facts.path}   {plan.compiled.seconds:.1f} s")

    def _show(self, text: str) -> None:
        self._hide()
        if self._console.is_terminal and not self._console.quiet:
            self._status = self._console.status(text)
            self._status.start()

    def _hide(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def format_seconds(seconds: float) -> str:
    """As people say it."""
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes} min"


def format_bytes(count: int) -> str:
    """A size for people: 940 B, 12.3 MB, 1.20 GB."""
    if count < 1000:
        return f"{count} B"
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            digits = 2 if unit == "GB" else 1
            return f"{count / size:.{digits}f} {unit}"
    raise AssertionError("unreachable: every size of 1000 and more has a unit")
