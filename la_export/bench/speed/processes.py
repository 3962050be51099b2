"""Memory of processes that have a bundle open, alone and two at a time.

Each is a process of its own: what the measuring one holds would count otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from la_export.bench.speed.record import MemoryFigures
from la_runtime.errors import NotRunError

__all__ = ["Holder", "hold_bundle", "measure_memory", "pss_bytes"]

_MODULE: Final = "la_export.bench.speed.holder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has opened a bundle and decoded a few tokens.

    Args:
        process_id: of it.
        open_s: seconds it took to open the bundle.
        peak_rss_bytes: the most it has held.
    """

    process_id: int
    open_s: float
    peak_rss_bytes: int


def pss_bytes(process_id: int) -> int:
    """Proportional set size: a page that several processes have in memory counts by its share."""
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


@contextmanager
def hold_bundle(folder: Path, *, threads: int) -> Iterator[Holder]:
    """A process that holds a bundle open until the block ends.

    Raises:
        NotRunError: it ended before it had opened the bundle.
    """
    command = [sys.executable, "-m", _MODULE, str(folder.resolve()), "--threads", str(threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None, "it is piped"
        assert process.stderr is not None, "it is piped"
        try:
            line = process.stdout.readline()
            if not line:
                reason: Sequence[str] = process.stderr.read().strip().splitlines() or ("no reason",)
                raise NotRunError(
                    f"a process that was to hold {folder} open ended: {reason[-1]}; run "
                    f"'la-export inspect {folder}', or leave memory out of --only"
                )
            said: Any = json.loads(line)
            yield Holder(
                process_id=process.pid,
                open_s=said["open_s"],
                peak_rss_bytes=said["peak_rss_bytes"],
            )
        finally:
            process.kill()


def measure_memory(folder: Path, *, threads: int) -> MemoryFigures:
    """Memory of one process over a bundle, then of two at the same time.

    The first one brings the bundle's files into the page cache and is not looked at.

    Raises:
        NotRunError: a process ended early.
    """
    with hold_bundle(folder, threads=threads):
        pass
    with hold_bundle(folder, threads=threads) as alone:
        pss = pss_bytes(alone.process_id)
    with ExitStack() as both:
        pair = [both.enter_context(hold_bundle(folder, threads=threads)) for _ in range(2)]
        shared = tuple(pss_bytes(holder.process_id) for holder in pair)
    return MemoryFigures(
        open_s=alone.open_s,
        pss_bytes=pss,
        peak_rss_bytes=alone.peak_rss_bytes,
        shared_pss_bytes=shared,
    )
