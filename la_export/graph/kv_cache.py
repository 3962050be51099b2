"""The cache objects that tracing hands to transformers, one for each cache form.

Each takes a layer's new keys and values, returns those that its attention reads, and keeps what
the graph gives out. Attention itself never sees a past.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from la_runtime.contract import CacheForm, Contract

__all__ = ["ConcatCache", "ScatterCache", "StepCache", "make_step_cache"]

_PLACES: Final = 2
# The operator set in which ONNX has it.
_TENSOR_SCATTER_VERSION: Final = 24

KeyValue = tuple[torch.Tensor, torch.Tensor]


class StepCache(Protocol):
    """What stands in for a transformers cache during one traced step."""

    is_compileable: bool

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object
    ) -> KeyValue:
        """Take the block's K/V of a layer; return what its rows attend to."""
        ...

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Places in the past, as transformers asks for it."""
        ...

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """What leaves the graph: key 0, value 0, key 1, ..."""
        ...


class _RecordingCache:
    """Keeps what each layer gives out.

    Args:
        past: key and value of each layer, each [batch, kv_heads, places, head_dim].
    """

    is_compileable = False

    def __init__(self, past: Sequence[KeyValue]) -> None:
        self._past = tuple(past)
        self._written: dict[int, KeyValue] = {}

    def _record(self, layer_idx: int, written: KeyValue) -> None:
        assert layer_idx not in self._written, f"layer {layer_idx} updated its cache twice"
        self._written[layer_idx] = written

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Places in the past, as transformers asks for it."""
        return self._past[layer_idx][0].shape[_PLACES]

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """What leaves the graph: key 0, value 0, key 1, ..."""
        return tuple(tensor for layer in range(len(self._past)) for tensor in self._written[layer])


class ConcatCache(_RecordingCache):
    """Joins the past and the block; gives out the block alone."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object
    ) -> KeyValue:
        """The block's K/V of a layer, behind the past."""
        self._record(layer_idx, (key, value))
        past_key, past_value = self._past[layer_idx]
        return torch.cat([past_key, key], _PLACES), torch.cat([past_value, value], _PLACES)


class ScatterCache(_RecordingCache):
    """Writes the block into a cache of fixed capacity, and gives that out.

    Args:
        past: as above; as many places as the capacity.
        write_index: [batch] int64, the place of the block's first row.
    """

    def __init__(self, past: Sequence[KeyValue], write_index: torch.Tensor) -> None:
        super().__init__(past)
        self._write_index = write_index

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object
    ) -> KeyValue:
        """The whole cache of a layer, with the block's K/V in their places."""
        past_key, past_value = self._past[layer_idx]
        present = self._scatter(past_key, key), self._scatter(past_value, value)
        self._record(layer_idx, present)
        return present

    def _scatter(self, past: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        written: torch.Tensor = torch.onnx.ops.symbolic(
            "TensorScatter",
            (past, block, self._write_index),
            {"axis": _PLACES},
            dtype=past.dtype,
            shape=past.shape,
            version=_TENSOR_SCATTER_VERSION,
        )
        return written


def make_step_cache(contract: Contract, tensors: Sequence[torch.Tensor]) -> StepCache:
    """The cache of a contract's form.

    Args:
        contract: of the traced step.
        tensors: the contract's inputs behind `logits_rows`, in their order.
    """
    past = tensors[len(tensors) - len(contract.past_names) :]
    layers = tuple(zip(past[0::2], past[1::2], strict=True))
    if contract.cache_form is CacheForm.SCATTER:
        return ScatterCache(layers, tensors[0])
    return ConcatCache(layers)
