"""The noise that draws a token: a function of seed, position and token id, and of nothing else.

Knows no scores. Which tokens have much of it at a position is remembered, for a position is looked
at several times: by a slot that proposes its token, and by the rows that verify.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_runtime.filters import vocabulary_blocks
from la_runtime.hashing import mix

__all__ = ["LUCK", "LuckyTokens", "find_lucky", "gumbel_noise"]

# Noise that one token in 400 has.
LUCK: Final = 6.0
_LEAST_LUCKY_HASH: Final = np.uint64(math.ceil(math.exp(-math.exp(-LUCK)) * 2**52) << 12)
# As many positions as batches look at between two passes.
_REMEMBERED: Final = 512


def gumbel_noise(
    seed: int, position: int | NDArray[np.int64], token_ids: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Standard Gumbel noise per token, a function of seed, position and token id alone.

    Adding it to log-probabilities and taking the argmax draws from the distribution.

    Args:
        seed: of the request; any integer.
        position: of the token being chosen.
        token_ids: [tokens]; with an array of positions, the two broadcast.

    Returns:
        [tokens] float64.

    Source: Maddison, Tarlow, Minka: A* sampling, NeurIPS 2014 (the Gumbel-max trick).
    """
    hashed = mix(_state(seed, position) ^ mix(token_ids.astype(np.uint64)))
    # 52 bits and a half are exact in a float64: never 0, never 1.
    uniform = ((hashed >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    return np.asarray(-np.log(-np.log(uniform)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LuckyTokens:
    """The tokens whose noise at a position is at least `LUCK`.

    Args:
        ids: [tokens] ascending.
        noise: [tokens] float64, theirs.
    """

    ids: NDArray[np.int64]
    noise: NDArray[np.float64]


@lru_cache(maxsize=_REMEMBERED)
def find_lucky(seed: int, position: int, vocab_size: int) -> LuckyTokens:
    """The lucky tokens of a position.

    Takes logarithms for them alone: noise grows with the hash that it is made of.
    """
    state, mixed_ids = _state(seed, position), _mix_ids(vocab_size)
    ids = np.concatenate(
        [
            block.start + np.flatnonzero(mix(state ^ mixed_ids[block]) >= _LEAST_LUCKY_HASH)
            for block in vocabulary_blocks(vocab_size)
        ]
    )
    lucky = LuckyTokens(ids=ids, noise=gumbel_noise(seed, position, ids))
    for array in (lucky.ids, lucky.noise):
        array.setflags(write=False)
    return lucky


@lru_cache(maxsize=2)
def _mix_ids(vocab_size: int) -> NDArray[np.uint64]:
    mixed = mix(np.arange(vocab_size, dtype=np.uint64))
    mixed.setflags(write=False)
    return mixed


def _state(seed: int, position: int | NDArray[np.int64]) -> NDArray[np.uint64]:
    state = mix(np.asarray([seed % 2**64], dtype=np.uint64))
    return mix(state ^ np.asarray(position).astype(np.uint64))
