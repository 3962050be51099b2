"""Fixes rotary frequencies that depend on the length of the text to those of one context.

A graph has one table. transformers computes such frequencies anew when a text grows longer; here
they are, from the first token on, those of the longest text that the bundle serves. The model in
PyTorch is given the same.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from la_export.checkpoint.features import LENGTH_DEPENDENT_ROPE_KINDS, rope_parameters

__all__ = ["fix_rotary", "is_length_dependent"]

# No kind that transformers' own forward acts upon.
_FIXED: Final = "fixed"


def is_length_dependent(config: PreTrainedConfig) -> bool:
    """Whether transformers computes frequencies from the length of the text."""
    return any(
        parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE_KINDS
        for parameters in rope_parameters(config).values()
    )


def fix_rotary(model: nn.Module, config: PreTrainedConfig, context: int) -> None:
    """Give every rotary embedding the frequencies of a text of `context` tokens, for good.

    Args:
        model: or a part of one; changed in place, where a frequency depends on the length.
        config: of the model.
        context: positions.
    """
    if not is_length_dependent(config):
        return
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind not in LENGTH_DEPENDENT_ROPE_KINDS:
            continue
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
            config, device=module.inv_freq.device, seq_len=context
        )
        with torch.no_grad():
            module.register_buffer("inv_freq", frequencies, persistent=False)
        module.attention_scaling = scaling  # type: ignore[assignment]
        module.rope_type = _FIXED  # type: ignore[assignment]
