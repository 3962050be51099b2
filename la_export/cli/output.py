"""What `la-export verify` shows people, whatever it shows it with."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from la_export.verify.ladder import LadderProgress
from la_export.verify.report import LadderReport

__all__ = ["Output"]


class Output(Protocol):
    """Writes to stderr, or nothing when it is to be quiet."""

    def lines(self) -> AbstractContextManager[LadderProgress]:
        """Progress, a line a rung."""
        ...

    def ladder(self, report: LadderReport) -> None:
        """What each rung measured and found."""
        ...

    def line(self, text: str) -> None:
        """A line."""
        ...
