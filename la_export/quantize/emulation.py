"""The integer precisions computed by PyTorch, rule by rule: the slower truth of their graphs.

Changes a model in place, so that it says what a graph of that precision has to say. Nothing of it
is shared with the graphs but the numerics in `integers`.

Integers are multiplied as floats: a sum of products of two int8 is exact in float32 as long as it
stays below 2**24, so long rows are summed in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from la_export.quantize.integers import (
    LEAST_SCALE,
    QuantizedBlocks,
    QuantizedRows,
    quantize_blocks,
    quantize_rows,
)

__all__ = [
    "Activations",
    "IntegerLinear",
    "QuantizedWeights",
    "quantize_to_int4",
    "quantize_to_int8",
]

QuantizedWeights: TypeAlias = Mapping[tuple[str, ...], QuantizedRows | QuantizedBlocks]
"""Weights in integers, each with all the names of its parameter: a tied one has several."""


class Activations(StrEnum):
    """What a product of integers takes of its activations.

    ``integers``: as the graphs do. ``floats``: as they are, so that no rounding of theirs hides
    what else may differ.
    """

    INTEGERS = "integers"
    FLOATS = "floats"


_LARGEST_INT8: Final = 127
_EXACT_COLUMNS: Final = 2**24 // _LARGEST_INT8**2


class IntegerLinear(nn.Module):
    """A linear layer that multiplies integers: weights by output channel, activations by row.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] float32, added at the end.
    """

    def __init__(self, weight: QuantizedRows, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.bias = bias
        self.activations = Activations.INTEGERS
        self.hold(weight)

    @classmethod
    def without_weight(cls, bias: nn.Parameter | None) -> IntegerLinear:
        """One that is given its weight before it runs, see `hold`."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.bias, layer.activations = bias, Activations.INTEGERS
        layer.let_go()
        return layer

    def hold(self, weight: QuantizedRows) -> None:
        """Take a weight. No buffers are made of it: they would be taken for the model's own."""
        self._values = torch.from_numpy(weight.values).T.split(_EXACT_COLUMNS)  # int8: a quarter
        self._scales = torch.from_numpy(weight.scales)

    def let_go(self) -> None:
        """Of the weight."""
        self._values, self._scales = (), torch.empty(0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of rows [..., in_features]; no row depends on another."""
        if self.activations is Activations.FLOATS:
            return self._biased(rows @ torch.cat(self._values).float() * self._scales)
        largest = rows.abs().amax(dim=-1, keepdim=True)
        scales = (largest * (1 / _LARGEST_INT8)).clamp(min=float(LEAST_SCALE))  # [..., 1]
        integers = torch.round(rows / scales).clamp(-_LARGEST_INT8, _LARGEST_INT8)
        pieces = integers.split(_EXACT_COLUMNS, dim=-1)
        products = [piece @ part.float() for piece, part in zip(pieces, self._values, strict=True)]
        total = products[0]
        if len(products) > 1:
            total = torch.stack(products).double().sum(dim=0).float()
        return self._biased(total * self._scales * scales)

    def _biased(self, result: torch.Tensor) -> torch.Tensor:
        return result if self.bias is None else result + self.bias


@torch.no_grad()
def quantize_to_int8(model: PreTrainedModel) -> QuantizedWeights:
    """Every linear layer multiplies integers; rows of the embedding are int8 times a scale.

    A head that reads the embedding table reads the same integers.

    Args:
        model: a causal language model in float32; changed in place.

    Returns:
        What the weights became.
    """
    quantized = _quantize_ends(model)
    for name, layer in _projections(model):
        weight = quantize_rows(layer.weight.numpy())
        quantized[(f"{name}.weight",)] = weight
        model.set_submodule(name, IntegerLinear(weight, layer.bias))
    return quantized


@torch.no_grad()
def quantize_to_int4(model: PreTrainedModel) -> QuantizedWeights:
    """Projections are computed in float32 from int4 weights; embedding and head are as in int8.

    Args:
        model: a causal language model in float32; changed in place.

    Returns:
        What the weights became.
    """
    quantized = _quantize_ends(model)
    for name, layer in _projections(model):
        weight = quantize_blocks(layer.weight.numpy())
        quantized[(f"{name}.weight",)] = weight
        layer.weight.copy_(torch.from_numpy(weight.to_float()))
    return quantized


def _quantize_ends(
    model: PreTrainedModel,
) -> dict[tuple[str, ...], QuantizedRows | QuantizedBlocks]:
    """Embedding and head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding), "tokens are looked up in one table"
    assert isinstance(head, nn.Linear), "logits come from one table"
    table_name, head_name = (f"{_name_of(model, module)}.weight" for module in (embedding, head))
    is_tied = head.weight is embedding.weight
    table = quantize_rows(embedding.weight.numpy())
    head_table = table if is_tied else quantize_rows(head.weight.numpy())
    model.set_submodule(_name_of(model, head), IntegerLinear(head_table, head.bias))
    embedding.weight.copy_(torch.from_numpy(table.to_float()))
    if is_tied:
        return {(table_name, head_name): table}
    return {(table_name,): table, (head_name,): head_table}


def _projections(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that are left, by name."""
    yield from [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]


def _name_of(model: PreTrainedModel, wanted: nn.Module) -> str:
    names = {module: str(name) for name, module in model.named_modules()}
    return names[wanted]
