"""Greedy decoding with lookaheads against plain decoding and against transformers.

Every comparison is printed as it is made when it is not plain equality, with the margin that
excuses it or fails to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from la_export.verify.recording import RecordingBackend
from la_export.verify.tokens import Comparison, Verdict, compare_tokens
from la_runtime.decoder import BlockPolicy, Decoder
from la_runtime.generation import Engine
from la_runtime.layout import Layout
from la_runtime.sampling import SamplingParams

__all__ = [
    "RAGGED_BATCH",
    "PlainRun",
    "Tally",
    "compare_fixed_width",
    "compare_lookahead",
    "compare_reference",
    "run_plainly",
]

RAGGED_BATCH: Final = 4

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRun:
    """Plain decoding of one prompt: what everything else is compared with."""

    name: str
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class Tally:
    """Comparisons of one kind, summed up."""

    what: str
    k: int
    layout: str
    batch: int
    prompts: int = 0
    tokens: int = 0
    equal: int = 0
    excused: int = 0
    different: int = 0
    tokens_per_pass: float = 0.0
    excuses: list[str] = field(default_factory=list)

    def add(self, name: str, comparison: Comparison, report: Report) -> None:
        """Count one comparison; report it unless everything was equal."""
        self.prompts += 1
        self.tokens += comparison.num_compared
        if comparison.verdict is Verdict.EQUAL:
            self.equal += 1
            return
        if comparison.verdict is Verdict.EXCUSED:
            self.excused += 1
        else:
            self.different += 1
        line = (
            f"{comparison.verdict}: {self.what} k={self.k} {self.layout} batch {self.batch}, "
            f"prompt {name}, new token {comparison.position}, margin {comparison.margin:.2e}"
        )
        self.excuses.append(line)
        report(line)


def run_plainly(engine: Engine, name: str, prompt: Sequence[int], *, num_tokens: int) -> PlainRun:
    """Decode one prompt with k = 0."""
    margins: list[float] = []
    with engine.prefill(prompt, k=0, max_new_tokens=num_tokens) as state:
        margins += state.first.margins
        while state.finish_reason is None:
            margins += state.step().margins
        return PlainRun(
            name=name,
            prompt=tuple(prompt),
            token_ids=state.token_ids,
            margins=tuple(margins),
        )


def compare_reference(
    runs: Sequence[PlainRun],
    generate: Callable[[Sequence[int]], Sequence[int]],
    *,
    epsilon: float,
    report: Report,
) -> Tally:
    """Plain decoding against another implementation's greedy generation."""
    tally = Tally(what="transformers", k=0, layout="none", batch=1)
    for run in runs:
        found = generate(run.prompt)
        comparison = compare_tokens(run.token_ids, run.margins, found, epsilon=epsilon)
        tally.add(run.name, comparison, report)
    return tally


def compare_lookahead(
    engine: Engine,
    runs: Sequence[PlainRun],
    batch: int,
    *,
    k: int,
    layout: Layout,
    num_tokens: int,
    epsilon: float,
    report: Report,
) -> Tally:
    """Lookahead decoding against plain decoding, in (ragged) batches of this many prompts."""
    tally = Tally(what="plain", k=k, layout=layout.value, batch=batch)
    per_pass: list[float] = []
    for start in range(0, len(runs), batch):
        group = runs[start : start + batch]
        results = engine.generate(
            [run.prompt for run in group], k=k, layout=layout, max_new_tokens=num_tokens
        )
        for run, result in zip(group, results, strict=True):
            per_pass.append(result.stats.tokens_per_pass)
            comparison = compare_tokens(
                run.token_ids, run.margins, result.token_ids, epsilon=epsilon
            )
            tally.add(run.name, comparison, report)
    tally.tokens_per_pass = sum(per_pass) / len(per_pass)
    return tally


def compare_fixed_width(
    engine: Engine,
    prompts: Sequence[tuple[str, Sequence[int]]],
    *,
    what: str,
    k: int,
    layout: Layout,
    width: int,
    num_tokens: int,
    report: Report,
) -> Tally:
    """Lookahead against plain decoding with every pass at one width: bit for bit.

    Tokens and the full logits of every row that chose one must be equal; there is no excuse.
    """
    tally = Tally(what=what, k=k, layout=layout.value, batch=1)
    for name, prompt in prompts:
        plain_ids, plain_logits = _record(
            engine, prompt, SamplingParams(max_new_tokens=num_tokens, k=0), width=width
        )
        found_ids, found_logits = _record(
            engine,
            prompt,
            SamplingParams(max_new_tokens=num_tokens, k=k, layout=layout),
            width=width,
        )
        assert plain_logits.keys() == found_logits.keys(), "both choose at the same positions"
        unequal = [
            position - len(prompt) + 1
            for position in sorted(plain_logits)
            if not np.array_equal(plain_logits[position], found_logits[position])
        ]
        is_equal = plain_ids == found_ids and not unequal
        tally.add(
            name,
            Comparison(
                verdict=Verdict.EQUAL if is_equal else Verdict.DIFFERENT,
                num_compared=len(plain_ids),
                position=unequal[0] if unequal else -1,
            ),
            report,
        )
    return tally


def _record(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, *, width: int
) -> tuple[tuple[int, ...], dict[int, np.ndarray]]:
    """Tokens of one decoding, and the logits of each row that chose one, by position."""
    recorder = RecordingBackend(engine.backend)
    model = engine.bundle.manifest.model
    decoder = Decoder(recorder, context=model.context, eos_token_ids=model.eos_token_ids)
    policy = BlockPolicy.fixed_width(width, k_max=recorder.contract.k_max)
    with decoder.start([prompt], [params], policy) as decoding:
        decoding.prefill()
        while not decoding.is_done:
            decoding.step()
        return decoding.token_ids(0), dict(recorder.logits_at)
