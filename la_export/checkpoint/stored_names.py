"""Under which names a checkpoint stores a model's parameters, where they are not the model's own.

Files keep the names of the code they were first written for; transformers' classes have moved on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from transformers import PreTrainedConfig

__all__ = ["StoredAs", "find_stored"]

Join = Callable[[Sequence[torch.Tensor]], torch.Tensor]

_EXPERTS: Final = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class StoredAs:
    """What a parameter is made of.

    Args:
        names: tensors of the checkpoint.
        join: makes the parameter of them.
    """

    names: tuple[str, ...]
    join: Join


def find_stored(parameter: str, config: PreTrainedConfig) -> StoredAs:
    """How files of a model of this configuration store one of its parameters."""
    if config.model_type == "gpt_neox" and parameter == "lm_head.weight":
        return StoredAs(("embed_out.weight",), _only)
    found = _EXPERTS.fullmatch(parameter)
    if found is None:
        return StoredAs((parameter,), _only)
    place, kind = found[1], found[2]
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    names = tuple(
        f"{place}.{expert}.{part}.weight" for expert in range(config.num_experts) for part in parts
    )
    return StoredAs(names, _stack_pairs if len(parts) > 1 else _stack)


def _only(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    (tensor,) = tensors
    return tensor


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One matrix for each expert."""
    return torch.stack(list(tensors))


def _stack_pairs(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[experts, 2 * inner, hidden] of each expert's gate and up."""
    pairs = zip(tensors[0::2], tensors[1::2], strict=True)
    return torch.stack([torch.cat(pair) for pair in pairs])
