"""Reads and writes the powers of two by which a bundle's weights were smoothed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from la_export.quantize.smoothing import Smoothing
from la_runtime.errors import BundleError

__all__ = ["SMOOTHING_PATH", "read_smoothing", "write_smoothing"]

SMOOTHING_PATH: Final = "onnx/smoothing.safetensors"
_ROWS: Final = "rows:"
_COLUMNS: Final = "columns:"


def write_smoothing(path: Path, smoothing: Smoothing) -> None:
    """Write the exponents as int8, by parameter.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = {_ROWS + name: exponents for name, exponents in smoothing.rows.items()}
    tensors |= {_COLUMNS + name: exponents for name, exponents in smoothing.columns.items()}
    path.write_bytes(save(tensors))


def read_smoothing(path: Path) -> Smoothing:
    """What `write_smoothing` wrote.

    Raises:
        BundleError: the file is not one of these.
    """
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise BundleError(
            f"the smoothing {path} cannot be read ({error}); rebuild the bundle"
        ) from error
    return Smoothing(
        rows={n.removeprefix(_ROWS): t for n, t in tensors.items() if n.startswith(_ROWS)},
        columns={n.removeprefix(_COLUMNS): t for n, t in tensors.items() if n.startswith(_COLUMNS)},
    )
