"""Small decoders written by the contract, as graphs on disk: quick to make, and easy to spoil."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.helper import make_node

from la_runtime.contract import CacheForm, Contract, Dtype, Name, TensorSpec

__all__ = ["CONTEXT", "NUM_HEADS", "make_contract", "make_model", "save_model"]

CONTEXT: Final = 64
NUM_HEADS: Final = 4
_MLP_SIZE: Final = 48
_OPSETS: Final = {CacheForm.CONCAT: 23, CacheForm.SCATTER: 24}
_NUMPY_TYPES: Final = {
    Dtype.INT64: np.dtype(np.int64),
    Dtype.FLOAT32: np.dtype(np.float32),
    Dtype.FLOAT16: np.dtype(np.float16),
    Dtype.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}


def make_contract(
    cache_form: CacheForm = CacheForm.CONCAT,
    dtype: Dtype = Dtype.FLOAT16,
    *,
    k_max: int = 8,
    num_layers: int = 2,
) -> Contract:
    """The contract of a decoder with grouped-query attention and a context of `CONTEXT`."""
    widest_pass = max(CONTEXT + k_max, (k_max + 1) ** 2)
    return Contract(
        cache_form=cache_form,
        num_layers=num_layers,
        num_kv_heads=2,
        head_dim=16,
        hidden_size=32,
        vocab_size=80,
        k_max=k_max,
        top_c=8,
        compute_dtype=dtype,
        kv_dtype=dtype,
        capacity=CONTEXT + widest_pass if cache_form is CacheForm.SCATTER else None,
    )


def make_model(
    contract: Contract, *, change: Callable[[list[onnx.NodeProto]], None] | None = None
) -> onnx.ModelProto:
    """A decoder of this contract with random weights.

    Args:
        contract: its inputs and outputs.
        change: spoils the list of nodes in place.
    """
    nodes, weights = _make_body(contract)
    if change is not None:
        change(nodes)
    graph = helper.make_graph(
        nodes,
        "decoder",
        [_value_info(spec) for spec in contract.inputs],
        [_value_info(spec) for spec in contract.outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = helper.make_opsetid("", _OPSETS[contract.cache_form])
    return helper.make_model(graph, opset_imports=[opset], ir_version=11)


def save_model(folder: Path, model: onnx.ModelProto) -> Path:
    """Write a graph as a bundle does, its weights beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(
        model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=1024
    )
    return path


def _value_info(spec: TensorSpec) -> onnx.ValueInfoProto:
    dtype = helper.np_dtype_to_tensor_dtype(_NUMPY_TYPES[spec.dtype])
    axes = [axis if isinstance(axis, int) else str(axis) for axis in spec.axes]
    return helper.make_tensor_value_info(str(spec.name), dtype, axes)


