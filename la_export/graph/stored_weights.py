"""Compares the weights of a written graph with the source model's, number by number.

A pass over random input cannot show that: to a half-precision result one wrong number, or all of
them rounded twice, may be within what the arithmetic itself is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from la_export.graph.passes.names import SCALES_SUFFIX, VALUES_SUFFIX, read_name
from la_export.quantize.integers import QuantizedBlocks, QuantizedRows
from la_export.reference import TorchReference
from la_runtime.bundle import CheckResult
from la_runtime.errors import CheckError

__all__ = ["ExpectedWeights", "check_weights"]

Quantize: TypeAlias = Callable[[], QuantizedRows | QuantizedBlocks]

_FLOATS: Final = ""
# Queries, keys and values.
_MOST_JOINED: Final = 3
# Of a table in float32, 250 MB.
_COMPARED_NUMBERS: Final = 1 << 26


class ExpectedWeights:
    """What the weights of a graph have to be, by the names that passes give them.

    Args:
        reference: transformers' own model, in the graph's precision.
    """

    def __init__(self, reference: TorchReference) -> None:
        floats, integers = dict(reference.weights()), dict(reference.quantized_weights())
        self._needed = [(names, _FLOATS) for names in floats]
        self._needed += [
            (names, part) for names in integers for part in (VALUES_SUFFIX, SCALES_SUFFIX)
        ]
        self._recent: dict[tuple[str, ...], QuantizedRows | QuantizedBlocks] = {}
        self._arrays: dict[tuple[str, str], Callable[[], NDArray[np.generic]]] = {
            (name, _FLOATS): partial(np.asarray, buffer) for name, buffer in reference.buffers()
        }
        for names, read in floats.items():
            self._arrays |= {(name, _FLOATS): read for name in names}
        for names, quantize in integers.items():
            for name in names:
                self._arrays[name, VALUES_SUFFIX] = partial(self._values, names, quantize)
                self._arrays[name, SCALES_SUFFIX] = partial(self._scales, names, quantize)

    def of(self, stored_name: str) -> NDArray[np.generic] | None:
        """What a stored weight of this name has to hold; None if it is none of the model's."""
        name = read_name(stored_name)
        keys = [(parameter, name.part) for parameter in name.parameters]
        if not self._arrays.keys() >= set(keys):
            return None
        arrays = [self._arrays[key]() for key in keys]
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return whole.swapaxes(-1, -2) if name.is_transposed else whole

    def _values(self, names: tuple[str, ...], quantize: Quantize) -> NDArray[np.int8]:
        return self._quantized(names, quantize).values

    def _scales(self, names: tuple[str, ...], quantize: Quantize) -> NDArray[np.float32]:
        return self._quantized(names, quantize).scales

    def _quantized(
        self, names: tuple[str, ...], quantize: Quantize
    ) -> QuantizedRows | QuantizedBlocks:
        """Files hold the scales behind the values, of up to three matrices in one."""
        if names not in self._recent:
            while len(self._recent) >= _MOST_JOINED:
                del self._recent[next(iter(self._recent))]
            self._recent[names] = quantize()
        return self._recent[names]

    def missing(self, stored_names: Collection[str]) -> Iterator[str]:
        """The weights that stored ones of these names do not hold; a tied one needs one name."""
        found = {
            (parameter, name.part)
            for name in map(read_name, stored_names)
            for parameter in name.parameters
        }
        for names, part in self._needed:
            if not any((name, part) in found for name in names):
                yield names[0] + part


def check_weights(path: Path, reference: TorchReference) -> CheckResult:
    """Require every weight to be the model's, rounded once to what the graph stores.

    Memory holds one weight at a time beside the reference.

    Args:
        path: the written graph.
        reference: transformers' own model, in the graph's precision.

    Raises:
        CheckError: the first weight that is missing or different.
    """
    expected = ExpectedWeights(reference)
    stored = ir.load(path).graph.initializers
    for name in expected.missing(stored.keys()):
        raise CheckError(f"{path.name} has no weight {name}; no bundle was written")
    dtypes = []
    for name, value in stored.items():
        truth = expected.of(name)
        if truth is not None:
            _compare(value, truth)
            # Pages of the file count as this process's memory for as long as they are mapped.
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value.release()
            dtypes.append(_dtype_name(value))
    return CheckResult(
        name="weights",
        value=0.0,
        bound=0.0,
        detail=f"numbers that differ in {len(dtypes)} weights of {', '.join(sorted(set(dtypes)))}",
    )


def _compare(value: ir.Value, expected: NDArray[np.generic]) -> None:
    assert value.const_value is not None, f"initializer {value.name} has no value"
    found = value.const_value.numpy()
    if found.shape != expected.shape:
        raise CheckError(
            f"weight {value.name} has shape {list(found.shape)}, the source model's has "
            f"{list(expected.shape)}; no bundle was written"
        )
    found, expected = np.atleast_1d(found), np.atleast_1d(expected)
    wrong = 0
    rows = max(1, _COMPARED_NUMBERS // max(1, found[:1].size))
    for start in range(0, len(found), rows):
        here = slice(start, start + rows)
        wrong += int(np.count_nonzero(found[here].astype(expected.dtype) != expected[here]))
    if wrong:
        raise CheckError(
            f"weight {value.name} differs from the source model's, rounded to "
            f"{_dtype_name(value)}, in {wrong} of {expected.size} numbers; no bundle was written"
        )


def _dtype_name(value: ir.Value) -> str:
    assert value.dtype is not None, f"initializer {value.name} has no dtype"
    return str(value.dtype.numpy().name)
