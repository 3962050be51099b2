"""Many prompts decoded with lookaheads, token by token the same as plain decoding or not.

Owns the tasks of that measurement, the file that keeps what has been decoded so that it can be
stopped and resumed, and the rows made of it. `scripts/exactness.py` runs it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from la_export.bench.prompts import BenchPrompt
from la_export.bench.results import Cell
from la_export.verify.tokens import Comparison, Verdict, compare_tokens
from la_runtime.generation import Engine
from la_runtime.sampling import SamplingParams
from la_runtime.source_names import SourceName

__all__ = [
    "MAIN_K",
    "EncodedPrompt",
    "Run",
    "Sampling",
    "Store",
    "Task",
    "decode",
    "encode_prompts",
    "judge",
    "make_tasks",
]

MAIN_K: Final = 4


class Sampling(StrEnum):
    """How tokens are chosen: ``greedy``, or ``sampled`` with filters, penalties and a seed."""

    GREEDY = "greedy"
    SAMPLED = "sampled"

    def params(self, *, seed: int, new_tokens: int) -> SamplingParams:
        """The request, but for how it is drafted."""
        if self is Sampling.GREEDY:
            return SamplingParams(max_new_tokens=new_tokens)
        return SamplingParams(
            max_new_tokens=new_tokens,
            temperature=0.8,
            top_p=0.95,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.1,
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One way of decoding some prompts; k = 0 is plain decoding.

    Args:
        k: lookahead length.
        sampling: how tokens are chosen.
        num_prompts: the first so many prompts.
        is_planned: whether drafts are those of all sources, in trees, as many as pay; else they
            are those of k slots, in a chain.
        strict_below: choices of a smaller margin are made again; None makes none again.
    """

    k: int
    sampling: Sampling
    num_prompts: int
    is_planned: bool = False
    strict_below: float | None = None

    @property
    def is_strict(self) -> bool:
        """Whether near-ties are chosen again."""
        return self.strict_below is not None

    @property
    def name(self) -> str:
        """What the command line calls it."""
        how = "plain" if self.k == 0 else f"k{self.k}"
        if self.is_planned:
            how = "planned"
        return f"{how}-{self.sampling}" + ("-strict" if self.is_strict else "")

    @property
    def key(self) -> str:
        """What the store calls it: all that its runs depend on."""
        return f"{self.name} {self.strict_below:.3e}" if self.is_strict else self.name

    @property
    def plain(self) -> Task:
        """Plain decoding of the same prompts, which it is compared with."""
        return Task(k=0, sampling=self.sampling, num_prompts=self.num_prompts)


def make_tasks(ks: Sequence[int], *, many: int, few: int, strict_below: float) -> tuple[Task, ...]:
    """Lookahead decodings to compare: `many` prompts for `MAIN_K`, `few` for other lengths.

    Strict and planned decoding are compared for `MAIN_K` alone, strict decoding only where some
    choice would be made again.

    Args:
        ks: lookahead lengths.
        many: prompts for `MAIN_K`.
        few: prompts for the others.
        strict_below: margin below which strict decoding chooses again.
    """
    plainly = [
        Task(k=k, sampling=sampling, num_prompts=many if k == MAIN_K else few)
        for k in ks
        for sampling in Sampling
    ]
    strictly = [
        Task(k=k, sampling=sampling, num_prompts=many, strict_below=strict_below)
        for k in ks
        if k == MAIN_K and strict_below > 0
        for sampling in Sampling
    ]
    planned = [
        Task(k=MAIN_K, sampling=sampling, num_prompts=many, is_planned=True)
        for sampling in Sampling
        if MAIN_K in ks
    ]
    return (*plainly, *planned, *strictly)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt by name and token ids."""

    name: str
    token_ids: tuple[int, ...]


def encode_prompts(
    engine: Engine, prompts: Sequence[BenchPrompt], *, longest: int
) -> list[EncodedPrompt]:
    """First turns in the chat template, group by group in turn, then later turns by themselves.

    Args:
        engine: whose template and tokenizer are used.
        prompts: the benchmark's questions.
        longest: most tokens of a prompt; longer ones are left out.
    """
    by_group: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        by_group.setdefault(prompt.group, []).append(prompt)
    most = max(map(len, by_group.values()), default=0)
    in_turn = [
        members[rank]
        for rank in range(most)
        for members in by_group.values()
        if rank < len(members)
    ]
    most_turns = max((len(prompt.turns) for prompt in prompts), default=0)
    encoded = [
        EncodedPrompt(
            name=f"{prompt.group}/{prompt.question_id}/{turn + 1}",
            token_ids=engine.encode(prompt.turns[turn], chat=True),
        )
        for turn in range(most_turns)
        for prompt in in_turn
        if turn < len(prompt.turns)
    ]
    return [prompt for prompt in encoded if len(prompt.token_ids) <= longest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One prompt decoded.

    Args:
        token_ids: the new tokens.
        margins: per token, best minus second score; of plain decoding alone.
        decode_tokens: tokens behind those of prefill.
        decode_passes: passes behind those of prefill.
        rechecked: choices made again by a pass of one row.
    """

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]
    decode_tokens: int
    decode_passes: int
    rechecked: int


