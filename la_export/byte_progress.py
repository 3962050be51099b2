"""Tells how much of a model's weights has been read or written, where that takes minutes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["ByteProgress", "MeteredReader", "ignore_bytes"]

# Bytes done, and bytes in all.
ByteProgress: TypeAlias = Callable[[int, int], None]


def ignore_bytes(_done: int, _total: int) -> None:
    """Tell nobody."""


@dataclass(slots=True, kw_only=True)
class MeteredReader:
    """A reader of parameters that counts what it gives out, as float32.

    Args:
        source: gives one parameter.
        report: is told.
        total: bytes that will be read.
        done: bytes that have been.
    """

    source: Callable[[str], NDArray[np.float32]]
    report: ByteProgress
    total: int
    done: int = 0

    def __call__(self, parameter: str) -> NDArray[np.float32]:
        array = self.source(parameter)
        self.add(array.size)
        return array

    def add(self, count: int) -> None:
        """So many numbers were read."""
        self.done = min(self.done + count * np.dtype(np.float32).itemsize, self.total)
        self.report(self.done, self.total)
