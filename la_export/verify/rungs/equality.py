"""Rungs 5, 7 and 8: the same tokens, with lookaheads and without, greedy and sampled."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, cycle
from typing import Final

import numpy as np

from la_export.verify.decoding import Decoded, decode
from la_export.verify.findings import Figure, Finding
from la_export.verify.ladder import RECIPES, Configuration, EncodedPrompt, Ladder
from la_export.verify.reference import Reference
from la_export.verify.sampler import judge_token
from la_export.verify.tokens import Comparisons, refuse_near_ties
from la_runtime.batch import BlockPolicy
from la_runtime.sampling import SamplingParams

__all__ = ["check_greedy_equality", "check_sampled_equality", "check_teacher_forced"]

_CHUNK: Final = 16


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
    """Greedy tokens with lookaheads, and with prompts read in chunks, against plain decoding."""
    comparisons = Comparisons(tolerance=ladder.tolerance, epsilon=ladder.epsilon)
    for run in ladder.lookahead_runs:
        plain = ladder.plain_runs[run.prompt.name]
        comparisons.compare(
            f"prompt {run.prompt.name}",
            str(run.configuration),
            plain.token_ids,
            plain.margins,
            run.decoded.token_ids,
        )
    num_chunked = _compare_chunked(ladder, comparisons)
    accepted = sum(run.decoded.accepted for run in ladder.lookahead_runs)
    return _summarize(
        comparisons,
        f"{len(ladder.lookahead_runs)} decodings of {len(ladder.prompts)} prompts in "
        f"{len(ladder.configurations)} configurations, {accepted} drafts accepted; "
        f"{num_chunked} decodings whose prompt was read {_CHUNK} tokens at a time",
    )


def _compare_chunked(ladder: Ladder, comparisons: Comparisons) -> int:
    """Decode plainly and with lookaheads behind prompts that take several passes to read.

    Returns:
        How many decodings there were.
    """
    policy = BlockPolicy(widths=ladder.backend.widths, prefill_chunk=_CHUNK)
    prompts = sorted(ladder.prompts, key=lambda entry: -len(entry.token_ids))
    configurations: list[Configuration | None] = [None, *ladder.chosen_configurations[:1]]
    if ladder.settings.every_prompt:
        configurations = [*[None] * len(prompts), *ladder.chosen_configurations]
    pairs = list(zip(cycle(prompts), configurations, strict=False))
    for prompt, configuration in pairs:
        plain = ladder.plain_runs[prompt.name]
        backend = ladder.backend
        if configuration is not None:
            backend = ladder.proposing(configuration, ladder.text(prompt))
        (found,) = decode(
            backend,
            ladder.manifest,
            [prompt.token_ids],
            [ladder.greedy(configuration)],
            policy=policy,
        )
        comparisons.compare(
            f"prompt {prompt.name}",
            f"read {_CHUNK} tokens at a time, {configuration or 'plain'}",
            plain.token_ids,
            plain.margins,
            found.token_ids,
        )
    return len(pairs)


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
        readers["PyTorch"] = (ladder.reference, ladder.tolerance.reference_epsilon)
    near_ties: dict[str, list[str]] = {reader: [] for reader in readers}
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
                (near_ties[reader] if gaps[place] < epsilon else problems).append(line)
    own, *others = near_ties.values()
    problems += refuse_near_ties(own, ladder.tolerance.excuse_allowance(num_tokens))
    for lines in others:
        problems += refuse_near_ties(lines, ladder.tolerance.reference_allowance(num_tokens))
    return Finding(
        figures=(
            Figure(name="tokens", value=num_tokens),
            *(
                Figure(name=f"near-ties of {reader}", value=len(lines))
                for reader, lines in near_ties.items()
            ),
            Figure(name="different", value=len(problems), bound=0.0),
        ),
        problems=tuple(problems),
        detail="; ".join(
            (
                f"{len(emitted)} sequences read by {' and by '.join(readers)}",
                *chain.from_iterable(near_ties.values()),
            )
        ),
    )


def _gaps(reference: Reference, prompt: EncodedPrompt, tokens: tuple[int, ...]) -> np.ndarray:
    """[tokens] best logit minus that of the token emitted; 0 where it is the best."""
    logits = reference.scores([*prompt.token_ids, *tokens[:-1]])[len(prompt.token_ids) - 1 :]
    return np.asarray(logits.max(axis=-1) - logits[np.arange(len(tokens)), tokens])


def check_sampled_equality(ladder: Ladder) -> Finding:
    """Sampled tokens with lookaheads against plain decoding, and plain decoding against a truth.

    Both choose tokens with the same code; so each plain token is chosen once more from the
    reference's scores by `sampler`.
    """
    comparisons = Comparisons(tolerance=ladder.tolerance, epsilon=ladder.epsilon)
    truth = _Truth(ladder)
    accepted = 0
    for seed in range(ladder.settings.seeds):
        prompt = ladder.prompts[seed % len(ladder.prompts)]
        params = ladder.sampled(seed)
        plain = ladder.plain_decoding(prompt, params)
        truth.judge(prompt, params, plain)
        if not ladder.configurations:
            continue
        configuration = ladder.configurations[seed % len(ladder.configurations)]
        text = (*prompt.token_ids, *plain.token_ids)
        (found,) = decode(
            ladder.proposing(configuration, text),
            ladder.manifest,
            [prompt.token_ids],
            [ladder.sampled(seed, configuration)],
        )
        accepted += found.accepted
        comparisons.compare(
            f"prompt {prompt.name}, seed {seed}",
            str(configuration),
            plain.token_ids,
            plain.margins,
            found.token_ids,
        )
    finding = _summarize(
        comparisons,
        f"{ladder.settings.seeds} seeds, {len(RECIPES)} mixes of temperature, filters, penalties "
        f"and bias, {accepted} drafts accepted; {truth.num_tokens} tokens chosen again from "
        f"{'PyTorch' if ladder.source else 'the graph'}'s scores",
        Figure(name="seeds", value=ladder.settings.seeds),
        Figure(name="tokens chosen again", value=truth.num_tokens),
    )
    return replace(finding, problems=(*truth.problems, *finding.problems))


class _Truth:
    """Plain decoding's sampled tokens, each chosen again from the reference's scores."""

    def __init__(self, ladder: Ladder) -> None:
        self._reference = ladder.reference
        # Two implementations differ by more than two widths of one.
        tolerance = ladder.tolerance
        self._epsilon = tolerance.reference_epsilon if ladder.source else ladder.epsilon
        self._allowance = (
            tolerance.reference_allowance if ladder.source else tolerance.excuse_allowance
        )
        self._differences: list[str] = []
        self._near_ties: list[str] = []
        self.num_tokens = 0

    def judge(self, prompt: EncodedPrompt, params: SamplingParams, found: Decoded) -> None:
        """Choose every token of a plain decoding again."""
        text = (*prompt.token_ids, *found.token_ids)
        prompt_len = len(prompt.token_ids)
        scores = self._reference.scores(text[:-1])[prompt_len - 1 :]
        for place, (token_id, logits) in enumerate(zip(found.token_ids, scores, strict=True)):
            judgement = judge_token(
                token_id,
                logits,
                text[: prompt_len + place],
                params,
                prompt_len=prompt_len,
                epsilon=self._epsilon,
            )
            self.num_tokens += 1
            if judgement.is_expected:
                continue
            lines = self._near_ties if judgement.is_near_tie else self._differences
            lines.append(
                f"prompt {prompt.name}, seed {params.seed}: new token {place} is {token_id}, its "
                f"parameters choose {judgement.expected} (score and noise {judgement.gap:.2g} "
                f"higher, epsilon {self._epsilon:.2g})"
            )

    @property
    def problems(self) -> tuple[str, ...]:
        """What is not excused, and the near-ties if there are too many of them."""
        return (
            *self._differences,
            *refuse_near_ties(self._near_ties, self._allowance(self.num_tokens)),
        )
