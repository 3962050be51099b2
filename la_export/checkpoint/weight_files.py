"""Which files of a folder hold its weights: the one file, or those that the index names.

Knows names only; whether a file is whole shows when it is read.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Final

from la_runtime.errors import CheckpointError

__all__ = [
    "BIN_PATTERN",
    "SAFETENSORS_PATTERN",
    "WeightFormat",
    "find_weight_files",
    "has_all_weights",
]

# What transformers loads; other weight files in a repository are copies in other layouts.
SAFETENSORS_PATTERN: Final = "model*.safetensors"
BIN_PATTERN: Final = "pytorch_model*.bin"


class WeightFormat(StrEnum):
    """How the weights are stored."""

    SAFETENSORS = "safetensors"
    BIN = "bin"
    GGUF = "gguf"


_SINGLE_FILES: Final = {
    WeightFormat.SAFETENSORS: "model.safetensors",
    WeightFormat.BIN: "pytorch_model.bin",
}
_PATTERNS: Final = {
    WeightFormat.SAFETENSORS: SAFETENSORS_PATTERN,
    WeightFormat.BIN: BIN_PATTERN,
}


def find_weight_files(folder: Path, shown: str, weight_format: WeightFormat) -> tuple[Path, ...]:
    """The weight files of a folder, sorted by name; empty when it has none of this format.

    Args:
        folder: of a model.
        shown: what the user calls it.
        weight_format: safetensors or bin.

    Raises:
        CheckpointError: the set is not complete, not unique, or its index cannot be read.
    """
    single = folder / _SINGLE_FILES[weight_format]
    index = folder / f"{single.name}.index.json"
    if not index.is_file():
        if single.is_file():
            return (single,)
        strays = sorted(folder.glob(_PATTERNS[weight_format]))
        if strays:
            raise CheckpointError(
                f"{shown} is incomplete: it has {strays[0].name}, but neither {single.name} nor "
                f"{index.name}; download it again"
            )
        return ()
    names = _read_index(index, shown)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{shown} is incomplete: {len(missing)} of {len(names)} weight files are missing, "
            f"first {missing[0]}; download it again"
        )
    if single.is_file() and single.name not in names:
        raise CheckpointError(
            f"{shown} has both {single.name} and the weights of {index.name}; "
            "keep one set of weights in the folder"
        )
    return tuple(folder / name for name in names)


def has_all_weights(folder: Path) -> bool:
    """Whether a download of this folder has brought every weight file of some format."""
    try:
        return any(find_weight_files(folder, folder.name, kind) for kind in _SINGLE_FILES)
    except CheckpointError:
        return False


def _read_index(index: Path, shown: str) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        if not names or not all(_is_file_name(name) for name in names):
            raise ValueError("weight_map must name files of this folder")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{shown}: {index.name} cannot be read ({error})") from error
    return names


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name != "" and Path(name).name == name