def decode(
    engine: Engine, task: Task, prompt: Sequence[int], *, index: int, new_tokens: int
) -> Run:
    """Decode one prompt, alone.

    Args:
        engine: over the bundle.
        task: how.
        prompt: token ids.
        index: of the prompt; the seed of sampling.
        new_tokens: most tokens.
    """
    params = replace(
        task.sampling.params(seed=index, new_tokens=new_tokens),
        k=task.k,
        sources=tuple(SourceName) if task.is_planned else None,
        strict=task.is_strict,
    )
    margins: list[float] = []
    with engine.prefill(prompt, params) as state:
        margins += state.first.margins
        while state.finish_reason is None:
            margins += state.step().margins
        stats = state.stats
        return Run(
            token_ids=state.token_ids,
            margins=tuple(margins) if task.k == 0 else (),
            decode_tokens=stats.new_tokens - stats.prefill_tokens,
            decode_passes=stats.passes - stats.prefill_passes,
            rechecked=stats.rechecked,
        )


class Store:
    """What has been decoded, in a file that several processes may fill.

    Runs of another bundle or other settings are forgotten.

    Args:
        path: of the file; its folder is made when missing.
        key: what all runs depend on, as JSON values.
    """

    def __init__(self, path: Path, *, key: Mapping[str, Any]) -> None:
        self._path = path
        self._key = dict(key)
        self._runs: dict[str, dict[str, Run]] = {}
        self._epsilon: float | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            pass

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The file to oneself; what others wrote into it is read first."""
        with open(self._path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read()
            yield

    def _read(self) -> None:
        if not self._path.exists():
            return
        written = json.loads(self._path.read_bytes())
        if written["key"] != self._key:
            return
        self._epsilon = written["epsilon"] if self._epsilon is None else self._epsilon
        for task, runs in written["runs"].items():
            known = self._runs.setdefault(task, {})
            for name, run in runs.items():
                known.setdefault(name, _parse_run(run))

    def _write(self) -> None:
        runs = {
            task: {name: asdict(run) for name, run in runs.items()}
            for task, runs in self._runs.items()
        }
        text = json.dumps({"key": self._key, "epsilon": self._epsilon, "runs": runs})
        partial = self._path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self._path)

    @property
    def epsilon(self) -> float | None:
        """Margin of a near-tie, once it has been measured."""
        return self._epsilon

    def set_epsilon(self, epsilon: float) -> None:
        """Keep a measured epsilon, unless another process was first."""
        with self._locked():
            if self._epsilon is None:
                self._epsilon = epsilon
                self._write()

    def runs(self, task: Task) -> Mapping[str, Run]:
        """Runs of a task, by the prompt's name."""
        return self._runs.get(task.key, {})

    def add(self, task: Task, runs: Mapping[str, Run]) -> None:
        """Keep some runs of a task."""
        with self._locked():
            self._runs.setdefault(task.key, {}).update(runs)
            self._write()


def _parse_run(written: dict[str, Any]) -> Run:
    return Run(
        token_ids=tuple(written["token_ids"]),
        margins=tuple(written["margins"]),
        decode_tokens=written["decode_tokens"],
        decode_passes=written["decode_passes"],
        rechecked=written["rechecked"],
    )


def judge(
    task: Task, store: Store, names: Sequence[str], *, epsilon: float
) -> tuple[dict[str, Cell], list[str]]:
    """Compare one task's runs with plain decoding.

    Args:
        task: which.
        store: holds its runs and those of plain decoding.
        names: prompts in order; the task's must all have been decoded.
        epsilon: margin below which a difference is a near-tie.

    Returns:
        A row of the table; a line per prompt that is not equal.
    """
    names = names[: task.num_prompts]
    plain, found = store.runs(task.plain), store.runs(task)
    comparisons = {
        name: compare_tokens(
            plain[name].token_ids, plain[name].margins, found[name].token_ids, epsilon=epsilon
        )
        for name in names
    }
    verdicts = [comparison.verdict for comparison in comparisons.values()]
    decode_passes = sum(found[name].decode_passes for name in names)
    row: dict[str, Cell] = {
        "compared": "plain",
        "k": task.k,
        "drafts": "planned" if task.is_planned else "k",
        "sampling": task.sampling.value,
        "strict": "yes" if task.is_strict else "no",
        "prompts": len(names),
        "tokens": sum(comparison.num_compared for comparison in comparisons.values()),
        "equal": verdicts.count(Verdict.EQUAL),
        "excused": verdicts.count(Verdict.EXCUSED),
        "different": verdicts.count(Verdict.DIFFERENT),
        "tokens_per_pass": (
            sum(found[name].decode_tokens for name in names) / decode_passes
            if decode_passes
            else 1.0
        ),
        "rechecked": sum(found[name].rechecked for name in names),
    }
    return row, [
        _describe(task, name, comparison)
        for name, comparison in comparisons.items()
        if comparison.verdict is not Verdict.EQUAL
    ]


def _describe(task: Task, name: str, comparison: Comparison) -> str:
    return (
        f"{comparison.verdict}: {task.name}, prompt {name}, new token {comparison.position}, "
        f"margin {comparison.margin:.2e}"
    )
