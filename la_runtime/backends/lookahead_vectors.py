"""The lookahead vectors: read from the bundle, checked, and rounded to the compute dtype."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from la_runtime.bundle import Bundle, Manifest
from la_runtime.contract import Contract, Name
from la_runtime.errors import BundleError
from la_runtime.storage import from_stored, to_stored

__all__ = ["load_lookahead_vectors", "store_lookahead_vectors"]


def load_lookahead_vectors(bundle: Bundle) -> NDArray[np.floating]:
    """The vectors of a bundle, as written.

    Raises:
        BundleError: the file is damaged, has none, or was made for another model or group mask.
    """
    path = bundle.path(bundle.manifest.lookahead.path)
    try:
        with safe_open(path, framework="numpy") as file:
            _check_origin(file.metadata() or {}, bundle.manifest, path)
            vectors: NDArray[np.floating] = file.get_tensor(Name.LOOKAHEAD_EMBEDDINGS)
    except SafetensorError as error:
        raise BundleError(
            f"{path} has no lookahead vectors to read ({error}); rebuild the bundle"
        ) from error
    return vectors


def _check_origin(metadata: Mapping[str, str], manifest: Manifest, path: Path) -> None:
    """What the file says of itself must be what the bundle says of it."""
    expected = {
        "model_digest": manifest.model.source_digest,
        "group_mask": manifest.lookahead.group_mask.value,
    }
    for name, value in expected.items():
        if metadata.get(name, value) != value:
            raise BundleError(
                f"{path} was made for the {name} {metadata[name]:.20}, the bundle has {value:.20}; "
                "rebuild the bundle"
            )


def store_lookahead_vectors(
    vectors: NDArray[np.floating], contract: Contract
) -> NDArray[np.generic]:
    """A copy in the compute dtype, as `storage` holds it.

    Raises:
        BundleError: they have another shape, or a component is not finite.
    """
    expected = (contract.k_max, contract.hidden_size)
    if vectors.shape != expected:
        raise BundleError(f"lookahead vectors have shape {vectors.shape}, expected {expected}")
    with np.errstate(over="ignore"):
        stored = to_stored(vectors, contract.compute_dtype)
    if not np.isfinite(from_stored(stored, contract.compute_dtype)).all():
        raise BundleError(
            "lookahead vectors hold NaN, infinity or numbers too large for "
            f"{contract.compute_dtype}; tune or build them again"
        )
    return stored
