"""Gives a model's parameters as the integers that a graph's file holds of them.

For references of large models, once `stored_weights` has found that every number there is what the
source's becomes: to read, turn and quantize a model anew takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from la_export.graph.passes.names import SCALES_SUFFIX, VALUES_SUFFIX, read_name
from la_export.quantize.integers import QuantizedBlocks, QuantizedRows

__all__ = ["StoredIntegers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Rows of a stored weight, in the order of the parameter's output features."""

    stored_name: str
    first: int
    last: int
    is_transposed: bool


class StoredIntegers:
    """The integers in a graph's file, by parameter; nothing is kept in memory.

    Args:
        path: the graph.
        shapes: of the model's parameters, by name.
        report: is told how many numbers were read.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        report: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._path = path
        self._report = report
        self._places: dict[tuple[str, str], _Place] = {}
        for stored_name in ir.load(path).graph.initializers:
            name = read_name(stored_name)
            if not name.part or not shapes.keys() >= set(name.parameters):
                continue
            first = 0
            for parameter in name.parameters:
                last = first + shapes[parameter][0]
                self._places[parameter, name.part] = _Place(
                    stored_name=stored_name,
                    first=first,
                    last=last,
                    is_transposed=name.is_transposed,
                )
                first = last

    def read(self, parameter: str) -> QuantizedRows | QuantizedBlocks | None:
        """A parameter; None if the file holds no integers of it."""
        if (parameter, VALUES_SUFFIX) not in self._places:
            return None
        # Loaded anew: what stays mapped counts as memory of this process.
        stored = ir.load(self._path).graph.initializers
        values = self._read(stored, self._places[parameter, VALUES_SUFFIX]).astype(np.int8)
        scales = self._read(stored, self._places[parameter, SCALES_SUFFIX]).astype(np.float32)
        self._report(values.size)
        if scales.ndim == 1:
            return QuantizedRows(values=values, scales=scales)
        return QuantizedBlocks(values=values, scales=scales)

    def _read(self, stored: Mapping[str, ir.Value], place: _Place) -> NDArray[np.generic]:
        tensor = stored[place.stored_name].const_value
        assert tensor is not None, "weights are stored"
        array = tensor.numpy()
        rows = array.T if place.is_transposed else array
        found = np.array(rows[place.first : place.last], order="C")
        del array, rows  # what is looked at cannot be let go of
        if isinstance(tensor, ir.ExternalTensor):
            tensor.release()
        return found
