"""A traced step on its way to disk: an ONNX graph whose weights are still names.

While passes run, every weight is a graph input behind the contract's inputs. That keeps
optimizers from folding, copying or loading tensors they must not touch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import onnx_ir as ir

from la_runtime.contract import CacheForm, Contract

__all__ = ["CONTRIB_DOMAIN", "OPSET_VERSIONS", "StepGraph", "WeightPart", "WeightSource"]

# ONNX Runtime's own operators; no other compiler knows them.
CONTRIB_DOMAIN: Final = "com.microsoft"
# The oldest that have `Attention`, and `TensorScatter` as well.
OPSET_VERSIONS: Final = {CacheForm.CONCAT: 23, CacheForm.SCATTER: 24}


class WeightPart(StrEnum):
    """What of a weight the graph holds; see `quantize.integers` for the integers."""

    FLOATS = "floats"
    INT8_VALUES = "int8 values"
    INT8_SCALES = "int8 scales"
    INT4_VALUES = "int4 values"
    INT4_SCALES = "int4 scales"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Where a weight of the graph comes from.

    Args:
        parameters: the parameters or buffers of the transformers model, one behind the other in
            their first axis: that of the output features.
        part: what of them the graph holds.
        transposed: whether the graph holds it with its two axes exchanged.
    """

    parameters: tuple[str, ...]
    part: WeightPart = WeightPart.FLOATS
    transposed: bool = False


@dataclass(slots=True, kw_only=True)
class StepGraph:
    """The graph and its weights; passes change both in place.

    Args:
        model: the ONNX model in memory, weights as trailing graph inputs.
        contract: the names, axes and sizes that the graph keeps.
        weights: source of each weight by the name of its graph value.
    """

    model: ir.Model
    contract: Contract
    weights: dict[str, WeightSource]

    @property
    def graph(self) -> ir.Graph:
        """The model's only graph."""
        return self.model.graph

    def weight_values(self) -> dict[str, ir.Value]:
        """The graph value of every weight, by name."""
        return {
            value.name: value
            for value in self.graph.inputs[len(self.contract.inputs) :]
            if value.name is not None
        }
