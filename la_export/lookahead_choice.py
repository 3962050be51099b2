"""Which lookahead weights a build takes, and whether they fit its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_export.adapter import Adapter
from la_export.lookahead import LookaheadWeights, make_untuned_vectors, read_lookaheads
from la_export.options import SHIPPED, UNTUNED
from la_runtime.contract import Contract
from la_runtime.errors import UsageError

__all__ = ["SHIPPED_FOLDER", "choose_lookaheads", "find_shipped", "make_untuned"]

SHIPPED_FOLDER: Final = Path(__file__).parent / "tune" / "data"
_NAME_DIGITS: Final = 16


def find_shipped(model_digest: str) -> Path | None:
    """The tuned lookaheads that came with this package for a model; None if there are none."""
    path = SHIPPED_FOLDER / f"{model_digest[:_NAME_DIGITS]}.safetensors"
    return path if path.is_file() else None


def choose_lookaheads(
    wish: str | None,
    contract: Contract,
    *,
    model_digest: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> LookaheadWeights | None:
    """What was wished for, checked; None for untuned.

    Args:
        wish: see `BuildOptions.lookahead`.
        contract: of the model; asks for `k_max` vectors.
        model_digest: SHA-256 of its weights.
        shapes: of its parameters, by name.

    Raises:
        UsageError: there is no such file, or it is another model's or too short.
    """
    if wish == UNTUNED:
        return None
    path = find_shipped(model_digest) if wish in (None, SHIPPED) else Path(str(wish))
    if path is None and wish == SHIPPED:
        raise UsageError(
            "--lookahead shipped: no tuned lookaheads are shipped for this model; make some with "
            "la-export tune, or leave the option out"
        )
    if path is None:
        return None
    weights = read_lookaheads(path)
    _check(path, weights, contract, model_digest)
    _check_adapter(path, weights.adapter, shapes)
    return weights.first(contract.k_max)


def _check(path: Path, weights: LookaheadWeights, contract: Contract, model_digest: str) -> None:
    if weights.model_digest != model_digest:
        raise UsageError(
            f"the lookaheads {path} were tuned for weights {weights.model_digest[:12]}, this model "
            f"has {model_digest[:12]}; tune it with la-export tune, or pass --lookahead untuned"
        )
    count, hidden = weights.vectors.shape
    if hidden != contract.hidden_size:
        raise UsageError(
            f"the lookaheads {path} have {hidden} components, expected {contract.hidden_size}"
        )
    if count < contract.k_max:
        raise UsageError(
            f"the lookaheads {path} were tuned for k up to {count}, --k {contract.k_max} needs "
            "more; tune with a larger --k, or pass --lookahead untuned"
        )


def _check_adapter(path: Path, adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for pair in adapter.pairs:
        for layer, part in pair.parts():
            found = shapes.get(f"{layer}.weight")
            if found is None:
                raise UsageError(
                    f"the lookaheads {path} adapt the layer {layer}, which this model does not "
                    "have; tune it with la-export tune"
                )
            expected = (len(part), pair.reduce.shape[1])
            if found != expected:
                raise UsageError(
                    f"the lookaheads {path} adapt {layer} as {list(expected)}, this model has "
                    f"{list(found)}; tune it with la-export tune"
                )


def make_untuned(
    embeddings: NDArray[np.float32], k_max: int, *, model_digest: str
) -> LookaheadWeights:
    """What a model has before it is tuned."""
    return LookaheadWeights(
        vectors=make_untuned_vectors(embeddings, k_max), model_digest=model_digest, origin=UNTUNED
    )
