"""All peers and bundles on the same prompts, in turn, so that each meets the same machine.

First every contestant runs alone: its memory, and how well its weights predict text. Then all
stand open side by side and answer prompt by prompt, in an order drawn anew for each; only one
computes at a time. Who fails drops out with the reason; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from la_export.bench.peers.process import Job, PeerAnswer, PeerProcess
from la_export.bench.speed.record import PeerMode
from la_export.perplexity import Window, perplexity_of
from la_runtime.errors import LookaheadError

__all__ = [
    "Alone",
    "AskedPrompt",
    "Contestant",
    "Entry",
    "Lap",
    "Outcome",
    "Report",
    "Texts",
    "measure_alone",
    "run_laps",
]

Report = Callable[[str], None]

_SEED: Final = 0
# An answer's own tokens hardly show in the memory that its prompt has taken.
_TOKENS_ALONE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One way of decoding with one set of weights.

    Args:
        peer: name of the program, or of a bundle of ours.
        precision: what it calls its weights.
        mode: plain, or its best.
        mode_name: what it calls the mode.
    """

    peer: str
    precision: str
    mode: PeerMode
    mode_name: str

    @property
    def name(self) -> str:
        """Unique in a race."""
        return f"{self.peer}, {self.precision}, {self.mode_name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """An entry that can be started."""

    entry: Entry
    job: Job

    @property
    def name(self) -> str:
        """The entry's."""
        return self.entry.name


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPrompt:
    """One prompt of the race.

    Args:
        name: of the question.
        category: of the question.
        token_ids: the question in the chat template.
    """

    name: str
    category: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What perplexity is taken of; both may be empty.

    Args:
        own: answers that the model wrote itself.
        pages: pages in the public domain.
    """

    own: tuple[Window, ...]
    pages: tuple[Window, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What was found of a contestant while no other was open.

    Args:
        version: of the program.
        build: how it was compiled, as far as it says.
        open_s: seconds until it was ready.
        pss_bytes: of its process after the longest prompt.
        peak_rss_bytes: the most it held until then.
        perplexity_own: of its weights on the model's own answers; None if not taken.
        perplexity_pages: likewise on pages.
    """

    version: str
    build: str
    open_s: float
    pss_bytes: int
    peak_rss_bytes: int
    perplexity_own: float | None
    perplexity_pages: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """One answer of one contestant.

    Args:
        contestant: its name.
        round_index: from 0.
        prompt: what it was asked.
        answer: what it said, and when.
    """

    contestant: str
    round_index: int
    prompt: AskedPrompt
    answer: PeerAnswer

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first ones, over the time after those; None if there were none."""
        tokens = len(self.answer.token_ids) - self.answer.first_tokens
        return tokens / self.answer.decode_s if tokens and self.answer.decode_s > 0 else None

    @property
    def end_to_end_tokens_per_s(self) -> float:
        """All tokens over the whole time."""
        return len(self.answer.token_ids) / self.answer.total_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a race came to.

    Args:
        laps: of those that finished.
        failed: why others dropped out, by name.
    """

    laps: tuple[Lap, ...]
    failed: Mapping[str, str]


def measure_alone(
    contestant: Contestant,
    prompt: AskedPrompt,
    texts: Texts,
    *,
    new_tokens: int,
    logs: Path,
) -> Alone:
    """Open a contestant, let it answer shortly, look at its memory, and score texts.

    Args:
        contestant: which one.
        prompt: best the longest of the race.
        texts: scored in plain mode only; the weights are the same in the other.
        new_tokens: most of the answer.
        logs: folder for what it prints.

    Raises:
        NotRunError: it failed.
        NonFiniteScoreError: it gave a text no finite probability.
    """
    began = time.monotonic()
    with PeerProcess(contestant.job, log=_log_of(contestant, logs)) as process:
        open_s = time.monotonic() - began
        answer = process.generate(prompt.token_ids, min(new_tokens, _TOKENS_ALONE))

        def take(windows: Sequence[Window]) -> float | None:
            if contestant.entry.mode is not PeerMode.PLAIN or not windows:
                return None
            return perplexity_of(process.score, windows).value

        return Alone(
            version=process.version,
            build=process.build,
            open_s=open_s,
            pss_bytes=answer.pss_bytes,
            peak_rss_bytes=answer.peak_rss_bytes,
            perplexity_own=take(texts.own),
            perplexity_pages=take(texts.pages),
        )


def run_laps(
    contestants: Sequence[Contestant],
    prompts: Sequence[AskedPrompt],
    *,
    rounds: int,
    new_tokens: int,
    logs: Path,
    goes_on: Callable[[], bool],
    report: Report,
) -> Outcome:
    """Let all contestants answer all prompts, `rounds` times.

    Args:
        contestants: who takes part.
        prompts: in order.
        rounds: how often.
        new_tokens: most of an answer.
        logs: folder for what they print.
        goes_on: whether there is time for another prompt; the first is asked in any case. A
            prompt that was begun is finished, so that all answer the same ones.
        report: told in a line what was done.
    """
    race = _Race(new_tokens=new_tokens, logs=logs)
    with ExitStack() as stack:
        for contestant in contestants:
            race.enter(contestant, prompts[0], stack)
        rng = np.random.default_rng(_SEED)
        turns = [(index, prompt) for index in range(rounds) for prompt in prompts]
        for done, (round_index, prompt) in enumerate(turns):
            if done and not goes_on():
                report(f"out of time after {done} of {len(turns)} prompts")
                break
            began = time.monotonic()
            for place in rng.permutation(len(contestants)):
                race.ask(contestants[place], round_index, prompt)
            seconds = time.monotonic() - began
            report(f"prompt {done + 1} of {len(turns)} ({prompt.category}): {seconds:.0f} s")
    return race.outcome()


class _Race:
    def __init__(self, *, new_tokens: int, logs: Path) -> None:
        self._new_tokens = new_tokens
        self._logs = logs
        self._open: dict[str, PeerProcess] = {}
        self._failed: dict[str, str] = {}
        self._laps: list[Lap] = []

    def enter(self, contestant: Contestant, prompt: AskedPrompt, stack: ExitStack) -> None:
        """Open a contestant and warm it up."""
        try:
            process = stack.enter_context(
                PeerProcess(contestant.job, log=_log_of(contestant, self._logs))
            )
            process.warm_up(prompt.token_ids)
        except LookaheadError as error:
            self._failed[contestant.name] = str(error)
        else:
            self._open[contestant.name] = process

    def ask(self, contestant: Contestant, round_index: int, prompt: AskedPrompt) -> None:
        """Let one answer, unless it has dropped out."""
        process = self._open.get(contestant.name)
        if process is None:
            return
        try:
            answer = process.generate(prompt.token_ids, self._new_tokens)
        except LookaheadError as error:
            self._failed[contestant.name] = str(error)
            self._open.pop(contestant.name).close()
            return
        self._laps.append(
            Lap(
                contestant=contestant.name,
                round_index=round_index,
                prompt=prompt,
                answer=answer,
            )
        )

    def outcome(self) -> Outcome:
        """What it came to."""
        laps = tuple(lap for lap in self._laps if lap.contestant not in self._failed)
        return Outcome(laps=laps, failed=self._failed)


def _log_of(contestant: Contestant, logs: Path) -> Path:
    words = "".join(c if c.isalnum() or c in ".-" else "-" for c in contestant.name)
    return logs / f"{words}.log"
