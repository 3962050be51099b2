"""Rungs 3 and 6: what the width of a pass changes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from la_export.verify.decoding import Decoded, decode_recorded
from la_export.verify.findings import Figure, Finding
from la_export.verify.ladder import Configuration, EncodedPrompt, Ladder, Proposals
from la_runtime.batch import BlockPolicy
from la_runtime.contract import RowPlaces

__all__ = ["check_epsilon", "check_fixed_width"]

Recorded = tuple[Decoded, dict[int, NDArray[np.float32]]]


def check_epsilon(ladder: Ladder) -> Finding:
    """The near-tie margin of this backend, within what its precision is allowed."""
    positions = min(ladder.settings.epsilon_positions, ladder.context)
    return Finding(
        figures=(
            Figure(name="epsilon", value=ladder.measured_epsilon, bound=ladder.tolerance.epsilon),
            Figure(name="positions", value=positions),
        ),
        detail=f"four times the largest logit difference between 1 row and "
        f"{', '.join(map(str, ladder.block_widths))} rows over {positions} positions",
    )


def check_fixed_width(ladder: Ladder) -> Finding:
    """With every pass at one width, tokens and logits equal bit for bit; nothing is excused."""
    if not ladder.configurations:
        return Finding(skipped="the bundle has no lookahead length above 0")
    problems: list[str] = []
    compared = 0
    accepted = 0
    prompts = ladder.prompts[: ladder.settings.fixed_width_prompts]
    # Elsewhere they are chains as others are, in passes wider than a plan may be built for.
    has_trees = ladder.backend.contract.row_places is RowPlaces.CHOSEN
    configurations = [c for c in ladder.chosen_configurations if has_trees or not c.tree]
    for prompt in prompts:
        plain: dict[int, Recorded] = {}
        for configuration in configurations:
            width = ladder.fixed_width(configuration)
            if width not in plain:
                plain[width] = _record(ladder, prompt, None, width)
            found = _record(ladder, prompt, configuration, width)
            compared += len(found[1])
            accepted += found[0].accepted
            problems += _describe_inequality(prompt, configuration, plain[width], found)
    if not accepted and not problems and ladder.has_room_for_blocks:
        problems.append("no proposal stood, so that no accepted draft was compared")
    return Finding(
        figures=(
            Figure(name="rows compared", value=compared),
            Figure(name="accepted drafts", value=accepted),
        ),
        problems=tuple(problems),
        detail=f"{compared} rows of logits of {len(prompts)} prompts in "
        f"{len(configurations)} configurations, bit for bit",
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
