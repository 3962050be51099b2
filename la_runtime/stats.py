"""What a generation cost and how its proposals fared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from la_runtime.stopping import FinishReason

__all__ = ["GenerationStats", "PassKind", "SourceCounts", "StepCounts", "StepEvent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounts:
    """How the drafts of one source fared; a draft of two sources counts for both.

    Args:
        source: its name.
        drafted: drafts of it that were verified.
        accepted: how many of them became output.
    """

    source: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """Counts and times of one generation.

    Args:
        k: lookahead length.
        prompt_tokens: tokens of the prompt.
        cached_tokens: how many of them the cache of a conversation held already.
        new_tokens: tokens emitted, the end-of-sequence token included.
        passes: forward passes the sequence took part in, prefill included.
        prefill_passes: passes up to and including the one that gave the first token.
        prefill_tokens: tokens that pass emitted: one, and with `threshold` up to k more.
        drafted: per position (first entry: the token after the bonus token) proposals that were
            put to the test.
        accepted: per position, how many of them became output.
        reread: emitted proposals that a later pass read as input (`threshold` only).
        agreed: how many of them were the model's own choice.
        rechecked: choices that a one-row pass made again (`strict` only).
        sources: per source of drafts, what became of them.
        without_drafts: planned passes that were plain because no source proposed anything.
        not_worth_drafts: planned passes that were plain because no draft was worth its row.
        rows: block rows computed for the sequence.
        prefill_rows: how many of them in the passes up to the first token.
        padding_rows: block rows computed beside them, because the block was wider: for a longer
            prompt or a larger k in the same batch, or for a fixed width.
        queued_s: seconds from the request to the start of its first pass.
        ttft_s: seconds from the request to its first token.
        decode_s: seconds from the first token to the last.
    """

    k: int
    prompt_tokens: int
    new_tokens: int
    passes: int
    prefill_passes: int
    prefill_tokens: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    reread: int
    agreed: int
    ttft_s: float
    decode_s: float
    cached_tokens: int = 0
    rechecked: int = 0
    sources: tuple[SourceCounts, ...] = ()
    without_drafts: int = 0
    not_worth_drafts: int = 0
    rows: int = 0
    prefill_rows: int = 0
    padding_rows: int = 0
    queued_s: float = 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens after prefill's per decode pass; 1.0 in plain decoding or without such passes."""
        decode_passes = self.passes - self.prefill_passes
        return (self.new_tokens - self.prefill_tokens) / decode_passes if decode_passes else 1.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after prefill's, per second of decoding; None when there was no decoding."""
        if self.decode_s <= 0:
            return None
        return (self.new_tokens - self.prefill_tokens) / self.decode_s

    @property
    def padding_share(self) -> float:
        """Share of the sequence's block rows that were padding."""
        computed = self.rows + self.padding_rows
        return self.padding_rows / computed if computed else 0.0

    @property
    def agreement(self) -> float | None:
        """Share of re-read proposals that are the model's own choice; None when none was."""
        return self.agreed / self.reread if self.reread else None


class PassKind(StrEnum):
    """``prefill``: a pass that reads prompts. ``step``: one that goes on behind them. ``none``: no
    pass, sequences were cancelled.
    """

    PREFILL = "prefill"
    STEP = "step"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One pass of an engine, or the cancelling of sequences between two, for metrics.

    Args:
        kind: what it was for.
        sequences: sequences in it.
        rows: block rows that belonged to a sequence.
        padding_rows: the others.
        new_tokens: tokens emitted by it.
        accepted: how many of them were proposals.
        finished: why sequences ended with it.
        failed: sequences that ended with an error.
        running: sequences that go on.
        waiting: calls that wait for admission.
        seconds: how long it took.
    """

    kind: PassKind
    sequences: int
    rows: int
    padding_rows: int
    new_tokens: int
    accepted: int
    finished: tuple[FinishReason, ...]
    failed: int
    running: int
    waiting: int
    seconds: float


@dataclass(slots=True)
class StepCounts:
    """Running counts of one sequence.

    `drafted` and `accepted` are per position: of the first k, and further ones where drafts were
    longer. `drafted_by` and `accepted_by` are per source.
    """

    k: int
    passes: int = 0
    prefill_passes: int = 0
    prefill_tokens: int = 0
    reread: int = 0
    agreed: int = 0
    rechecked: int = 0
    rows: int = 0
    prefill_rows: int = 0
    padding_rows: int = 0
    without_drafts: int = 0
    not_worth_drafts: int = 0
    drafted: list[int] = field(init=False)
    accepted: list[int] = field(init=False)
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.drafted = [0] * self.k
        self.accepted = [0] * self.k

    def count_block(self, *, num_rows: int, block_len: int) -> None:
        """Count a pass of `block_len` rows of which `num_rows` are the sequence's own."""
        self.rows += num_rows
        self.padding_rows += block_len - num_rows

    def count_sources(self, sources: Sequence[Collection[str]], accepted: Sequence[int]) -> None:
        """Count verified drafts for those who proposed them.

        Args:
            sources: per draft, who did.
            accepted: the accepted ones, from 1.
        """
        for names in sources:
            self.drafted_by.update(names)
        for draft in accepted:
            self.accepted_by.update(sources[draft - 1])

    def count(self, *, num_drafted: int, num_accepted: int) -> None:
        """Count proposals as deep as this, of which a prefix was accepted."""
        missing = num_drafted - len(self.drafted)
        if missing > 0:
            self.drafted += [0] * missing
            self.accepted += [0] * missing
        for position in range(num_drafted):
            self.drafted[position] += 1
        for position in range(num_accepted):
            self.accepted[position] += 1
