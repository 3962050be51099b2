"""Which kinds of attention the layers of a model have, as its configuration says."""

from __future__ import annotations

from typing import Final

from transformers import PreTrainedConfig

__all__ = ["FULL_ATTENTION", "SLIDING_ATTENTION", "count_kv_heads", "layer_kinds"]

FULL_ATTENTION: Final = "full_attention"
SLIDING_ATTENTION: Final = "sliding_attention"
# Families whose code gives every layer the one window there is, and those whose layers are named
# apart. The code of all others has no window, whatever their configuration holds.
_ONE_WINDOW: Final = frozenset({"mistral", "phi3", "qwen3_moe"})
_NAMED_LAYERS: Final = frozenset({"gemma2", "gemma3_text", "qwen2", "qwen3", "smollm3"})


def layer_kinds(config: PreTrainedConfig) -> frozenset[str]:
    """Kinds of a configuration's layers, as transformers names and its code treats them."""
    if config.model_type in _NAMED_LAYERS:
        named = getattr(config, "layer_types", None) or (FULL_ATTENTION,)
        return frozenset(str(kind) for kind in named)
    has_window = getattr(config, "sliding_window", None) is not None
    is_windowed = config.model_type in _ONE_WINDOW and has_window
    return frozenset({SLIDING_ATTENTION if is_windowed else FULL_ATTENTION})


def count_kv_heads(config: PreTrainedConfig) -> int:
    """Heads of keys and values: as many as of queries where no other number is given."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
