"""The lean graph without its adapter, for passes that have no lookahead.

An adapter does nothing there, but its operators are in the way: a twentieth of a pass of one row of
SmolLM2-135M in int8. Both graphs name the same weights and the same packed forms of them, so a
process that opens both holds the weights once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import onnx

from la_export.graph.sample import make_sample
from la_export.graph.sliced_session import open_session
from la_export.reference import TorchReference
from la_runtime.bundle import CheckResult, GraphVariant
from la_runtime.contract import Contract, Name
from la_runtime.errors import CheckError

__all__ = ["TOKENS_ONLY_FILE", "check_tokens_only", "write_tokens_only"]

TOKENS_ONLY_FILE: Final = "model.ort-cpu-tokens.onnx"


def write_tokens_only(folder: Path, variant: GraphVariant) -> GraphVariant:
    """Write it beside a lean graph that has an adapter.

    Args:
        folder: of the bundle.
        variant: what the manifest says of that graph.
    """
    path = folder / variant.path
    # As it is, with the packed forms that its weights name: `onnx_ir` would drop them.
    model = onnx.load(path, load_external_data=False)
    _drop_adapter(model.graph)
    target = path.with_name(TOKENS_ONLY_FILE)
    target.write_bytes(model.SerializeToString())
    relative = str(target.relative_to(folder).as_posix())
    return variant.model_copy(update={"path": relative, "tokens_only": True})


def _drop_adapter(graph: onnx.GraphProto) -> None:
    """Whoever reads a sum of the adapter's reads what it is added to."""
    plain = {node.output[0]: node.input[0] for node in graph.node if _adds_rows(node)}
    assert plain, "the graph has an adapter"
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name in plain and not _adds_rows(node):
                node.input[place] = plain[name]
    needed = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed & set(node.output):
            kept.append(node)
            needed |= set(node.input)
    nodes = kept[::-1]
    weights = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(weights)


def _adds_rows(node: onnx.NodeProto) -> bool:
    """Whether it is what `lean.lookahead_rows` has put in; the cache's do not add."""
    return node.op_type == "ScatterND" and any(a.name == "reduction" for a in node.attribute)


def check_tokens_only(
    adapted: Path,
    path: Path,
    reference: TorchReference,
    *,
    contract: Contract,
    context: int,
    threads: int,
) -> CheckResult:
    """Require it to give what the graph with the adapter gives, equal bit for bit.

    Args:
        adapted: that graph, already checked.
        path: the graph without.
        reference: gives the sample's cache.
        contract: of both.
        context: positions the bundle serves.
        threads: threads for ONNX Runtime.

    Raises:
        CheckError: an output is missing, left over or different.
    """
    sample = make_sample(contract, reference, context=context)
    sessions = [open_session(graph, threads) for graph in (adapted, path)]
    for feeds in (sample.make_feeds(), sample.make_prompt_feeds()):
        ids = np.asarray(feeds[Name.INPUT_IDS], np.int64)
        feeds[Name.INPUT_IDS] = np.where(ids < contract.vocab_size, ids, 0)
        expected, found = (session.run(feeds) for session in sessions)
        if list(found) != list(expected):
            raise CheckError(f"{path.name} has outputs {list(found)}, expected {list(expected)}")
        unequal = [name for name in found if not np.array_equal(found[name], expected[name])]
        if unequal:
            raise CheckError(f"{path.name} differs from {adapted.name} in {unequal[0]}")
    return CheckResult(
        name="ort_cpu_tokens_only",
        value=0.0,
        bound=0.0,
        detail=f"{len(found)} outputs for tokens equal to those with the adapter, bit for bit",
    )
