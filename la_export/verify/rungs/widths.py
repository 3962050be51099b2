"""Rungs 3, 4 and 6: what the width of a pass, its padding and its neighbours change."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_export.verify.decoding import Decoded, decode, decode_recorded
from la_export.verify.findings import Figure, Finding
from la_export.verify.ladder import Configuration, EncodedPrompt, Ladder, Proposals
from la_export.verify.passes import read_text, score_batch
from la_export.verify.rungs.logits import LOGITS_BOUND
from la_export.verify.tokens import EPSILON_LIMIT_FP32, Comparisons
from la_runtime.backends.base import CacheSizing
from la_runtime.block import Part
from la_runtime.decoder import BlockPolicy
from la_runtime.layout import make_rows
from la_runtime.sampling import SamplingParams

__all__ = ["check_epsilon", "check_fixed_width", "check_padding"]

_BATCH: Final = 4
_EXTRA_WIDTH: Final = 7

Recorded = tuple[Decoded, dict[int, NDArray[np.float32]]]


def check_epsilon(ladder: Ladder) -> Finding:
    """The near-tie margin of this backend, within what fp32 is allowed."""
    positions = min(ladder.settings.epsilon_positions, ladder.context)
    return Finding(
        figures=(
            Figure(name="epsilon", value=ladder.measured_epsilon, bound=EPSILON_LIMIT_FP32),
            Figure(name="positions", value=positions),
        ),
        detail=f"four times the largest logit difference between 1 row and "
        f"{', '.join(map(str, ladder.block_widths))} rows over {positions} positions",
    )


def check_padding(ladder: Ladder) -> Finding:
    """Logits and tokens of ragged, padded batches against each sequence alone."""
    batch = ladder.prompts[:_BATCH]
    share, problems = _compare_padded_logits(ladder, batch)
    comparisons = Comparisons(epsilon=ladder.epsilon)
    for k in (0, *ladder.lookahead_lengths[-1:]):
        _compare_ragged_tokens(ladder, batch, k, comparisons)
    return Finding(
        figures=(
            Figure(name="largest share of the range", value=share, bound=LOGITS_BOUND),
            Figure(name="tokens", value=comparisons.num_tokens),
            Figure(name="near-ties", value=len(comparisons.near_ties)),
        ),
        problems=(*problems, *comparisons.problems),
        detail=f"batches of {len(batch)} prompts of "
        f"{', '.join(str(len(p.token_ids)) for p in batch)} tokens against each alone",
    )


def _compare_padded_logits(
    ladder: Ladder, batch: tuple[EncodedPrompt, ...]
) -> tuple[float, list[str]]:
    """Every row of one padded pass; the largest difference as a share of the range."""
    parts = [
        Part(rows=make_rows(len(p.token_ids), (), ()), token_ids=p.token_ids, scored_from=0)
        for p in batch
    ]
    longest = max(len(prompt.token_ids) for prompt in batch)
    state = ladder.backend.allocate(len(batch), CacheSizing.STEPPED)
    found = score_batch(
        ladder.backend, state, parts, context=ladder.context, widths=(longest + _EXTRA_WIDTH,)
    ).copy()
    state.close()
    largest, problems = 0.0, []
    for prompt, logits in zip(batch, found, strict=True):
        length = len(prompt.token_ids)
        alone = read_text(ladder.backend, prompt.token_ids, width=length, context=ladder.context)
        difference = np.abs(logits[:length] - alone)
        share = float(difference.max()) / (float(np.ptp(alone)) or 1.0)
        largest = max(largest, share)
        if not share <= LOGITS_BOUND:
            row = int(np.argmax(difference.max(axis=-1)))
            problems.append(
                f"prompt {prompt.name}: logits at position {row} change by {share:.2g} of their "
                f"range in a batch of {len(batch)}"
            )
    return largest, problems


def _compare_ragged_tokens(
    ladder: Ladder, batch: tuple[EncodedPrompt, ...], k: int, comparisons: Comparisons
) -> None:
    """Sequences of a batch end one after the other; each against its own plain run."""
    lengths = [max(1, ladder.new_tokens - index) for index in range(len(batch))]
    params = [SamplingParams(k=k, max_new_tokens=length, ignore_eos=True) for length in lengths]
    prompts = [prompt.token_ids for prompt in batch]
    together = decode(ladder.backend, ladder.manifest, prompts, params)
    for prompt, length, found in zip(batch, lengths, together, strict=True):
        plain = ladder.plain_runs[prompt.name]
        comparisons.compare(
            f"prompt {prompt.name}",
            f"batch of {len(batch)}, k={k}",
            plain.token_ids[:length],
            plain.margins,
            found.token_ids,
        )


def check_fixed_width(ladder: Ladder) -> Finding:
    """With every pass at one width, tokens and logits equal bit for bit; nothing is excused."""
    if not ladder.configurations:
        return Finding(skipped="the bundle has no lookahead length above 0")
    problems: list[str] = []
    compared = 0
    accepted = 0
    prompts = ladder.prompts[: ladder.settings.fixed_width_prompts]
    for prompt in prompts:
        plain: dict[int, Recorded] = {}
        for configuration in ladder.chosen_configurations:
            width = ladder.fixed_width(configuration)
            if width not in plain:
                plain[width] = _record(ladder, prompt, None, width)
            found = _record(ladder, prompt, configuration, width)
            compared += len(found[1])
            accepted += found[0].accepted
            problems += _describe_inequality(prompt, configuration, plain[width], found)
    if not accepted and not problems:
        problems.append("no proposal stood, so that no accepted draft was compared")
    return Finding(
        figures=(
            Figure(name="rows compared", value=compared),
            Figure(name="accepted drafts", value=accepted),
        ),
        problems=tuple(problems),
        detail=f"{compared} rows of logits of {len(prompts)} prompts in "
        f"{len(ladder.chosen_configurations)} configurations, bit for bit",
    )


def _record(
    ladder: Ladder, prompt: EncodedPrompt, configuration: Configuration | None, width: int
) -> Recorded:
    backend = ladder.backend
    if configuration is not None and configuration.proposals is Proposals.GIVEN:
        backend = ladder.proposing(configuration, ladder.text(prompt))
    policy = BlockPolicy.fixed_width(width, k_max=backend.contract.k_max)
    return decode_recorded(
        backend, ladder.manifest, prompt.token_ids, ladder.greedy(configuration), policy=policy
    )


def _describe_inequality(
    prompt: EncodedPrompt, configuration: Configuration, plain: Recorded, found: Recorded
) -> list[str]:
    where = f"prompt {prompt.name}, {configuration}"
    for place, (expected, token) in enumerate(
        zip(plain[0].token_ids, found[0].token_ids, strict=True)
    ):
        if expected != token:
            return [f"{where}: new token {place} is {token}, expected {expected}"]
    assert plain[1].keys() == found[1].keys(), "both choose at the same positions"
    for position, logits in sorted(plain[1].items()):
        if not np.array_equal(logits, found[1][position]):
            largest = float(np.abs(logits - found[1][position]).max())
            return [f"{where}: logits at position {position} differ by {largest:.2g}"]
    return []
