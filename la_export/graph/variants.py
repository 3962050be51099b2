"""Graphs beside the portable one, with the same weights, that serve one backend better.

ONNX Runtime computes every output of a graph whether it is fetched or not, so an output that is
rarely asked for needs a graph without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from numpy.typing import NDArray

from la_export.graph.check import check_lean_file
from la_export.graph.lean import make_lean
from la_export.graph.parity import check_parity
from la_export.graph.sliced_session import open_session
from la_export.graph.tokens_only import check_tokens_only
from la_export.options import Precision
from la_export.reference import TorchReference
from la_runtime.bundle import GRAPH_PATH, CheckResult, GraphVariant
from la_runtime.contract import Axis, CacheForm, Contract, Dtype, KvOrder, Name, RowPlaces
from la_runtime.errors import CheckError
from la_runtime.storage import to_stored

__all__ = [
    "CPU_BACKEND",
    "CPU_GRAPH_FILE",
    "CPU_OMITS",
    "check_same_operators",
    "check_variant",
    "check_variants",
    "write_cpu_variant",
]

CPU_BACKEND: Final = "ort-cpu"
CPU_GRAPH_FILE: Final = "model.ort-cpu.onnx"
# 0.25 ms a row over 49,152 logits; greedy decoding and sampling never read it.
CPU_OMITS: Final = (Name.LOGSUMEXP.value,)
_SIZES: Final = {Axis.BATCH: 2, Axis.BLOCK: 4, Axis.PAST: 5, Axis.KEYS: 9, Axis.ROWS: 3}
_SEED: Final = 4711


def write_cpu_variant(path: Path, contract: Contract, precision: Precision) -> GraphVariant | None:
    """Write the graph for ONNX Runtime's CPU provider; both share the weights' file.

    It has no `CPU_OMITS`. Where it computes in float32 it is lean as well, see `lean`, but for
    models whose scores are softcapped: their attention is no operator that could be rewritten.

    Args:
        path: the portable graph.
        contract: of it.
        precision: of it.

    Returns:
        What the manifest says of the variant; None in a precision the provider does not have.
    """
    if contract.compute_dtype is Dtype.BFLOAT16:
        return None
    variant = GraphVariant(
        path=str(PurePosixPath(GRAPH_PATH).with_name(CPU_GRAPH_FILE)),
        backend=CPU_BACKEND,
        omits=CPU_OMITS,
    )
    model = ir.load(path)
    kept = [output for output in model.graph.outputs if output.name not in CPU_OMITS]
    model.graph.outputs[:] = kept
    has_attention = any(node.op_type == "Attention" for node in model.graph)
    if contract.compute_dtype is Dtype.FLOAT32 and has_attention:
        variant = variant.model_copy(
            update={
                "kv_order": KvOrder.SEQUENCE_MAJOR,
                "cache_form": CacheForm.SCATTER,
                "row_places": RowPlaces.CHOSEN,
            }
        )
        make_lean(model, contract, variant.contract_of(contract), precision=precision)
    else:
        common_passes.RemoveUnusedNodesPass()(model)
    ir.save(model, path.with_name(CPU_GRAPH_FILE))
    return variant


def check_variant(
    path: Path,
    variant_path: Path,
    variant: GraphVariant,
    reference: TorchReference,
    *,
    contract: Contract,
    context: int,
    threads: int,
) -> tuple[CheckResult, ...]:
    """Check a variant as its kind allows: against the portable graph, or as that one was checked.

    Args:
        path: the portable graph, already checked.
        variant_path: the variant.
        variant: what the manifest says of it.
        reference: transformers' own model in the graph's precision.
        contract: of the portable graph.
        context: positions the bundle serves.
        threads: threads for ONNX Runtime.

    Raises:
        CheckError: the first problem.
    """
    if variant.cache_form is None:
        check = check_same_operators
        return (check(path, variant_path, contract, context=context, threads=threads),)
    own = variant.contract_of(contract)
    edge = check_lean_file(variant_path, own, variant.omits)
    parity = check_parity(
        variant_path,
        own,
        reference,
        context=context,
        threads=threads,
        omits=variant.omits,
        prefix=f"{variant.backend}.",
    )
    return (edge, *parity)


def check_variants(
    path: Path,
    variants: Sequence[tuple[Path, GraphVariant]],
    reference: TorchReference,
    *,
    contract: Contract,
    context: int,
    threads: int,
) -> tuple[CheckResult, ...]:
    """Check all variants of a graph; one for tokens alone stands behind the one with the adapter.

    Args:
        path: the portable graph, already checked.
        variants: each with its path.
        reference: transformers' own model in the graph's precision.
        contract: of the portable graph.
        context: positions the bundle serves.
        threads: threads for ONNX Runtime.

    Raises:
        CheckError: the first problem.
    """
    checks: list[CheckResult] = []
    adapted = path
    for variant_path, variant in variants:
        if variant.tokens_only:
            checks.append(
                check_tokens_only(
                    adapted,
                    variant_path,
                    reference,
                    contract=variant.contract_of(contract),
                    context=context,
                    threads=threads,
                )
            )
            continue
        adapted = variant_path
        checks += check_variant(
            path,
            variant_path,
            variant,
            reference,
            contract=contract,
            context=context,
            threads=threads,
        )
    return tuple(checks)


def check_same_operators(
    path: Path, variant: Path, contract: Contract, *, context: int, threads: int
) -> CheckResult:
    """Require a variant of the same operators to have the same outputs, equal bit for bit.

    Args:
        path: the portable graph, already checked.
        variant: the variant.
        contract: of the portable graph.
        context: positions the bundle serves.
        threads: threads for ONNX Runtime.

    Raises:
        CheckError: an output is missing, left over or different.
    """
    onnx.checker.check_model(str(variant))
    feeds = _random_feeds(contract, context)
    expected = open_session(path, threads).run(feeds)
    found = open_session(variant, threads).run(feeds)
    wanted = [spec.name for spec in contract.outputs if spec.name not in CPU_OMITS]
    if list(found) != wanted:
        raise CheckError(f"{variant.name} has outputs {list(found)}, expected {wanted}")
    unequal = [name for name in wanted if not np.array_equal(found[name], expected[name])]
    if unequal:
        raise CheckError(f"{variant.name} differs from the portable graph in {unequal[0]}")
    return CheckResult(
        name="ort_cpu_variant",
        value=float(len(unequal)),
        bound=0.0,
        detail=f"{len(wanted)} outputs equal to the portable graph's, bit for bit",
    )


def _random_feeds(contract: Contract, context: int) -> dict[str, NDArray[np.generic]]:
    rng = np.random.default_rng(_SEED)
    feeds: dict[str, NDArray[np.generic]] = {}
    for spec in contract.inputs:
        shape = [axis if isinstance(axis, int) else _SIZES[axis] for axis in spec.axes]
        match spec.name:
            case Name.INPUT_IDS:
                feeds[spec.name] = rng.integers(0, contract.vocab_size + contract.k_max, shape)
            case Name.POSITION_IDS:
                feeds[spec.name] = rng.integers(0, context, shape)
            case Name.LOGITS_ROWS:
                feeds[spec.name] = rng.integers(0, _SIZES[Axis.BLOCK], shape)
            case Name.WRITE_INDEX:
                feeds[spec.name] = rng.integers(0, _last_write_index(contract) + 1, shape)
            case _:
                feeds[spec.name] = to_stored(rng.normal(size=shape), spec.dtype)
    return feeds


def _last_write_index(contract: Contract) -> int:
    assert contract.capacity is not None, "cache form scatter has a capacity"
    return contract.capacity - _SIZES[Axis.BLOCK]
