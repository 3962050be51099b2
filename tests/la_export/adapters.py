"""Adapters at random for tiny models, large enough that nobody overlooks them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from la_export.adapter import Adapter, AdapterPair
from la_export.checkpoint import find_model, load_checkpoint
from la_export.lookahead import LookaheadWeights, write_lookaheads
from la_export.tune.lookaheads import find_sites

RANK = 3


def make_random_adapter(model: object, *, seed: int = 0, scale: float = 0.3) -> Adapter:
    """One with a pair at every site of a model."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        values = rng.normal(size=shape).astype(np.float32) * scale
        return values.astype(np.float16).astype(np.float32)

    return Adapter(
        pairs=tuple(
            AdapterPair(
                layers=site.layers,
                sizes=site.sizes,
                reduce=draw(RANK, site.width),
                expand=draw(sum(site.sizes), RANK),
            )
            for site in find_sites(model, everywhere=True)
        )
    )


def write_random_lookaheads(checkpoint: Path, path: Path, *, k: int = 4, seed: int = 0) -> Path:
    """A file that fits a checkpoint; also what it holds."""
    loaded = load_checkpoint(
        find_model(str(checkpoint), revision=None, allow_bin=False), context=None
    )
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(k, loaded.config.hidden_size)).astype(np.float32) * 0.1
    write_lookaheads(
        path,
        LookaheadWeights(
            vectors=vectors,
            adapter=make_random_adapter(loaded.load_model(), seed=seed),
            model_digest=loaded.source_digest(),
            origin="at random",
        ),
    )
    return path
