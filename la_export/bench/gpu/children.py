"""Runs the commands of a check as child processes and reads the JSON they print."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

from la_export.bench.gpu.steps import Status, StepError
from la_runtime.errors import ExitCode

__all__ = ["TERMINATED", "RunChild", "end_when_terminated", "run_child"]

TERMINATED: Final = 128 + signal.SIGTERM
_LAST_WORDS: Final = 600
_NOT_RUN: Final = frozenset({int(ExitCode.COULD_NOT_RUN), int(ExitCode.ENVIRONMENT)})


class RunChild(Protocol):
    """Runs a command, see `run_child`."""

    def __call__(
        self, command: Sequence[str], *, timeout_s: float, good_codes: Sequence[int] = (0,)
    ) -> dict[str, Any]: ...


def run_child(
    command: Sequence[str], *, timeout_s: float, good_codes: Sequence[int] = (0,)
) -> dict[str, Any]:
    """Run a command that prints one JSON object to stdout, or nothing.

    Args:
        command: program and arguments.
        timeout_s: it and whatever it started are killed after this many seconds.
        good_codes: exit codes that are no failure.

    Returns:
        The object; empty when it printed none.

    Raises:
        StepError: it ended otherwise; the message ends with what it said last. Where the exit code
            says that it could not run, so does the error's status.
    """
    with tempfile.TemporaryDirectory() as folder:
        printed, said = Path(folder, "printed"), Path(folder, "said")
        with printed.open("wb") as stdout, said.open("wb") as stderr:
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                code = child.wait(timeout_s)
            except subprocess.TimeoutExpired as error:
                raise StepError(
                    f"gave no answer within {timeout_s:.0f} s; last words: {_last_words(said)}"
                ) from error
            finally:
                _end(child)
        found = _read_object(printed)
        if code not in good_codes:
            status = Status.NOT_RUN if code in _NOT_RUN else Status.FAILED
            raise StepError(f"{_describe_end(code)}: {_last_words(said)}", found, status=status)
        return found


def end_when_terminated() -> None:
    """Let SIGTERM end this process as an error does, so that its children end with it."""

    def end(_: int, __: FrameType | None) -> None:
        sys.exit(TERMINATED)

    signal.signal(signal.SIGTERM, end)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child that still runs, with all that it started; it leads a group of its own."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"died of {signal.Signals(-code).name}"


def _last_words(path: Path) -> str:
    text = " ".join(path.read_text("utf-8", "replace").split())
    return text[-_LAST_WORDS:] or "none"


def _read_object(path: Path) -> dict[str, Any]:
    """The first object that begins a line; libraries print lines of their own around it."""
    text = path.read_text("utf-8", "replace")
    for start in re.finditer(r"^\{", text, re.MULTILINE):
        try:
            record, _ = json.JSONDecoder().raw_decode(text, start.start())
        except ValueError:
            continue
        return dict(record)
    return {}
