"""Rung 1: the files are those of the manifest, the graphs keep the contract, the weights are right.

Digests, sizes and strays are checked when the bundle is opened, before the ladder exists.
"""

from __future__ import annotations

from la_export.verify.findings import Figure, Finding
from la_export.verify.ladder import Ladder
from la_export.verify.passes import describe_scores
from la_runtime.backends import open_backend
from la_runtime.bundle import Bundle

__all__ = ["check_files"]

_ROWS = 8


def check_files(ladder: Ladder) -> Finding:
    """Graphs against the contract, and weights against the checkpoint's, number by number.

    Without the checkpoint: inputs and outputs alone. The portable graph's best scores are those of
    its logits in both cases, also where another variant of it is what runs.

    Raises:
        CheckError: a graph breaks the contract.
    """
    manifest = ladder.manifest
    problems = _check_portable_graph(ladder)
    opened = f"{len(manifest.files)} digests, inputs and outputs of the graph that ran"
    if ladder.source is None:
        return Finding(problems=tuple(problems), detail=opened)
    checked = ladder.source.check_graphs(ladder.bundle)
    graphs = (manifest.graph, *(variant.path for variant in manifest.variants))
    equal, different = ladder.source.compare_weights([ladder.bundle.path(path) for path in graphs])
    problems += different
    return Finding(
        figures=(Figure(name="equal weights", value=equal),),
        problems=tuple(problems),
        detail=f"{opened}; {checked}; {equal} weights are the checkpoint's",
    )


def _check_portable_graph(ladder: Ladder) -> list[str]:
    """Best scores of the portable graph, when it is not what runs."""
    manifest = ladder.manifest
    if not any(variant.backend == ladder.backend_name for variant in manifest.variants):
        return []
    bundle = Bundle(ladder.bundle.root, manifest.model_copy(update={"variants": ()}))
    backend = open_backend(ladder.backend_name, bundle, threads=ladder.threads)
    try:
        text = ladder.prompts[0].token_ids[:_ROWS]
        return [
            f"{manifest.graph}: {line}"
            for line in describe_scores(backend, text, context=ladder.context)
        ]
    finally:
        backend.close()
