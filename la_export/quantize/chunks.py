"""Rows of a matrix some at a time, on all cores: what stands between is as large as the matrix."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

__all__ = ["for_each_chunk"]

# NumPy lets others run while it computes; more threads than these read memory in each other's way.
_MOST_THREADS: Final = 8


def for_each_chunk(num_rows: int, size: int, work: Callable[[slice], None]) -> None:
    """Call `work` for every run of at most `size` rows, several at a time.

    Args:
        num_rows: of the matrix.
        size: most rows of a run.
        work: reads and writes these rows alone.
    """
    runs = [slice(start, start + size) for start in range(0, num_rows, size)]
    threads = min(_count_cores(), _MOST_THREADS, len(runs))
    if threads <= 1:
        for run in runs:
            work(run)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, runs):
            pass


def _count_cores() -> int:
    """Those this process may use, where the system says."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
