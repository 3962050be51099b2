"""Lookahead weights as a file: vectors, and the adapter of the rows they make, if they have one.

The file names the weights of the model they belong to and the group mask they were made for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from la_export.adapter import NO_ADAPTER, Adapter, AdapterPair
from la_runtime.contract import Name
from la_runtime.errors import UsageError
from la_runtime.layout import GroupMask

__all__ = [
    "LookaheadWeights",
    "make_untuned_vectors",
    "read_lookaheads",
    "write_lookaheads",
]

_HEADER_ALIGNMENT_BYTES: Final = 8
_REDUCE: Final = "reduce"
_EXPAND: Final = "expand"
# What the file calls the dtypes it holds. Half precision keeps an adapter's file small; tuning
# rounds it before it takes its figures.
_DTYPES: Final[Mapping[str, np.dtype[np.generic]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadWeights:
    """What makes lookaheads of one model.

    Args:
        vectors: [k_max, hidden] float32.
        adapter: of the rows they make; its numbers are those of float16.
        group_mask: what a slot sees of its own group.
        model_digest: SHA-256 of the model's source weights.
        origin: how they were made, in a few words.
        tuning: what is known of how they were tuned, by name.
    """

    vectors: NDArray[np.float32]
    adapter: Adapter = NO_ADAPTER
    group_mask: GroupMask = GroupMask.STRICT
    model_digest: str
    origin: str
    tuning: Mapping[str, str] = field(default_factory=dict)

    def first(self, k_max: int) -> LookaheadWeights:
        """The same with fewer vectors; no slot depends on those behind it."""
        return replace(self, vectors=self.vectors[:k_max])


class _Metadata(BaseModel):
    """Strings by name, as safetensors has it."""

    model_config = ConfigDict(extra="forbid")

    model_digest: str
    k_max: int = Field(ge=1)
    group_mask: GroupMask
    origin: str
    adapter: str = "[]"
    tuning: str = "{}"


class _PairPlace(BaseModel):
    """The layers of a pair, and their sizes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    layers: list[str]
    sizes: list[int]


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


def write_lookaheads(path: Path, weights: LookaheadWeights) -> None:
    """Write as safetensors: equal weights give equal bytes.

    The header is written here because the library puts metadata in another order each time.

    Args:
        path: file to write.
        weights: what to write.
    """
    metadata = {
        "model_digest": weights.model_digest,
        "k_max": str(len(weights.vectors)),
        "group_mask": weights.group_mask.value,
        "origin": weights.origin,
    }
    if pairs := weights.adapter.pairs:
        places = [{"layers": list(p.layers), "sizes": list(p.sizes)} for p in pairs]
        metadata["adapter"] = json.dumps(places)
    if weights.tuning:
        metadata["tuning"] = json.dumps(dict(weights.tuning), sort_keys=True)
    header: dict[str, Any] = {"__metadata__": metadata}
    parts: list[bytes] = []
    end = 0
    for name, kind, array in _tensors(weights):
        parts.append(array.astype(_DTYPES[kind]).tobytes())
        start, end = end, end + len(parts[-1])
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def _tensors(weights: LookaheadWeights) -> list[tuple[str, str, NDArray[np.float32]]]:
    """Vectors first, so that what is aligned to four bytes comes before what is not."""
    tensors = [(Name.LOOKAHEAD_EMBEDDINGS.value, "F32", weights.vectors)]
    for index, pair in enumerate(weights.adapter.pairs):
        tensors += [
            (_pair_name(index, _REDUCE), "F16", pair.reduce),
            (_pair_name(index, _EXPAND), "F16", pair.expand),
        ]
    return tensors


def _pair_name(index: int, part: str) -> str:
    return f"adapter.{index}.{part}"


def read_lookaheads(path: Path) -> LookaheadWeights:
    """What `write_lookaheads` wrote.

    Raises:
        UsageError: the file is not there, or not one of these.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = _Metadata.model_validate(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        places = [_PairPlace.model_validate(place) for place in json.loads(metadata.adapter)]
        pairs = tuple(_read_pair(tensors, i, place) for i, place in enumerate(places))
        vectors = tensors.pop(Name.LOOKAHEAD_EMBEDDINGS.value)
        _check_vectors(vectors, metadata.k_max)
        if tensors:
            raise ValueError(f"{next(iter(tensors))} is none of its tensors")
        return LookaheadWeights(
            vectors=vectors.astype(np.float32),
            adapter=Adapter(pairs=pairs),
            group_mask=metadata.group_mask,
            model_digest=metadata.model_digest,
            origin=metadata.origin,
            tuning=json.loads(metadata.tuning),
        )
    except (OSError, SafetensorError, ValidationError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())  # pydantic's has a line for each fault
        raise UsageError(
            f"{path} is no file of lookaheads ({reason}); expected one that la-export tune wrote"
        ) from error


def _read_pair(
    tensors: dict[str, NDArray[np.generic]], index: int, place: _PairPlace
) -> AdapterPair:
    return AdapterPair(
        layers=tuple(place.layers),
        sizes=tuple(place.sizes),
        reduce=tensors.pop(_pair_name(index, _REDUCE)).astype(np.float32),
        expand=tensors.pop(_pair_name(index, _EXPAND)).astype(np.float32),
    )


def _check_vectors(vectors: NDArray[np.generic], k_max: int) -> None:
    if vectors.ndim != 2 or len(vectors) != k_max:
        raise ValueError(f"{k_max} vectors have shape {list(vectors.shape)}")
    if not np.isfinite(vectors).all():
        raise ValueError("a vector has a component that is no finite number")
