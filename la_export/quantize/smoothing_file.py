"""Reads and writes how a bundle's weights were turned and smoothed before they were quantized.

Tensors by name: exponents, and of the rotation its basis and the norms' weights; which parameter
plays which part in it is the metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from la_export.quantize.rotation import Basis, Rotation
from la_export.quantize.smoothing import Smoothing
from la_runtime.errors import BundleError

__all__ = ["SMOOTHING_PATH", "read_smoothing", "write_smoothing"]

SMOOTHING_PATH: Final = "onnx/smoothing.safetensors"
_ROWS: Final = "rows:"
_COLUMNS: Final = "columns:"
_GAINS: Final = "gains:"
_SIGNS: Final = "basis.signs"
_ODD: Final = "basis.odd"
_ROTATION: Final = "rotation"


class _RotationParts(BaseModel):
    """Which parameter plays which part in a `Rotation`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    readers: dict[str, str]
    tables: tuple[str, ...]
    writers: tuple[str, ...]
    last: str
    blocked: tuple[str, ...]
    block: int


def write_smoothing(path: Path, smoothing: Smoothing) -> None:
    """Write exponents as int8, the basis and the norms' weights as they are.

    Raises:
        OSError: the file cannot be written.
    """
    tensors: dict[str, NDArray[Any]]
    tensors = {_ROWS + name: exponents for name, exponents in smoothing.rows.items()}
    tensors |= {_COLUMNS + name: exponents for name, exponents in smoothing.columns.items()}
    metadata = {}
    if (rotation := smoothing.rotation) is not None:
        tensors |= {_SIGNS: rotation.basis.signs, _ODD: rotation.basis.odd}
        tensors |= {_GAINS + name: np.ascontiguousarray(g) for name, g in rotation.gains.items()}
        parts = _RotationParts(
            readers=dict(rotation.readers),
            # In order, so that the file has the same bytes every time.
            tables=tuple(sorted(rotation.tables)),
            writers=tuple(sorted(rotation.writers)),
            last=rotation.last,
            blocked=tuple(sorted(rotation.blocked)),
            block=rotation.block,
        )
        metadata[_ROTATION] = parts.model_dump_json()
    path.write_bytes(save(tensors, metadata=metadata))


def read_smoothing(path: Path) -> Smoothing:
    """What `write_smoothing` wrote.

    Raises:
        BundleError: the file is not one of these.
    """
    try:
        tensors = load_file(path)
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        rotation = _read_rotation(tensors, metadata)
    except (SafetensorError, OSError, KeyError, AttributeError, ValueError) as error:
        reason = " ".join(str(error).split())  # pydantic's has a line for each fault
        raise BundleError(
            f"the smoothing {path} cannot be read ({reason}); rebuild the bundle"
        ) from error
    return Smoothing(
        rows={n.removeprefix(_ROWS): t for n, t in tensors.items() if n.startswith(_ROWS)},
        columns={n.removeprefix(_COLUMNS): t for n, t in tensors.items() if n.startswith(_COLUMNS)},
        rotation=rotation,
    )


def _read_rotation(
    tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]
) -> Rotation | None:
    if _ROTATION not in metadata:
        return None
    parts = _RotationParts.model_validate_json(metadata[_ROTATION])
    return Rotation(
        basis=Basis(signs=tensors[_SIGNS], odd=tensors[_ODD]),
        gains={n.removeprefix(_GAINS): t for n, t in tensors.items() if n.startswith(_GAINS)},
        readers=parts.readers,
        tables=frozenset(parts.tables),
        writers=frozenset(parts.writers),
        last=parts.last,
        blocked=frozenset(parts.blocked),
        block=parts.block,
    )
