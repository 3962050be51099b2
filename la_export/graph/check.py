"""Compares a written graph with the contract: names, axes, dtypes, operators, data.

Looks at the file alone. `parity` looks at what it computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir

from la_export.checkpoint.facts import OperatorCounts
from la_export.graph.passes.contract_names import IR_DTYPES
from la_export.graph.step_graph import OPSET_VERSIONS
from la_export.graph.weights import WEIGHTS_FILE
from la_runtime.bundle import CheckResult
from la_runtime.contract import CacheForm, Contract, Dtype, TensorSpec
from la_runtime.errors import CheckError

__all__ = ["check_graph_file", "check_lean_file"]

_CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan"})
_FLOATS: Final = frozenset(
    {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
)
# Angles grow with the position: rounded frequencies would turn far rows the wrong way.
_FLOAT32_SUFFIX: Final = "inv_freq"
_NUM_ATTENTION_INPUTS: Final = 4
# Larger constants belong into the external file, where they can be mapped.
_INLINE_BYTES: Final = 1024


def check_graph_file(path: Path, contract: Contract, counts: OperatorCounts) -> CheckResult:
    """Check a graph file against its contract and with `onnx.checker`.

    Args:
        path: the written `.onnx` file, external data beside it.
        contract: what it must keep.
        counts: operators of the model that was traced.

    Returns:
        A passed check: no problem found.

    Raises:
        CheckError: the first problem, by name.
    """
    _check_validity(path, infers_shapes=True)
    model = ir.load(path)
    for problem in _problems(model, contract, path.parent, counts):
        raise CheckError(f"{path.name} breaks the contract: {problem}")
    nodes = len(model.graph)
    return CheckResult(
        name="contract",
        value=0.0,
        bound=0.0,
        detail=f"{nodes} nodes, opset {model.opset_imports['']}",
    )


def check_lean_file(path: Path, contract: Contract, omits: Collection[str]) -> CheckResult:
    """Check the lean variant's edge against its contract, and the file with `onnx.checker`.

    Args:
        path: the written `.onnx` file, external data beside it.
        contract: of the variant.
        omits: outputs of the contract that it does not have.

    Raises:
        CheckError: the first problem, by name.
    """
    _check_validity(path, infers_shapes=False)  # it knows no shapes of others' operators
    model = ir.load(path)
    outputs = tuple(spec for spec in contract.outputs if spec.name not in omits)
    for problem in (
        *_edge_problems("input", model.graph.inputs, contract.inputs),
        *_edge_problems("output", model.graph.outputs, outputs),
        *(
            p
            for v in model.graph.initializers.values()
            for p in _initializer_problems(v, path.parent)
        ),
    ):
        raise CheckError(f"{path.name} breaks the contract: {problem}")
    return CheckResult(
        name="lean_contract", value=0.0, bound=0.0, detail=f"{len(model.graph)} nodes"
    )


def _check_validity(path: Path, *, infers_shapes: bool) -> None:
    try:
        onnx.checker.check_model(str(path), full_check=infers_shapes)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise CheckError(f"{path.name} is refused by onnx.checker: {error}") from error


def _problems(
    model: ir.Model, contract: Contract, folder: Path, counts: OperatorCounts
) -> Iterator[str]:
    graph = model.graph
    yield from _edge_problems("input", graph.inputs, contract.inputs)
    yield from _edge_problems("output", graph.outputs, contract.outputs)
    yield from _operator_problems(model, contract)
    yield from _count_problems(graph, contract, counts)
    for value in graph.initializers.values():
        yield from _dtype_problems(value, contract)
        yield from _initializer_problems(value, folder)


def _edge_problems(side: str, values: object, specs: tuple[TensorSpec, ...]) -> Iterator[str]:
    found = [_describe(value) for value in values]  # type: ignore[attr-defined]
    expected = [
        (str(spec.name), IR_DTYPES[spec.dtype], tuple(_axis(axis) for axis in spec.axes))
        for spec in specs
    ]
    if [entry[0] for entry in found] != [entry[0] for entry in expected]:
        missing = sorted({e[0] for e in expected} - {f[0] for f in found})
        extra = sorted({f[0] for f in found} - {e[0] for e in expected})
        yield f"{side}s differ: missing {missing}, unexpected {extra}, or their order"
        return
    for got, wanted in zip(found, expected, strict=True):
        if got != wanted:
            yield f"{side} {wanted[0]} is {got[1:]}, expected {wanted[1:]}"


def _describe(value: ir.Value) -> tuple[str, ir.DataType | None, tuple[str, ...]]:
    axes = () if value.shape is None else tuple(_axis(axis) for axis in value.shape)
    return str(value.name), value.dtype, axes


def _axis(axis: object) -> str:
    return str(axis.value) if isinstance(axis, ir.SymbolicDim) else str(axis)


def _operator_problems(model: ir.Model, contract: Contract) -> Iterator[str]:
    opsets = model.opset_imports
    if set(opsets) != {""}:
        yield f"operator sets {sorted(opsets)}, expected the standard one only"
    elif opsets[""] != OPSET_VERSIONS[contract.cache_form]:
        yield f"opset {opsets['']}, expected {OPSET_VERSIONS[contract.cache_form]}"
    for node in model.graph:
        yield from _form_problems(node)
        if node.domain != "":
            yield f"operator {node.domain}::{node.op_type} is not a standard one"
        if node.op_type in _CONTROL_FLOW:
            yield f"operator {node.op_type} is control flow"
        source = node.inputs[0] if node.inputs else None
        if node.op_type == "Transpose" and source is not None and source.is_initializer():
            yield f"weight {source.name} is transposed in the graph"


def _form_problems(node: ir.Node) -> Iterator[str]:
    """Forms of a standard operator that compilers refuse, or that compute in too few bits."""
    if node.op_type == "Attention" and (
        len(node.outputs) != 1 or len(node.inputs) != _NUM_ATTENTION_INPUTS
    ):
        yield (
            f"operator Attention has {len(node.inputs)} inputs and {len(node.outputs)} outputs, "
            f"expected {_NUM_ATTENTION_INPUTS} and 1"
        )
    if node.op_type == "RMSNormalization":
        stash = ir.DataType(node.attributes.get_int("stash_type", ir.DataType.FLOAT))
        if stash != ir.DataType.FLOAT:
            yield f"a normalization is computed in {stash}, expected {ir.DataType.FLOAT}"


def _count_problems(graph: ir.Graph, contract: Contract, counts: OperatorCounts) -> Iterator[str]:
    found = Counter(node.op_type for node in graph)
    expected = {
        "Attention": counts.attentions,
        "RotaryEmbedding": counts.rotations,
        "RMSNormalization": counts.norms,
        "Cos": counts.tables,
        "Sin": counts.tables,
        "TensorScatter": 2 * contract.num_layers * (contract.cache_form is CacheForm.SCATTER),
    }
    for operator, count in expected.items():
        if found[operator] != count:
            yield f"{found[operator]} {operator} operators, expected {count}"


def _dtype_problems(value: ir.Value, contract: Contract) -> Iterator[str]:
    tensor = value.const_value
    if tensor is not None and tensor.size == 1:
        return  # a number of what the model's code computes in float32
    is_frequencies = str(value.name).endswith(_FLOAT32_SUFFIX)
    expected = IR_DTYPES[Dtype.FLOAT32 if is_frequencies else contract.compute_dtype]
    if value.dtype in _FLOATS and value.dtype != expected:
        yield f"initializer {value.name} is {value.dtype}, expected {expected}"


def _initializer_problems(value: ir.Value, folder: Path) -> Iterator[str]:
    tensor = value.const_value
    if tensor is None:
        yield f"initializer {value.name} has no value"
    elif not isinstance(tensor, ir.ExternalTensor):
        if tensor.nbytes > _INLINE_BYTES:
            yield f"initializer {value.name} of {tensor.nbytes} bytes is not in {WEIGHTS_FILE}"
    elif tensor.location != WEIGHTS_FILE:
        yield f"initializer {value.name} is in {tensor.location}, expected {WEIGHTS_FILE}"
    else:
        size = (folder / WEIGHTS_FILE).stat().st_size
        if (tensor.offset or 0) + tensor.nbytes > size:
            yield f"initializer {value.name} ends behind the end of {WEIGHTS_FILE}"
