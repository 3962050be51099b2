"""Rungs 9 and 11: what must not be seen changes nothing, bit for bit."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_export.verify.decoding import decode, decode_recorded
from la_export.verify.findings import Figure, Finding
from la_export.verify.ladder import EncodedPrompt, Ladder
from la_export.verify.passes import lookahead_vectors, random_vectors, score_rows
from la_export.verify.probes import SpoiledCache
from la_runtime.backends.base import CacheSizing
from la_runtime.batch import BlockPolicy
from la_runtime.layout import Layout, make_rows
from la_runtime.sampling import SamplingParams

__all__ = ["check_no_leak", "check_unused_places"]

_SEED: Final = 9
_OPPOSITE: Final = np.float32(-3.0)
_BATCH: Final = 3
_CHUNK: Final = 16


def check_no_leak(ladder: Ladder) -> Finding:
    """Rows that are verified give the same logits whatever the lookahead vectors are.

    In the pass that holds the slots, and in the next one, which reads what was committed. The
    slots' own logits must change, or nothing was shown.
    """
    if not ladder.lookahead_lengths:
        return Finding(skipped="the bundle has no lookahead length above 0")
    problems: list[str] = []
    rows = 0
    prompt = max(ladder.prompts, key=lambda entry: len(entry.token_ids))
    vectors = {
        "opposite vectors": ladder.own_vectors * _OPPOSITE,
        "random vectors": random_vectors(ladder, seed=_SEED),
    }
    for layout in ladder.layouts:
        for k in ladder.lookahead_lengths:
            verified, slots = _run_with_slots(ladder, prompt, k, layout)
            rows += len(verified)
            for name, others in vectors.items():
                with lookahead_vectors(ladder, others):
                    changed, changed_slots = _run_with_slots(ladder, prompt, k, layout)
                where = f"prompt {prompt.name}, k={k} {layout}, {name}"
                unequal = np.flatnonzero((changed != verified).any(axis=-1))
                if len(unequal):
                    largest = float(np.abs(changed - verified).max())
                    problems.append(
                        f"{where}: {len(unequal)} of {len(verified)} verified rows change, by up "
                        f"to {largest:.2g}; the first is row {unequal[0]}"
                    )
                if np.array_equal(slots, changed_slots) and not np.array_equal(
                    others, ladder.own_vectors
                ):
                    problems.append(f"{where}: the vectors change not even the slots' logits")
    return Finding(
        figures=(Figure(name="rows", value=rows),),
        problems=tuple(problems),
        detail=f"{rows} rows of logits under other vectors, bit for bit",
    )


def _run_with_slots(
    ladder: Ladder, prompt: EncodedPrompt, k: int, layout: Layout
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits of the verified rows of a step and of the row after it, and of the step's slots."""
    text = ladder.text(prompt)[: ladder.most_scored - layout.max_rows(k)]
    num_drafts = min(k, len(prompt.token_ids) - 1, len(text) - 2)
    known = len(text) - 1 - num_drafts
    rows = make_rows(
        known,
        tuple(range(num_drafts)),
        layout.groups(num_drafts, k),
        group_mask=ladder.manifest.lookahead.group_mask,
    )
    state = ladder.backend.allocate(1, CacheSizing.STEPPED)
    logits = score_rows(ladder.backend, state, text[:-1], rows, context=ladder.context).copy()
    ladder.backend.commit(state, [range(rows.num_verified)])
    after = score_rows(
        ladder.backend, state, text[-1:], make_rows(1, (), ()), context=ladder.context
    ).copy()
    state.close()
    return np.concatenate([logits[: rows.num_verified], after]), logits[rows.num_verified :]


def check_unused_places(ladder: Ladder) -> Finding:
    """Unused cache places are filled with large random K/V before every pass; nothing changes.

    Prompts are read in chunks, so that there are unused places in prefill, too.
    """
    problems: list[str] = []
    compared = 0
    prompt = ladder.prompts[0]
    policy = BlockPolicy(widths=ladder.backend.widths, prefill_chunk=_CHUNK)
    for configuration in (None, *ladder.chosen_configurations):
        backend = (
            ladder.backend
            if configuration is None
            else ladder.proposing(configuration, ladder.text(prompt))
        )
        params = ladder.greedy(configuration)
        (clean, clean_logits), (spoiled, logits) = (
            decode_recorded(probed, ladder.manifest, prompt.token_ids, params, policy=policy)
            for probed in (backend, SpoiledCache(backend, seed=_SEED))
        )
        compared += len(logits)
        where = f"prompt {prompt.name}, {configuration or 'plain'}"
        if clean.token_ids != spoiled.token_ids:
            problems.append(f"{where}: {_first_difference(clean.token_ids, spoiled.token_ids)}")
        for position in sorted(clean_logits.keys() & logits.keys()):
            if not np.array_equal(clean_logits[position], logits[position]):
                largest = float(np.abs(clean_logits[position] - logits[position]).max())
                problems.append(f"{where}: logits at position {position} change by {largest:.2g}")
                break
    problems += _compare_batch(ladder)
    return Finding(
        figures=(Figure(name="rows", value=compared),),
        problems=tuple(problems),
        detail=f"{compared} rows of logits and a ragged batch's tokens and margins, bit for bit, "
        "with unused places at 10 times the size of used ones",
    )


def _compare_batch(ladder: Ladder) -> list[str]:
    """A ragged batch has the most unused places."""
    batch = ladder.prompts[:_BATCH]
    k = max(ladder.lookahead_lengths, default=0)
    params = [
        SamplingParams(k=k, max_new_tokens=max(1, ladder.new_tokens - index), ignore_eos=True)
        for index in range(len(batch))
    ]
    prompts = [prompt.token_ids for prompt in batch]
    clean = decode(ladder.backend, ladder.manifest, prompts, params)
    spoiled = decode(SpoiledCache(ladder.backend, seed=_SEED), ladder.manifest, prompts, params)
    problems = []
    for prompt, one, other in zip(batch, clean, spoiled, strict=True):
        where = f"prompt {prompt.name} in a batch of {len(batch)}, k={k}"
        if one.token_ids != other.token_ids:
            problems.append(f"{where}: {_first_difference(one.token_ids, other.token_ids)}")
        elif one.margins != other.margins:
            problems.append(f"{where}: tokens are equal and their margins are not")
    return problems


def _first_difference(expected: list[int], found: list[int]) -> str:
    for place, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one != other:
            return f"new token {place} is {other} instead of {one}"
    raise AssertionError("unreachable: the sequences differ")
