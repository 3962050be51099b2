"""The lookahead vectors: read from the bundle, checked, and rounded to the compute dtype."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from la_runtime.bundle import Bundle
from la_runtime.contract import Contract, Name
from la_runtime.errors import BundleError
from la_runtime.storage import from_stored, to_stored

__all__ = ["load_lookahead_vectors", "store_lookahead_vectors"]


def load_lookahead_vectors(bundle: Bundle) -> NDArray[np.floating]:
    """The vectors of a bundle, as written.

    Raises:
        BundleError: the file is damaged or has none.
    """
    path = bundle.path(bundle.manifest.lookahead.path)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise BundleError(f"{path} is no safetensors file ({error}); rebuild the bundle") from error
    if Name.LOOKAHEAD_EMBEDDINGS not in tensors:
        raise BundleError(f"{path} has no tensor '{Name.LOOKAHEAD_EMBEDDINGS}'; rebuild the bundle")
    return tensors[Name.LOOKAHEAD_EMBEDDINGS]


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
