"""How passes name the weights they make, and how a check reads those names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = [
    "SCALES_SUFFIX",
    "TRANSPOSED_SUFFIX",
    "VALUES_SUFFIX",
    "WeightName",
    "joined_name",
    "read_name",
]

TRANSPOSED_SUFFIX: Final = ".transposed"
VALUES_SUFFIX: Final = ".values"
SCALES_SUFFIX: Final = ".scales"
_JOINT: Final = "+"


def joined_name(parameters: Sequence[str]) -> str:
    """The name of parameters stored one behind the other."""
    return _JOINT.join(parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightName:
    """What the name of a stored weight says.

    Args:
        parameters: of the model, stored one behind the other.
        part: `VALUES_SUFFIX`, `SCALES_SUFFIX`, or empty where floats are stored.
        is_transposed: whether their two axes are exchanged.
    """

    parameters: tuple[str, ...]
    part: str
    is_transposed: bool


def read_name(name: str) -> WeightName:
    """The reverse of what passes do."""
    part = next((part for part in (VALUES_SUFFIX, SCALES_SUFFIX) if name.endswith(part)), "")
    whole = name.removesuffix(part)
    parameters = whole.removesuffix(TRANSPOSED_SUFFIX)
    return WeightName(
        parameters=tuple(parameters.split(_JOINT)), part=part, is_transposed=whole != parameters
    )
