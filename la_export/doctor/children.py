"""Runs a probe in a process of its own and reads what it printed, however that process ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Answer", "run_probe"]

_PROBES: Final = "la_export.doctor.probes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a probe said.

    Args:
        records: the JSON objects it printed, one a line.
        failure: why it ended early; empty when it ended well.
        last_words: the last line it wrote to stderr.
    """

    records: tuple[dict[str, Any], ...]
    failure: str
    last_words: str


def run_probe(probe: str, arguments: Sequence[str] = (), *, timeout_s: float) -> Answer:
    """Run a module of `probes` in a child process.

    What it prints goes through files: a pipe could be held open by a process it left behind.

    Args:
        probe: the module's name.
        arguments: of the probe.
        timeout_s: it is killed after this many seconds.
    """
    command = [sys.executable, "-m", f"{_PROBES}.{probe}", *arguments]
    # What a probe said before it crashed must not stay in a buffer.
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=said, env=environment
        )
        try:
            ended = _describe_end(child.wait(timeout_s))
        except subprocess.TimeoutExpired:
            ended = f"gave no answer within {timeout_s:g} s"
        finally:
            child.kill()
            child.wait()
        last_words = _last_line(_read(said))
        failure = f"{ended}: {last_words}" if ended and last_words else ended
        return Answer(
            records=tuple(_records(_read(printed))), failure=failure, last_words=last_words
        )


def _describe_end(code: int) -> str:
    """How a process ended, empty when well."""
    if code >= 0:
        return f"ended with {code}" if code else ""
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"


def _read(stream: Any) -> str:
    stream.seek(0)
    text: str = stream.read().decode("utf-8", "replace")
    return text


def _last_line(text: str) -> str:
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "")


def _records(text: str) -> list[dict[str, Any]]:
    """The lines that are JSON objects; libraries print lines of their own."""
    found = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found
