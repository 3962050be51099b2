"""Sequences that share a cache, and the step that advances them.

A sequence's *known* tokens that are not cached yet open its rows in every pass: the prompt in
prefill, the root in exact decoding, the emitted proposals in threshold decoding. So prefill and
both selection rules are one step:

    known tokens | drafts | groups      verify drafts and propose in the same pass
    accept, commit known and accepted rows, discard the rest, draft from the slots

A sequence that fails leaves the batch alone; the others do not notice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from la_runtime.backends.base import (
    Backend,
    CacheSizing,
    CacheState,
    Outputs,
    PassLimits,
    Scores,
)
from la_runtime.block import BlockWriter, Part
from la_runtime.errors import UsageError
from la_runtime.layout import GroupMask
from la_runtime.selection import (
    ChosenRowScores,
    RowScores,
    Selected,
    read_best,
    select_exact,
    select_threshold,
)
from la_runtime.sequence import StepResult, TokenSequence

__all__ = [
    "DEFAULT_PREFILL_CHUNK",
    "DEFAULT_PREFILL_SCORES",
    "Batch",
    "BlockPolicy",
    "Outcome",
    "PassReport",
]

DEFAULT_PREFILL_CHUNK: Final = 512
DEFAULT_PREFILL_SCORES: Final = 2**18
_LEAST_CHUNK: Final = 16

# What a pass computes, by whether probabilities and whether logits are wanted of it.
_OUTPUTS: Final = {
    (False, False): Outputs.TOP,
    (True, False): Outputs.TOP | Outputs.LOGSUMEXP,
    (False, True): Outputs.TOP | Outputs.LOGITS,
    (True, True): Outputs.TOP | Outputs.LOGSUMEXP | Outputs.LOGITS,
}

Outcome: TypeAlias = StepResult | Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPolicy:
    """How passes are shaped.

    Args:
        widths: block widths to pad to; empty leaves every block as wide as its rows.
        prefill_chunk: most prompt tokens in one pass, at least 1.
        prefill_scores: most attention scores of a pass that reads a prompt (rows x keys, of one
            head, over the whole batch). Chunks shrink as the cache grows, to no less than 16
            tokens, so that reading a long prompt takes no more memory than a short one.
        cache_sizing: see `CacheSizing`.
        most_rows: widest block that the backend can run; None if any will do.
        most_scored: most rows of a sequence whose scores it can compute; None for all.

    Raises:
        UsageError: a value is out of range.
    """

    widths: tuple[int, ...] = ()
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    prefill_scores: int = DEFAULT_PREFILL_SCORES
    cache_sizing: CacheSizing = CacheSizing.STEPPED
    most_rows: int | None = None
    most_scored: int | None = None

    def __post_init__(self) -> None:
        if self.prefill_chunk < 1:
            raise UsageError(f"prefill_chunk must be at least 1, got {self.prefill_chunk}")
        if self.most_rows is not None and max(self.widths, default=1) > self.most_rows:
            raise UsageError(
                f"block width {max(self.widths, default=1)} is more than the {self.most_rows} rows "
                "that a pass of this bundle can have; choose a smaller one"
            )
        if self.cache_sizing is CacheSizing.EXACT and not self.widths:
            raise UsageError("exact cache sizing needs a block width; use BlockPolicy.fixed_width")

    @classmethod
    def within(cls, limits: PassLimits, *, k_max: int, widths: tuple[int, ...] = ()) -> BlockPolicy:
        """The default policy where no pass is larger than the backend can run.

        Args:
            limits: of the backend.
            k_max: lookaheads that may follow the last chunk of a prompt, unless the limits say
                how many.
            widths: see `BlockPolicy`.
        """
        policy = cls(widths=widths).limited(limits)
        if limits.block is None:
            return policy
        room = limits.block - (k_max if limits.k is None else limits.k)
        return replace(policy, prefill_chunk=max(1, min(policy.prefill_chunk, room)))

    def limited(self, limits: PassLimits) -> BlockPolicy:
        """The same for a backend with these limits.

        Raises:
            UsageError: its widths exceed them.
        """
        return replace(self, most_rows=limits.block, most_scored=limits.rows)

    @classmethod
    def fixed_width(cls, width: int, *, k_max: int) -> BlockPolicy:
        """Every pass at one width, all its rows scored, and every key's column its position.

        At batch 1 plain and lookahead decoding then do the same arithmetic for the same token:
        logits and tokens are equal bit for bit.

        Raises:
            UsageError: `width` leaves no room for a token beside `k_max` lookaheads.
        """
        if width <= k_max:
            raise UsageError(f"fixed width must be more than k = {k_max}, got {width}")
        return cls(widths=(width,), prefill_chunk=width - k_max, cache_sizing=CacheSizing.EXACT)

    @property
    def least_scored(self) -> int:
        """Rows whose scores every pass computes: at a fixed width all, or as many as can be."""
        if self.cache_sizing is not CacheSizing.EXACT:
            return 1
        return min(max(self.widths), self.most_scored or max(self.widths))

    def chunk_len(self, *, batch: int, num_cached: int) -> int:
        """Most prompt tokens of the next pass: `prefill_chunk`, halved while scores are too many.

        Args:
            batch: sequences in the pass.
            num_cached: places that the longest of them has cached.
        """
        chunk = self.prefill_chunk
        while chunk > _LEAST_CHUNK and batch * chunk * (num_cached + chunk) > self.prefill_scores:
            chunk = max(chunk // 2, _LEAST_CHUNK)
        return chunk

    def check(self, sequence: TokenSequence) -> None:
        """Refuse a sequence whose steps can be wider than the fixed width, or than any pass.

        Raises:
            UsageError: they can.
        """
        is_fixed = self.cache_sizing is CacheSizing.EXACT
        if not is_fixed and self.most_rows is None and self.most_scored is None:
            return
        k, most_rows = sequence.k, sequence.most_rows
        limits = [limit for limit in (self.most_rows, self.most_scored) if limit is not None]
        most = min(limits, default=most_rows)
        if most_rows > most:
            raise UsageError(
                f"a step with k = {k} and this layout has up to {most_rows} rows, and a pass of "
                f"this bundle at most {most}; choose a smaller k, fewer drafts or another layout"
            )
        if is_fixed and most_rows > max(self.widths):
            raise UsageError(
                f"fixed width {max(self.widths)} is too narrow: a step with k = {k} has up to "
                f"{most_rows} rows"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """What a pass (with `strict`, a pass and what was made again) did.

    Args:
        outcomes: per sequence that took part, what it got, or why it failed.
        rows: block rows that belonged to a sequence.
        padding_rows: the others.
    """

    outcomes: tuple[tuple[TokenSequence, Outcome], ...]
    rows: int
    padding_rows: int


class Batch:
    """Sequences that share a cache. Finished and failed ones leave it at once.

    Args:
        backend: runs the blocks.
        sequences: at least one.
        policy: how passes are shaped.
        context: number of positions the model has.
        group_mask: the group mask that the lookahead vectors were made for.
        cache: what the sequences have cached already; a new one by default.
        siblings: sequences with the prompt of the only one in `sequences`: they join it when that
            prompt has been read.
    """

    def __init__(
        self,
        backend: Backend,
        sequences: Sequence[TokenSequence],
        policy: BlockPolicy,
        *,
        context: int,
        group_mask: GroupMask,
        cache: CacheState | None = None,
        siblings: Sequence[TokenSequence] = (),
    ) -> None:
        assert not siblings or len(sequences) == 1, "siblings share one prompt"
        self.sequences = list(sequences)
        self.siblings = list(siblings)
        self.cache = (
            backend.allocate(len(sequences), policy.cache_sizing) if cache is None else cache
        )
        self.cache.reserve(max(s.likely_places for s in (*sequences, *siblings)))
        self._backend = backend
        self._policy = policy
        self._group_mask = group_mask
        self._writer = BlockWriter(
            backend.contract,
            context=context,
            widths=policy.widths,
            least_scored=policy.least_scored,
        )
        self._rows = self._padding_rows = self._block_len = 0

    def __len__(self) -> int:
        return len(self.sequences) + len(self.siblings)

    def close(self) -> None:
        """Release the cache."""
        self.cache.close()

    @property
    def needs_reading(self) -> bool:
        """Whether `read_chunk` comes before the next `step`."""
        if all(sequence.has_begun for sequence in self.sequences):
            return bool(self.siblings)
        return bool(self.siblings) or any(self._nums_to_read())

    def _nums_to_read(self) -> list[int]:
        """Per sequence, prompt tokens for the next pass without scores."""
        chunk = self._policy.chunk_len(
            batch=len(self.sequences),
            num_cached=max((s.num_cached for s in self.sequences), default=0),
        )
        if self.siblings:
            return [min(chunk, sequence.num_known - 1) for sequence in self.sequences]
        return [chunk if s.num_known > chunk and not s.has_begun else 0 for s in self.sequences]

    def read_chunk(self) -> PassReport:
        """Cache one chunk of every prompt that has more than one chunk left."""
        self._rows = self._padding_rows = 0
        sizes = self._nums_to_read()
        if any(sizes):
            parts = [
                sequence.plan_reading(size) if size else None
                for sequence, size in zip(self.sequences, sizes, strict=True)
            ]
            self._forward(parts, Outputs.NONE)
            self._commit([range(size) for size in sizes])
        if self.siblings and self.sequences[0].num_known == 1:
            self._fork()
        return PassReport(outcomes=(), rows=self._rows, padding_rows=self._padding_rows)

    def _fork(self) -> None:
        """Let the siblings join, each with a copy of the prompt that has been read."""
        (first,) = self.sequences
        self.cache.keep([0] * len(self))
        for sibling in self.siblings:
            sibling.num_cached, sibling.num_reused = first.num_cached, first.num_reused
        self.sequences += self.siblings
        self.siblings = []

    def step(self) -> PassReport:
        """One pass over every sequence: verify its drafts, emit, draft anew."""
        assert self.sequences, "every sequence has finished"
        assert not self.needs_reading, "prompts are read before the first step"
        self._rows = self._padding_rows = 0
        sequences = self.sequences
        parts = [sequence.plan(self._group_mask) for sequence in sequences]
        scores = self._score(parts)
        selected: list[Selected | Exception] = []
        outcomes: list[Outcome] = []
        for sequence, part in zip(sequences, parts, strict=True):
            least = sequence.least_margin(self._block_len)
            choice = _select(sequence, part, scores[sequence], epsilon=least)
            selected.append(choice)
            if isinstance(choice, Exception):
                outcomes.append(choice)
                continue
            outcomes.append(sequence.emit(choice))
        self._commit(list(map(_committed_rows, parts, selected, outcomes)))
        if any(map(_is_undecided, selected, outcomes)):
            outcomes = self._choose_again(selected, outcomes)
        leaving = [s for s, outcome in zip(sequences, outcomes, strict=True) if _is_last(outcome)]
        if leaving:
            self.drop(leaving)
        for sequence in self.sequences:
            sequence.draft(batch=len(self.sequences))
        return PassReport(
            outcomes=tuple(zip(sequences, outcomes, strict=True)),
            rows=self._rows,
            padding_rows=self._padding_rows,
        )

    def _choose_again(
        self, selected: Sequence[Selected | Exception], outcomes: Sequence[Outcome]
    ) -> list[Outcome]:
        """Make undecided choices by a pass of one row over the committed cache."""
        parts = [
            sequence.plan_root() if _is_undecided(choice, outcome) else None
            for sequence, choice, outcome in zip(self.sequences, selected, outcomes, strict=True)
        ]
        scores = self._score(parts)
        settled = list(outcomes)
        for i, (sequence, part) in enumerate(zip(self.sequences, parts, strict=True)):
            before = outcomes[i]
            if part is None or isinstance(before, Exception):
                continue
            choice = _select(sequence, part, scores[sequence], epsilon=0.0)
            if isinstance(choice, Exception):
                # What was kept before stands; the next pass meets the error if there was any.
                settled[i] = before if before.token_ids else choice
                parts[i] = None
                continue
            sequence.counts.rechecked += 1
            settled[i] = before.followed_by(sequence.emit(choice))
        self._commit([() if part is None else (0,) for part in parts])
        return settled

    def _score(self, parts: Sequence[Part | None]) -> dict[TokenSequence, RowScores]:
        """Run the pass; the scores of the rows of every sequence that has a part."""
        wants_probability = any(s.is_threshold for s in self.sequences)
        wants_logits = any(s.chooser is not None for s in self.sequences)
        scores = self._forward(parts, _OUTPUTS[wants_probability, wants_logits])
        found: dict[TokenSequence, RowScores] = {}
        for i, best in enumerate(read_best(scores, with_logsumexp=wants_probability)):
            sequence, part = self.sequences[i], parts[i]
            if part is None:
                continue
            if sequence.chooser is None:
                found[sequence] = RowScores(
                    part,
                    best,
                    request=sequence.request,
                    first_position=sequence.num_cached,
                )
            else:
                found[sequence] = ChosenRowScores(
                    part,
                    best,
                    request=sequence.request,
                    first_position=sequence.num_cached,
                    logits=scores.logits()[i],
                    chooser=sequence.chooser,
                    token_ids=sequence.token_ids,
                )
        return found

    def _forward(self, parts: Sequence[Part | None], outputs: Outputs) -> Scores:
        inputs = self._writer.write(parts, self.cache, outputs)
        self._block_len = block_len = inputs.input_ids.shape[1]
        num_rows = 0
        for sequence, part in zip(self.sequences, parts, strict=True):
            if part is not None:
                sequence.begin_pass(part, block_len)
                num_rows += part.rows.num_rows
        self._rows += num_rows
        self._padding_rows += block_len * len(parts) - num_rows
        return self._backend.forward(self.cache, inputs)

    def _commit(self, rows: Sequence[Sequence[int]]) -> None:
        """Cache these rows of the last pass, per sequence."""
        for sequence, accepted in zip(self.sequences, rows, strict=True):
            sequence.num_cached += len(accepted)
        self._backend.commit(self.cache, rows)

    def drop(self, leaving: Collection[TokenSequence]) -> None:
        """Let these sequences leave; one that keeps its cache takes it along."""
        self.siblings = [s for s in self.siblings if s not in leaving]
        staying = [i for i, s in enumerate(self.sequences) if s not in leaving]
        if len(staying) == len(self.sequences):
            return
        for i, sequence in enumerate(self.sequences):
            if sequence in leaving and sequence.keeps_cache:
                sequence.kept_cache = self.cache.take([i])
        if not staying and self.siblings:  # the next one reads on from where the first stopped
            first = self.sequences[0]
            heir = self.siblings.pop(0)
            heir.num_cached, heir.num_reused = first.num_cached, first.num_reused
            self.sequences = [heir]
            return
        self.sequences = [self.sequences[i] for i in staying]
        self.cache.keep(staying)

    def absorb(self, other: Batch) -> None:
        """Take over another batch whose prompts have been read."""
        assert not any(batch.needs_reading for batch in (self, other)), "joined between steps"
        self.cache.absorb(other.cache)
        self.sequences += other.sequences
        other.sequences = []


def _select(
    sequence: TokenSequence,
    part: Part,
    scores: RowScores,
    *,
    epsilon: float,
) -> Selected | Exception:
    """Apply the sequence's selection rule to the scores of its rows; its drafts' sources hear."""
    try:
        if not sequence.is_threshold:
            selected = select_exact(
                sequence.drafts, part, scores, ends=sequence.ends_with, epsilon=epsilon
            )
            sequence.learn(part, scores, selected)
            return selected
        _count_agreement(sequence, part, scores)
        assert sequence.params.tau is not None, "checked by SamplingParams"
        return select_threshold(part, scores, tau=sequence.params.tau, ends=sequence.ends_with)
    except Exception as error:  # noqa: BLE001  # raised again where the request was made
        return error


def _is_last(outcome: Outcome) -> bool:
    return isinstance(outcome, Exception) or outcome.finish_reason is not None


def _is_undecided(choice: Selected | Exception, outcome: Outcome) -> bool:
    """Whether the sequence goes on and its next token is open."""
    return (
        isinstance(choice, Selected)
        and not choice.is_decided
        and isinstance(outcome, StepResult)
        and outcome.finish_reason is None
    )


def _committed_rows(part: Part, choice: Selected | Exception, outcome: Outcome) -> tuple[int, ...]:
    """Block rows of all tokens but the last: known ones, then accepted drafts if emitted."""
    if isinstance(choice, Exception) or isinstance(outcome, Exception):
        return ()
    num_known = part.rows.num_known
    rows = (*range(num_known), *map(part.rows.row, choice.path))
    return rows[: num_known + len(outcome.token_ids) - 1]


def _count_agreement(sequence: TokenSequence, part: Part, scores: RowScores) -> None:
    """Compare the proposals that this pass reads with the model's own choice before each."""
    first = part.rows.row(0) - sequence.num_unverified
    reread = part.token_ids[first + 1 :]
    sequence.counts.reread += len(reread)
    sequence.counts.agreed += sum(
        scores.choose(row, ()).token_id == token for row, token in enumerate(reread, first)
    )
