"""Many different requests to one engine, and the memory that stays behind.

Owns the mix of requests. Every kind and every prompt length comes up among the first of them, so
that what grows later is a leak and no larger need.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

from la_export.bench.memory import resident_bytes
from la_runtime.generation import Engine
from la_runtime.layout import Layout
from la_runtime.sampling import SamplingParams

__all__ = ["KINDS", "Resident", "fill_up", "make_prompt", "run_request", "soak"]

_PROMPT_LENGTHS: Final = (3, 90, 17, 150, 45, 8)
_NEW_TOKENS: Final = 8

TokenIds = Sequence[int]


def _generate(engine: Engine, prompts: Sequence[TokenIds], seed: int) -> None:
    engine.generate(prompts[0], max_new_tokens=_NEW_TOKENS, ignore_eos=True)


def _sample(engine: Engine, prompts: Sequence[TokenIds], seed: int) -> None:
    engine.generate(
        prompts[0],
        max_new_tokens=_NEW_TOKENS,
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        logprobs=3,
        seed=seed,
    )


def _sample_twice_strictly(engine: Engine, prompts: Sequence[TokenIds], seed: int) -> None:
    engine.generate(
        prompts[0], max_new_tokens=_NEW_TOKENS, temperature=1.0, seed=seed, n=2, strict=True
    )


def _stop(engine: Engine, prompts: Sequence[TokenIds], seed: int) -> None:
    engine.generate(prompts[0], max_new_tokens=_NEW_TOKENS, stop=("e", "\n", ". "), min_p=0.05)


def _batch(engine: Engine, prompts: Sequence[TokenIds], seed: int) -> None:
    wishes = [
        SamplingParams(k=k, max_new_tokens=3 + k, seed=seed, temperature=0.5 * (k == 1))
        for k in (0, 1, 2)
    ]
    engine.generate(prompts[:3], wishes)


def _stream(engine: Engine, prompts: Sequence[TokenIds], seed: int) -> None:
    with engine.stream(prompts[0], max_new_tokens=_NEW_TOKENS, layout="full") as stream:
        for _ in stream:
            pass


def _leave_stream(engine: Engine, prompts: Sequence[TokenIds], seed: int) -> None:
    with engine.stream(prompts[0], max_new_tokens=64, ignore_eos=True) as stream:
        next(stream)


def _cancel_async_stream(engine: Engine, prompts: Sequence[TokenIds], seed: int) -> None:
    async def read_one() -> None:
        stream = engine.astream(prompts[0], max_new_tokens=64, ignore_eos=True)
        async with stream:
            await anext(stream)

    asyncio.run(read_one())


KINDS: Final[tuple[Callable[[Engine, Sequence[TokenIds], int], None], ...]] = (
    _generate,
    _sample,
    _stream,
    _leave_stream,
    _stop,
    _batch,
    _cancel_async_stream,
    _sample_twice_strictly,
)


def make_prompt(engine: Engine, index: int) -> list[int]:
    """Token ids of a prompt, as long as its index says and the context allows."""
    longest = engine.bundle.manifest.model.context // 2
    length = min(_PROMPT_LENGTHS[index % len(_PROMPT_LENGTHS)], longest)
    vocab_size = engine.backend.contract.vocab_size
    drawn = np.random.default_rng(index).integers(vocab_size, size=length)
    return [int(token_id) for token_id in drawn]


def run_request(engine: Engine, index: int) -> None:
    """The request of this index: a kind and prompts of its own."""
    # Kinds and lengths go round at different speeds, so that each kind meets each length.
    kind = KINDS[index % len(KINDS)]
    first = index // len(KINDS)
    kind(engine, [make_prompt(engine, first + place) for place in range(3)], index)


def fill_up(engine: Engine, num_threads: int) -> None:
    """What the mix needs at most, should its heaviest requests ever come together.

    Which of them share a pass is chance, and the memory of the heaviest pass is kept.
    """
    count = min(num_threads, engine.max_batch)
    longest = make_prompt(engine, _PROMPT_LENGTHS.index(max(_PROMPT_LENGTHS)))
    params = SamplingParams(
        max_new_tokens=_NEW_TOKENS,
        temperature=0.8,
        logprobs=3,
        layout=Layout.FULL,
        ignore_eos=True,
    )
    engine.generate([longest] * count, params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """What the process held when so many requests were done."""

    num_requests: int
    resident_bytes: int


def soak(
    engine: Engine,
    *,
    num_requests: int,
    num_threads: int,
    every: int,
    report: Callable[[Resident], None],
) -> list[Resident]:
    """Make requests, `num_threads` at a time, and look at the memory after every few of them.

    Before the first one stands the call of `fill_up`.

    Args:
        engine: one engine for all of them.
        num_requests: how many, a multiple of `every`.
        num_threads: threads that make them.
        every: requests between two looks; all of these have ended when memory is looked at.
        report: told each look as it is made.
    """
    found = []
    fill_up(engine, num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        for start in range(0, num_requests, every):
            for _ in pool.map(lambda i: run_request(engine, i), range(start, start + every)):
                pass
            gc.collect()
            found.append(Resident(num_requests=start + every, resident_bytes=resident_bytes()))
            report(found[-1])
    return found
