"""What is timed step by step: L(T), growth with past and batch, reserved places, and prefill.

Each function times the same kind of work on every bundle, keeps the samples with whoever asked,
and reports how far it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import product
from typing import Final, TypeAlias

import numpy as np

from la_export.bench.speed.steps import Scored, allocate_filled, fill_cache, make_step
from la_export.bench.speed.subjects import Subject
from la_export.bench.speed.timing import Rounds, Samples, Work, seconds_of
from la_export.host import available_memory_bytes
from la_runtime.backends.base import CacheSizing, CacheState
from la_runtime.contract import Contract
from la_runtime.sampling import SamplingParams
from la_runtime.storage import storage_dtype

__all__ = [
    "GROWTH_BATCHES",
    "GROWTH_PASTS",
    "GROWTH_ROWS",
    "PREFILL_TOKENS",
    "RESERVED_PLACES",
    "STEP_ROWS",
    "GrowthKey",
    "PrefillKey",
    "Report",
    "ReservedKey",
    "StepKey",
    "step_past",
    "time_growth",
    "time_prefill",
    "time_reserved",
    "time_step_rows",
    "tokens_key",
]

STEP_ROWS: Final = (*range(1, 11), 12, 14, 16, 17, 20, 24, 25, 28, 32, 40, 48, 64)
GROWTH_ROWS: Final = (1, 17)
GROWTH_PASTS: Final = (0, 512, 2048, 4096)
GROWTH_BATCHES: Final = (1, 4, 16)
RESERVED_PLACES: Final = (512, 4096)
PREFILL_TOKENS: Final = (64, 256, 1024)

_STEP_PAST: Final = 256
_ROWS_OF_TOKENS: Final = 9
_MEMORY_SHARE: Final = 0.5
_SEED: Final = 0

Report: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKey:
    """A step of so many rows of a bundle; without slots all of them are tokens."""

    bundle: str
    rows: int
    scored: Scored
    has_slots: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthKey:
    """A step of so many sequences behind so many tokens."""

    bundle: str
    rows: int
    past: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedKey:
    """A step of one row over a cache with so many places reserved."""

    bundle: str
    reserved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillKey:
    """A prompt of so many tokens."""

    bundle: str
    tokens: int


def step_past(context: int) -> int:
    """Tokens in the cache before the steps of L(T): 256, or half of a shorter context."""
    return min(_STEP_PAST, context // 2)


def time_step_rows(
    subjects: Sequence[Subject], samples: Samples[StepKey], rounds: Rounds, report: Report
) -> None:
    """L(T) with the head on all rows, and on the verified ones; of one T also without slots."""
    groups: list[Mapping[StepKey, Work]] = []
    states: list[CacheState] = []
    for subject in subjects:
        past = step_past(subject.context)
        rows = [count for count in STEP_ROWS if past + count <= subject.context]
        state = allocate_filled(
            subject.engine.backend,
            past=past,
            reserved=past + max(rows),
            context=subject.context,
        )
        states.append(state)
        keys = [
            StepKey(bundle=subject.name, rows=count, scored=scored)
            for count, scored in product(rows, Scored)
            if scored is Scored.ALL or scored.rows_of(count) < count
        ]
        if (tokens := tokens_key(subject.name)).rows in rows:
            keys.append(tokens)
        groups.append(
            {
                key: _step(subject, state, key.rows, key.scored, has_slots=key.has_slots)
                for key in keys
            }
        )
    samples.time_in_turn(groups, rounds, report=report)
    for state in states:
        state.close()


def tokens_key(bundle: str) -> StepKey:
    """The step without slots, to be compared with as many rows of which some are."""
    return StepKey(bundle=bundle, rows=_ROWS_OF_TOKENS, scored=Scored.ALL, has_slots=False)


def _step(
    subject: Subject,
    state: CacheState,
    rows: int,
    scored: Scored = Scored.ALL,
    *,
    has_slots: bool = True,
) -> Work:
    return make_step(
        subject.engine.backend,
        state,
        num_rows=rows,
        scored=scored,
        context=subject.context,
        has_slots=has_slots,
    )


def time_growth(
    subject: Subject,
    samples: Samples[GrowthKey],
    rounds: Rounds,
    report: Report,
    *,
    absent: dict[GrowthKey, str],
) -> None:
    """L(T) of one bundle behind more and more tokens, in larger and larger batches.

    Args:
        subject: the bundle.
        samples: where times are kept.
        rounds: of each batch.
        report: told how far each batch has come.
        absent: where it is kept why a point was not measured.
    """
    for batch in GROWTH_BATCHES:
        group: dict[GrowthKey, Work] = {}
        with ExitStack() as opened:
            base = opened.enter_context(
                closing(subject.engine.backend.allocate(1, CacheSizing.STEPPED))
            )
            for past in GROWTH_PASTS:
                state = None
                for rows in GROWTH_ROWS:
                    key = GrowthKey(bundle=subject.name, rows=rows, past=past, batch=batch)
                    obstacle = _find_obstacle(subject, key)
                    if obstacle is not None:
                        absent[key] = obstacle
                        continue
                    if state is None:
                        state = _grow(subject, base, past, batch)
                        opened.callback(state.close)
                    group[key] = _step(subject, state, rows)
            samples.time_in_turn([group], rounds, report=report)


def _grow(subject: Subject, base: CacheState, past: int, batch: int) -> CacheState:
    """A cache of `batch` sequences of so many tokens; `base` reads them, once for all."""
    backend = subject.engine.backend
    if past == 0:
        return backend.allocate(batch, CacheSizing.STEPPED)
    fill_cache(backend, base, past, context=subject.context)
    return base.take([0] * batch)


def _find_obstacle(subject: Subject, key: GrowthKey) -> str | None:
    """Why a point cannot be measured here; None if it can."""
    if key.past + key.rows > subject.context:
        return f"the context is {subject.context}"
    places = key.batch * (key.past + key.rows)
    needed = places * _place_bytes(subject.engine.backend.contract)
    free = available_memory_bytes()
    if needed > _MEMORY_SHARE * free:
        return f"its cache takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free"
    return None


def _place_bytes(contract: Contract) -> int:
    width = storage_dtype(contract.kv_dtype).itemsize
    return 2 * contract.num_layers * contract.num_kv_heads * contract.head_dim * width


def time_reserved(
    subjects: Sequence[Subject], samples: Samples[ReservedKey], rounds: Rounds, report: Report
) -> None:
    """L(1) behind the same tokens, with few and with many places reserved."""
    groups: list[Mapping[ReservedKey, Work]] = []
    states: list[CacheState] = []
    for subject in subjects:
        group = {}
        for reserved in RESERVED_PLACES:
            state = allocate_filled(
                subject.engine.backend,
                past=step_past(subject.context),
                reserved=reserved,
                context=subject.context,
            )
            states.append(state)
            group[ReservedKey(bundle=subject.name, reserved=reserved)] = _step(subject, state, 1)
        groups.append(group)
    samples.time_in_turn(groups, rounds, report=report)
    for state in states:
        state.close()


def time_prefill(
    subjects: Sequence[Subject], samples: Samples[PrefillKey], rounds: Rounds, report: Report
) -> None:
    """Reading prompts of random tokens, in the chunks of the engine's own policy."""
    samples.time_in_turn(
        [
            {
                PrefillKey(bundle=subject.name, tokens=tokens): seconds_of(_reader(subject, tokens))
                for tokens in PREFILL_TOKENS
                if tokens < subject.context - 1
            }
            for subject in subjects
        ],
        rounds,
        report=report,
    )


def _reader(subject: Subject, num_tokens: int) -> Callable[[], None]:
    vocab_size = subject.engine.backend.contract.vocab_size
    prompt = np.random.default_rng(_SEED).integers(vocab_size, size=num_tokens).tolist()
    params = SamplingParams(k=0, max_new_tokens=2, ignore_eos=True)

    def read() -> None:
        subject.engine.prefill(prompt, params).close()

    return read
