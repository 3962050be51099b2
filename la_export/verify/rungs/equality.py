"""Rungs 5, 7 and 8: the same tokens, with lookaheads and without, greedy and sampled."""

from __future__ import annotations

from typing import Final

import numpy as np

from la_export.verify.decoding import decode
from la_export.verify.findings import Figure, Finding
from la_export.verify.ladder import Configuration, EncodedPrompt, Ladder
from la_export.verify.reference import Reference
from la_export.verify.tokens import EPSILON_LIMIT_FP32, Comparisons, excuse_allowance
from la_runtime.sampling import SamplingParams

__all__ = ["check_greedy_equality", "check_sampled_equality", "check_teacher_forced"]

_TEMPERATURE: Final = 0.8
_TOP_P: Final = 0.95
_REPETITION_PENALTY: Final = 1.1
_PRESENCE_PENALTY: Final = 0.2
_FREQUENCY_PENALTY: Final = 0.1


def _summarize(comparisons: Comparisons, detail: str, *figures: Figure) -> Finding:
    return Finding(
        figures=(
            Figure(name="tokens", value=comparisons.num_tokens),
            Figure(name="near-ties", value=len(comparisons.near_ties)),
            Figure(name="different", value=len(comparisons.differences), bound=0.0),
            *figures,
        ),
        problems=comparisons.problems,
        detail="; ".join(
            (detail, *(f"near-tie: {line}" for line in comparisons.near_ties.values()))
        ),
    )


def check_greedy_equality(ladder: Ladder) -> Finding:
    """Greedy tokens with lookaheads against plain decoding."""
    if not ladder.configurations:
        return Finding(skipped="the bundle has no lookahead length above 0")
    comparisons = Comparisons(epsilon=ladder.epsilon)
    for run in ladder.lookahead_runs:
        plain = ladder.plain_runs[run.prompt.name]
        comparisons.compare(
            f"prompt {run.prompt.name}",
            str(run.configuration),
            plain.token_ids,
            plain.margins,
            run.decoded.token_ids,
        )
    accepted = sum(run.decoded.accepted for run in ladder.lookahead_runs)
    return _summarize(
        comparisons,
        f"{len(ladder.lookahead_runs)} decodings of {len(ladder.prompts)} prompts in "
        f"{len(ladder.configurations)} configurations, {accepted} drafts accepted",
    )


def check_teacher_forced(ladder: Ladder) -> Finding:
    """Every emitted sequence read once by the plain model: each token its choice, or all but.

    The plain model is the bundle's own graph in one causal pass and, with a checkpoint, PyTorch,
    whose near-ties are those of two implementations.
    """
    emitted = {(p.name, tuple(ladder.plain_runs[p.name].token_ids)): p for p in ladder.prompts} | {
        (run.prompt.name, tuple(run.decoded.token_ids)): run.prompt for run in ladder.lookahead_runs
    }
    readers = {"the bundle's own pass": (ladder.own_reference, ladder.epsilon)}
    if ladder.source is not None:
        readers["PyTorch"] = (ladder.reference, EPSILON_LIMIT_FP32)
    near_ties: list[str] = []
    problems: list[str] = []
    num_tokens = 0
    for (_, tokens), prompt in emitted.items():
        num_tokens += len(tokens)
        for reader, (reference, epsilon) in readers.items():
            gaps = _gaps(reference, prompt, tokens)
            for place in np.flatnonzero(gaps > 0):
                line = (
                    f"prompt {prompt.name}: {reader} prefers another token than {tokens[place]} as "
                    f"new token {place}, by {gaps[place]:.2g} (epsilon {epsilon:.2g})"
                )
                (near_ties if gaps[place] < epsilon else problems).append(line)
    allowed = excuse_allowance(num_tokens) * len(readers)
    if len(near_ties) > allowed:
        problems += [f"{len(near_ties)} near-ties, allowed {allowed}", *near_ties]
    return Finding(
        figures=(
            Figure(name="tokens", value=num_tokens),
            Figure(name="near-ties", value=len(near_ties)),
            Figure(name="different", value=len(problems), bound=0.0),
        ),
        problems=tuple(problems),
        detail="; ".join(
            (f"{len(emitted)} sequences read by {' and by '.join(readers)}", *near_ties)
        ),
    )


def _gaps(reference: Reference, prompt: EncodedPrompt, tokens: tuple[int, ...]) -> np.ndarray:
    """[tokens] best logit minus that of the token emitted; 0 where it is the best."""
    logits = reference.scores([*prompt.token_ids, *tokens[:-1]])[len(prompt.token_ids) - 1 :]
    return np.asarray(logits.max(axis=-1) - logits[np.arange(len(tokens)), tokens])


def check_sampled_equality(ladder: Ladder) -> Finding:
    """Sampled tokens, filters and penalties on, against plain decoding with the same seed."""
    if not ladder.configurations:
        return Finding(skipped="the bundle has no lookahead length above 0")
    comparisons = Comparisons(epsilon=ladder.epsilon)
    accepted = 0
    for seed in range(ladder.settings.seeds):
        prompt = ladder.prompts[seed % len(ladder.prompts)]
        configuration = ladder.configurations[seed % len(ladder.configurations)]
        plain = ladder.decode(prompt.token_ids, _sampled(ladder, seed, None))
        text = (*prompt.token_ids, *plain.token_ids)
        (found,) = decode(
            ladder.proposing(configuration, text),
            ladder.manifest,
            [prompt.token_ids],
            [_sampled(ladder, seed, configuration)],
        )
        accepted += found.accepted
        comparisons.compare(
            f"prompt {prompt.name}, seed {seed}",
            str(configuration),
            plain.token_ids,
            plain.margins,
            found.token_ids,
        )
    return _summarize(
        comparisons,
        f"{ladder.settings.seeds} seeds at temperature {_TEMPERATURE}, top_p {_TOP_P}, penalties "
        f"on, {accepted} drafts accepted",
        Figure(name="seeds", value=ladder.settings.seeds),
    )


def _sampled(ladder: Ladder, seed: int, configuration: Configuration | None) -> SamplingParams:
    return SamplingParams(
        k=0 if configuration is None else configuration.k,
        layout=None if configuration is None else configuration.layout,
        max_new_tokens=ladder.new_tokens,
        temperature=_TEMPERATURE,
        top_p=_TOP_P,
        repetition_penalty=_REPETITION_PENALTY,
        presence_penalty=_PRESENCE_PENALTY,
        frequency_penalty=_FREQUENCY_PENALTY,
        seed=seed,
        ignore_eos=True,
    )
