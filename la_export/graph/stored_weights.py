"""Compares the weights of a written graph with the source model's, number by number.

A pass over random input cannot show that: to a half-precision result one wrong number, or all of
them rounded twice, may be within what the arithmetic itself is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from la_export.graph.passes.weight_transposes import TRANSPOSED_SUFFIX
from la_export.reference import TorchReference
from la_runtime.bundle import CheckResult
from la_runtime.contract import Contract
from la_runtime.errors import CheckError

__all__ = ["check_weights"]


def check_weights(path: Path, contract: Contract, reference: TorchReference) -> CheckResult:
    """Require every weight to be the model's, rounded once to what the graph stores.

    Memory holds one weight at a time.

    Args:
        path: the written graph.
        contract: its contract.
        reference: transformers' own model, rounded likewise by PyTorch.

    Raises:
        CheckError: the first weight that is missing or different.
    """
    tensors = ir.load(path).graph.initializers
    count = 0
    for names, expected in reference.weights():
        stored = list(_find(tensors, names))
        if not stored:
            raise CheckError(f"{path.name} has no weight {names[0]}; no bundle was written")
        for value in stored:
            _compare(value, expected, contract)
        count += 1
    for name, expected in reference.buffers():
        for value in _find(tensors, (name,)):
            _compare(value, expected, contract)
    return CheckResult(
        name="weights",
        value=0.0,
        bound=0.0,
        detail=f"numbers that differ in {count} weights, rounded to {contract.compute_dtype}",
    )


def _find(tensors: Mapping[str, ir.Value], names: Iterable[str]) -> Iterator[ir.Value]:
    for name in names:
        for stored in (name, name + TRANSPOSED_SUFFIX):
            if stored in tensors:
                yield tensors[stored]


def _compare(value: ir.Value, expected: NDArray[np.float32], contract: Contract) -> None:
    assert value.const_value is not None, f"initializer {value.name} has no value"
    assert value.name is not None, "initializers have names"
    found = value.const_value.numpy()
    if value.name.endswith(TRANSPOSED_SUFFIX):
        found = found.T
    if found.shape != expected.shape:
        raise CheckError(
            f"weight {value.name} has shape {list(found.shape)}, the source model's has "
            f"{list(expected.shape)}; no bundle was written"
        )
    wrong = np.count_nonzero(found.astype(np.float32) != expected)
    if wrong:
        raise CheckError(
            f"weight {value.name} differs from the source model's, rounded to "
            f"{contract.compute_dtype}, in {wrong} of {expected.size} numbers; "
            "no bundle was written"
        )
