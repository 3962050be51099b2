"""Which kinds of attention the layers of a model have."""

from __future__ import annotations

from typing import Final

from transformers import PreTrainedConfig

__all__ = ["FULL_ATTENTION", "SLIDING_ATTENTION", "layer_kinds"]

FULL_ATTENTION: Final = "full_attention"
SLIDING_ATTENTION: Final = "sliding_attention"


def layer_kinds(config: PreTrainedConfig) -> frozenset[str]:
    """Kinds of a configuration's layers, as transformers names them.

    Where no layer is named apart, a `sliding_window` is every layer's.
    """
    named = getattr(config, "layer_types", None)
    if named is not None:
        return frozenset(str(kind) for kind in named)
    has_window = getattr(config, "sliding_window", None) is not None
    return frozenset({SLIDING_ATTENTION if has_window else FULL_ATTENTION})
