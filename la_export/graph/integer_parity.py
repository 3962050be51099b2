"""Recomputes every integer product of a graph from the activations that the graph itself made.

A graph as a whole can only be compared with PyTorch within wide bounds: sums in another order move
an activation by one part in a million, and where that crosses the middle between two integers a
whole step is what the next layer sees. Each product by itself has no such excuse.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from la_export.graph.integer_nodes import IntegerProduct, find_integer_products
from la_export.graph.sample import Sample
from la_export.graph.sliced_session import open_session
from la_export.quantize.integers import quantize_rows
from la_runtime.bundle import CheckResult

__all__ = ["INTEGER_PRODUCTS", "check_integer_products"]

INTEGER_PRODUCTS: Final = "integer_products"
# Three roundings of float32: the sum as a float, by the column's scale, by the row's.
_BOUND: Final = 3 * 2.0**-23


def check_integer_products(path: Path, sample: Sample, threads: int) -> CheckResult:
    """Run the graph on the sample and compare each product with the same integers in NumPy.

    Args:
        path: the graph, portable or lean.
        sample: whose contract is the graph's.
        threads: threads for ONNX Runtime.

    Returns:
        The largest difference of a number, as a share of its own size.
    """
    worst, count = 0.0, 0
    with _probed(path) as (probe, products):
        outputs = open_session(probe, threads).run(sample.make_feeds())
        for product in products:
            activation = np.asarray(outputs[str(product.activation.name)], np.float32)
            found = np.asarray(outputs[str(product.by_row.outputs[0].name)], np.float32)
            expected = _multiply(activation, product)
            for stored in (product.weight.const_value, product.scales.const_value):
                if isinstance(stored, ir.ExternalTensor):
                    stored.release()
            worst = max(worst, _relative(found.reshape(expected.shape), expected))
            count += 1
    return CheckResult(
        name=INTEGER_PRODUCTS,
        value=worst,
        bound=_BOUND,
        detail=f"of each number of {count} products, from the same activations",
    )


@contextmanager
def _probed(path: Path) -> Iterator[tuple[Path, tuple[IntegerProduct, ...]]]:
    """A graph that gives out what goes into its products and what comes out, over the same data."""
    model = ir.load(path)
    graph = model.graph
    products = tuple(find_integer_products(graph))
    given = {id(value) for value in (*graph.inputs, *graph.outputs)}
    for product in products:
        for value in (product.activation, product.by_row.outputs[0]):
            if id(value) not in given:
                given.add(id(value))
                value.type = ir.TensorType(ir.DataType.FLOAT)
                graph.outputs.append(value)
    with tempfile.NamedTemporaryFile(prefix=".probe.", suffix=".onnx", dir=path.parent) as file:
        probe = Path(file.name)
        ir.save(model, probe)
        yield probe, products


def _multiply(activation: NDArray[np.float32], product: IntegerProduct) -> NDArray[np.float32]:
    """Exact: a sum of products of int8 is far below 2**53."""
    assert product.weight.const_value is not None, "weights are stored"
    assert product.scales.const_value is not None, "scales are stored"
    rows = quantize_rows(activation.reshape(-1, activation.shape[-1]))
    weight = product.weight.const_value.numpy().astype(np.float64)
    sums = (rows.values.astype(np.float64) @ weight).astype(np.float32)  # [rows, out]
    by_column: NDArray[np.float32] = sums * product.scales.const_value.numpy()
    return by_column * rows.scales[:, np.newaxis]


def _relative(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    size = np.maximum(np.abs(expected), np.finfo(np.float32).tiny)
    return float((np.abs(found - expected) / size).max(initial=0.0))
