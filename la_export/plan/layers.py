"""What a builder says of the layers it made, counted. Knows the text, not TensorRT.

With detailed verbosity a builder logs one message that names every layer of the plan. Layers of
a second profile end in ``_myl1_<number>`` where those of the first end in ``_myl0_<number>``, or in
``[profile 1]``; where names say so, the numbers before it are no profiles.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

__all__ = ["LAYERS_PREFIX", "LayerCounts", "count_layers"]

LAYERS_PREFIX: Final = "Layers:"
_LAYER: Final = re.compile(r"^Name: (?P<name>.+?), LayerType: ", re.MULTILINE)
_GRAPH: Final = re.compile(r"_myl(\d+)_\d+$")
_PROFILE: Final = re.compile(r" \[profile (\d+)\]$")
# Of many rows, and of one.
_FUSED_ATTENTIONS: Final = ("_gemm_mha", "_gemv_mha")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCounts:
    """Layers of a plan.

    Args:
        num_layers: of all profiles.
        fused_attentions: per profile, layers that are a whole attention in one kernel; None where
            none is known by its name, or the names do not tell the profiles apart.
    """

    num_layers: int
    fused_attentions: tuple[int, ...] | None


def count_layers(message: str, *, num_profiles: int) -> LayerCounts:
    """Count the layers that a builder's message names.

    Args:
        message: begins with `LAYERS_PREFIX`.
        num_profiles: that the plan was built with.
    """
    names = [match["name"] for match in _LAYER.finditer(message)]
    pattern = _PROFILE if any(_PROFILE.search(name) for name in names) else _GRAPH
    found = [(pattern.search(name), name.startswith(_FUSED_ATTENTIONS)) for name in names]
    profiles = [(int(match[1]) if match else 0, is_fused) for match, is_fused in found]
    fused = Counter(profile for profile, is_fused in profiles if is_fused)
    is_known = fused and all(profile < num_profiles for profile, _ in profiles)
    return LayerCounts(
        num_layers=len(names),
        fused_attentions=tuple(fused[profile] for profile in range(num_profiles))
        if is_known
        else None,
    )
