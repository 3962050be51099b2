"""Rung 1: the files are those of the manifest, and the graphs keep the contract.

Digests, sizes and strays are checked when the bundle is opened, before the ladder exists.
"""

from __future__ import annotations

from la_export.verify.findings import Finding
from la_export.verify.ladder import Ladder

__all__ = ["check_files"]


def check_files(ladder: Ladder) -> Finding:
    """Graphs against the contract; their inputs and outputs alone without the checkpoint.

    Raises:
        CheckError: a graph breaks the contract.
    """
    manifest = ladder.manifest
    opened = f"{len(manifest.files)} digests, inputs and outputs of the graph that ran"
    if ladder.source is None:
        return Finding(detail=opened)
    return Finding(detail=f"{opened}; {ladder.source.check_graphs(ladder.bundle)}")
