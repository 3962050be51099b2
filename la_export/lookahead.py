"""Untuned lookahead vectors: every one is the mean of the embedding table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_runtime.contract import Name
from la_runtime.layout import GroupMask

__all__ = ["UNTUNED", "make_untuned_vectors", "write_lookahead_vectors"]

UNTUNED: Final = "untuned"
_HEADER_ALIGNMENT_BYTES: Final = 8


def make_untuned_vectors(embeddings: NDArray[np.float32], k_max: int) -> NDArray[np.float32]:
    """The mean embedding, once per lookahead.

    Args:
        embeddings: [vocab_size, hidden] float32.
        k_max: number of lookahead vectors.

    Returns:
        [k_max, hidden] float32.
    """
    mean = embeddings.mean(axis=0, dtype=np.float64).astype(np.float32)
    return np.repeat(mean[np.newaxis], k_max, axis=0)


def write_lookahead_vectors(
    path: Path, vectors: NDArray[np.float32], *, model_digest: str, origin: str
) -> None:
    """Write vectors as safetensors, with the digest of the weights they belong to.

    The header is written here because the library puts metadata in another order each time, and
    equal vectors must give equal bytes.

    Args:
        path: file to write.
        vectors: [k_max, hidden] float32.
        model_digest: SHA-256 of the source weights.
        origin: how the vectors were made.
    """
    header = {
        "__metadata__": {
            "model_digest": model_digest,
            "k_max": str(len(vectors)),
            "group_mask": GroupMask.STRICT.value,
            "origin": origin,
        },
        Name.LOOKAHEAD_EMBEDDINGS.value: {
            "dtype": "F32",
            "shape": list(vectors.shape),
            "data_offsets": [0, vectors.nbytes],
        },
    }
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    values = np.ascontiguousarray(vectors, dtype="<f4").tobytes()
    path.write_bytes(len(text).to_bytes(8, "little") + text + values)