def _make_body(
    contract: Contract,
) -> tuple[list[onnx.NodeProto], Mapping[str, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(0)
    dtype = _NUMPY_TYPES[contract.compute_dtype]
    hidden, head_dim = contract.hidden_size, contract.head_dim
    widths = {"q": NUM_HEADS, "k": contract.num_kv_heads, "v": contract.num_kv_heads}
    weights: dict[str, np.ndarray[Any, Any]] = {}

    def weight(name: str, *shape: int) -> str:
        weights[name] = rng.normal(0.0, 0.2, shape).astype(dtype)
        return name

    def integers(name: str, *values: int) -> str:
        weights[name] = np.array(values, dtype=np.int64)
        return name

    angles = np.arange(CONTEXT)[:, None] / 10_000 ** (np.arange(head_dim // 2) * 2 / head_dim)
    weights["cos"], weights["sin"] = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    integers("last_axis", -1)
    integers("flat_heads", 0, 0, NUM_HEADS * head_dim)
    nodes = [
        make_node(
            "Concat",
            [weight("embeddings", contract.vocab_size, hidden), Name.LOOKAHEAD_EMBEDDINGS],
            ["all_embeddings"],
            axis=0,
        ),
        make_node("Gather", ["all_embeddings", Name.INPUT_IDS], ["x0"], axis=0),
    ]

    def norm(source: str, target: str) -> None:
        nodes.append(
            make_node("RMSNormalization", [source, weight(f"{target}.weight", hidden)], [target])
        )

    def matmul(source: str, target: str, rows: int, columns: int) -> None:
        nodes.append(
            make_node("MatMul", [source, weight(f"{target}.weight", rows, columns)], [target])
        )

    for layer in range(contract.num_layers):
        prefix, x = f"layer{layer}", f"x{layer}"
        written = _written_names(contract, layer)
        norm(x, f"{prefix}.normed")
        for part, heads in widths.items():
            name = f"{prefix}.{part}"
            matmul(f"{prefix}.normed", f"{name}.flat", hidden, heads * head_dim)
            integers(f"{name}.heads", 0, 0, heads, head_dim)
            nodes.append(make_node("Reshape", [f"{name}.flat", f"{name}.heads"], [f"{name}.split"]))
            turned = name if part == "v" else f"{name}.turned"
            nodes.append(make_node("Transpose", [f"{name}.split"], [turned], perm=[0, 2, 1, 3]))
            if part != "v":
                nodes.append(
                    make_node("RotaryEmbedding", [turned, "cos", "sin", Name.POSITION_IDS], [name])
                )
        for part, past, output in zip(
            "kv", contract.past_names[2 * layer :], written, strict=False
        ):
            name, seen = f"{prefix}.{part}", f"{prefix}.{part}.seen"
            if contract.cache_form is CacheForm.SCATTER:
                nodes.append(
                    make_node("TensorScatter", [past, name, Name.WRITE_INDEX], [output], axis=-2)
                )
                nodes.append(make_node("Identity", [output], [seen]))
            else:
                nodes.append(make_node("Concat", [past, name], [seen], axis=2))
                nodes.append(make_node("Identity", [name], [output]))
        nodes.append(
            make_node(
                "Attention",
                [f"{prefix}.q", f"{prefix}.k.seen", f"{prefix}.v.seen", Name.ATTENTION_MASK],
                [f"{prefix}.context"],
                name=f"{prefix}.attention",
            )
        )
        nodes.append(
            make_node("Transpose", [f"{prefix}.context"], [f"{prefix}.rows"], perm=[0, 2, 1, 3])
        )
        nodes.append(make_node("Reshape", [f"{prefix}.rows", "flat_heads"], [f"{prefix}.joined"]))
        matmul(f"{prefix}.joined", f"{prefix}.attended", NUM_HEADS * head_dim, hidden)
        nodes.append(make_node("Add", [x, f"{prefix}.attended"], [f"{prefix}.between"]))
        norm(f"{prefix}.between", f"{prefix}.normed2")
        matmul(f"{prefix}.normed2", f"{prefix}.up", hidden, _MLP_SIZE)
        nodes.append(make_node("Sigmoid", [f"{prefix}.up"], [f"{prefix}.gate"]))
        nodes.append(make_node("Mul", [f"{prefix}.up", f"{prefix}.gate"], [f"{prefix}.silu"]))
        matmul(f"{prefix}.silu", f"{prefix}.down", _MLP_SIZE, hidden)
        nodes.append(make_node("Add", [f"{prefix}.between", f"{prefix}.down"], [f"x{layer + 1}"]))
    norm(f"x{contract.num_layers}", "normed")
    integers("row_shape", 1, 1, hidden)
    integers("top_c", contract.top_c)
    matmul("scored", "scores", hidden, contract.vocab_size)
    head = nodes.pop()
    nodes += [
        make_node("Unsqueeze", [Name.LOGITS_ROWS, "last_axis"], ["row_index"]),
        make_node("Expand", ["row_index", "row_shape"], ["row_indices"]),
        make_node("GatherElements", ["normed", "row_indices"], ["scored"], axis=1),
        head,
        make_node("Cast", ["scores"], [Name.LOGITS], to=TensorProto.FLOAT),
        make_node("TopK", [Name.LOGITS, "top_c"], [Name.TOP_LOGITS, Name.TOP_IDS]),
        make_node("ReduceLogSumExp", [Name.LOGITS, "last_axis"], [Name.LOGSUMEXP], keepdims=0),
    ]
    return nodes, weights


def _written_names(contract: Contract, layer: int) -> tuple[str, ...]:
    names = (
        contract.present_names if contract.cache_form is CacheForm.SCATTER else contract.block_names
    )
    return names[2 * layer : 2 * layer + 2]
