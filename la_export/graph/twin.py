"""Twins of a graph that compute in floats: the same structure, without what rounds.

`float32_twin` of a half-precision graph has the same nodes over the same numbers.
`float_activations_twin` of an integer graph multiplies its weights by activations as they are.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from la_export.graph.integer_nodes import find_integer_products
from la_export.graph.passes.constants import add_scalar
from la_export.graph.weights import WEIGHTS_FILE

__all__ = ["float32_twin", "float_activations_twin"]

_HALVES: Final = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


@contextmanager
def float32_twin(path: Path, *, folder: Path | None = None) -> Iterator[Path]:
    """Write the twin into a folder of its own, and remove it at the end.

    Args:
        path: a half-precision graph, its weights beside it.
        folder: where that folder is made; beside the graph when not given.

    Yields:
        Path of the twin. Its weights are the graph's own file, linked where the disk is the same;
        float32 copies of them are made in memory when it is opened.
    """
    model = ir.load(path)
    graph = model.graph
    for value in (*graph.inputs, *_node_outputs(graph)):
        if value.dtype in _HALVES:
            value.type = ir.TensorType(ir.DataType.FLOAT)
    for node in graph:
        if node.op_type == "Cast" and node.attributes["to"].as_int() in _HALVES:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
    for name, weight in list(graph.initializers.items()):
        if weight.dtype in _HALVES:
            readers = list(weight.uses())
            cast = ir.node("Cast", [weight], {"to": ir.DataType.FLOAT})
            cast.outputs[0].name = f"{name}.{ir.DataType.FLOAT.name}"
            graph.insert_before(graph[0], cast)
            for node, place in readers:
                node.replace_input_with(place, cast.outputs[0])
    with tempfile.TemporaryDirectory(prefix=".twin.", dir=folder or path.parent) as scratch:
        twin = Path(scratch) / path.name
        ir.save(model, twin)
        _link(path.with_name(WEIGHTS_FILE), twin.with_name(WEIGHTS_FILE))
        yield twin


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one that knows no links
        shutil.copyfile(source, target)


@contextmanager
def float_activations_twin(path: Path) -> Iterator[Path]:
    """Write the twin of an integer graph, portable or lean, and remove it at the end.

    Args:
        path: the graph, its weights beside it.

    Yields:
        Path of the twin, beside the graph and over the same weights; float32 copies of them are
        made in memory when it is opened.
    """
    model = ir.load(path)
    graph = model.graph
    one = add_scalar(graph, np.float32(1))
    for product in list(find_integer_products(graph)):
        weight = ir.node("Cast", [product.weight], {"to": ir.DataType.FLOAT})
        floats = ir.node("MatMul", [product.activation, weight.outputs[0]])
        new = [weight, floats]
        if product.is_fused:
            new.append(ir.node("Mul", [floats.outputs[0], product.scales]))
        graph.insert_before(product.product, new)
        product.product.outputs[0].replace_all_uses_with(new[-1].outputs[0])
        scaled = product.by_row
        scaled.replace_input_with(scaled.inputs.index(product.row_scales), one)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.NameFixPass()(model)
    with tempfile.NamedTemporaryFile(prefix=".twin.", suffix=".onnx", dir=path.parent) as file:
        twin = Path(file.name)
        ir.save(model, twin)
        yield twin


def _node_outputs(graph: ir.Graph) -> Iterator[ir.Value]:
    return (value for node in graph for value in node.outputs)
