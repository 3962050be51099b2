"""What a builder says of the layers it made, counted. Knows the text, not TensorRT.

With detailed verbosity a builder logs one message that names every layer of the plan. Layers of
a second profile end in ``_myl1_<number>`` where those of the first end in ``_myl0_<number>``.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

__all__ = ["LAYERS_PREFIX", "LayerCounts", "count_layers"]

LAYERS_PREFIX: Final = "Layers:"
_LAYER: Final = re.compile(r"^Name: (?P<name>.+?), LayerType: ", re.MULTILINE)
_PROFILE: Final = re.compile(r"_myl(\d+)_\d+$")
_FUSED_ATTENTION: Final = "_gemm_mha"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCounts:
    """Layers of a plan.

    Args:
        num_layers: of all profiles.
        fused_attentions: per profile, layers that are a whole attention in one kernel.
    """

    num_layers: int
    fused_attentions: tuple[int, ...]


def count_layers(message: str, *, num_profiles: int) -> LayerCounts:
    """Count the layers that a builder's message names.

    Args:
        message: begins with `LAYERS_PREFIX`.
        num_profiles: that the plan was built with.
    """
    names = [match["name"] for match in _LAYER.finditer(message)]
    fused = Counter(_profile_of(name) for name in names if name.startswith(_FUSED_ATTENTION))
    return LayerCounts(
        num_layers=len(names),
        fused_attentions=tuple(fused[profile] for profile in range(num_profiles)),
    )


def _profile_of(layer_name: str) -> int:
    found = _PROFILE.search(layer_name)
    return int(found[1]) if found else 0
