"""Runs the commands of a check as child processes and reads the JSON they print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from la_export.bench.gpu.steps import StepError

__all__ = ["RunChild", "run_child"]

_LAST_WORDS: Final = 600


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
        StepError: it ended otherwise; the message ends with what it said last.
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
            raise StepError(f"{_describe_end(code)}: {_last_words(said)}", found)
        return found


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
    try:
        record = json.loads(path.read_text("utf-8", "replace"))
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
