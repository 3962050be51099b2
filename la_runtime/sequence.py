"""One sequence while it is decoded: its tokens, what of them is cached, its drafts and its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from la_runtime.backends.base import CacheState
from la_runtime.block import Part
from la_runtime.choosing import Choice, Chooser
from la_runtime.drafter import Drafter
from la_runtime.drafting.news import PassNews
from la_runtime.layout import DraftTree, Group, GroupMask, make_rows
from la_runtime.planner import NO_PLAN, PlainReason
from la_runtime.sampling import SamplingParams, Select
from la_runtime.selection import RowScores, Selected
from la_runtime.stats import GenerationStats, SourceCounts, StepCounts
from la_runtime.stopping import Ending, FinishReason, TokenListener

__all__ = ["StepResult", "TokenSequence"]

# Many requests allow more tokens than they come to say.
_MOST_RESERVED_TOKENS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step added to one sequence.

    Args:
        token_ids: the emitted tokens; none when the sequence was cancelled.
        accepted: how many of them were proposals; the others are the model's own choice.
        margins: per emitted token, the margin of its `Choice`.
        finish_reason: set if the sequence ended with the last token.
    """

    token_ids: tuple[int, ...]
    accepted: int
    margins: tuple[float, ...]
    finish_reason: FinishReason | None

    def followed_by(self, other: StepResult) -> StepResult:
        """Both results as one."""
        return StepResult(
            token_ids=self.token_ids + other.token_ids,
            accepted=self.accepted + other.accepted,
            margins=self.margins + other.margins,
            finish_reason=other.finish_reason,
        )


class TokenSequence:
    """One sequence.

    Args:
        prompt: its token ids.
        params: its parameters.
        request: what messages call it.
        k: its lookahead length.
        drafter: plans its passes.
        context: number of positions the model has.
        eos_token_ids: tokens that end it, unless its parameters ignore them.
        epsilon: margin below which a `strict` request has a choice made again.
        listener: hears its tokens.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: int,
        k: int,
        drafter: Drafter,
        context: int,
        eos_token_ids: frozenset[int],
        epsilon: float,
        listener: TokenListener | None,
    ) -> None:
        self.request = request
        self.params = params
        self.k = k
        self.is_threshold = params.select is Select.THRESHOLD
        self._drafter = drafter
        self._epsilon = epsilon
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.chooser: Chooser | None = None
        self.choices: list[Choice] = []
        self.token_ids = [int(token) for token in prompt]
        self.prompt_len = len(self.token_ids)
        self.num_cached = 0
        self.num_reused = 0
        self.num_unverified = 0
        self._plan = NO_PLAN
        self.counts = StepCounts(k=k)
        self.finish_reason: FinishReason | None = None
        self._over_at: float | None = None
        self.keeps_cache = False
        self.kept_cache: CacheState | None = None
        self._context = context
        self._ending = Ending(
            eos_token_ids=self.eos_token_ids,
            stop_token_ids=self.stop_token_ids,
            max_new_tokens=params.max_new_tokens,
            context_room=context - self.prompt_len,
            listener=listener,
        )
        self._asked_at = time.perf_counter()
        self._began_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be computed for it."""
        return self._over_at is not None

    def end(self) -> None:
        """Nothing more will be computed for it."""
        self._over_at = time.perf_counter()

    @property
    def most_rows(self) -> int:
        """Rows of its widest step."""
        return 2 * self.k + 1 if self.is_threshold else self._drafter.most_rows

    @property
    def drafts(self) -> DraftTree:
        """What its next pass verifies, or the pass under way."""
        return self._plan.drafts

    @property
    def num_known(self) -> int:
        """Known tokens that are not cached yet."""
        return len(self.token_ids) - self.num_cached

    @property
    def likely_places(self) -> int:
        """Cache places that it can come to hold, as far as they are worth reserving."""
        new_tokens = min(self.params.max_new_tokens, _MOST_RESERVED_TOKENS)
        return min(self.prompt_len + new_tokens, self._context)

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """Tokens emitted so far."""
        return tuple(self.token_ids[self.prompt_len :])

    @property
    def has_begun(self) -> bool:
        """Whether it has emitted a token."""
        return len(self.token_ids) > self.prompt_len

    def least_margin(self, block_len: int) -> float:
        """Margin that a choice of the pass under way needs to stand.

        Plain decoding would make the choice in the same pass if its block is one row, or if it
        reads the prompt.
        """
        is_plain = block_len == 1 or not self.has_begun
        return self._epsilon if self.params.strict and not is_plain else 0.0

    def resume(self, num_cached: int) -> None:
        """The cache it starts with holds this many of its first tokens."""
        assert 0 <= num_cached < self.prompt_len, "the root is never cached"
        self.num_cached = self.num_reused = num_cached

    def plan(self, group_mask: GroupMask) -> Part:
        """The rows of its next pass: known tokens, drafts, groups."""
        known = tuple(self.token_ids[self.num_cached :])
        drafts = self.drafts
        rows = make_rows(
            len(known),
            drafts.parents,
            self._groups(),
            group_mask=group_mask,
            draft_columns=self._plan.columns,
        )
        return Part(
            rows=rows,
            token_ids=known + drafts.token_ids,
            scored_from=len(known) - 1 - self.num_unverified,
        )

    def plan_reading(self, num_tokens: int) -> Part:
        """The next rows of its prompt, without scores."""
        start = self.num_cached
        return Part(
            rows=make_rows(num_tokens, (), ()),
            token_ids=tuple(self.token_ids[start : start + num_tokens]),
            scored_from=num_tokens,
        )

    def plan_root(self) -> Part:
        """Its root alone; what it was to verify is forgotten."""
        assert self.num_known == 1, "everything before the root is cached"
        self._plan = NO_PLAN
        return Part(rows=make_rows(1, (), ()), token_ids=(self.token_ids[-1],), scored_from=0)

    def _groups(self) -> tuple[Group, ...]:
        """Where the next pass carries slots.

        A strict sequence reads its prompt as plain decoding does, row for row.
        """
        if not self.has_begun:
            return () if self.params.strict else self._drafter.first_groups()
        return self._plan.groups

    def begin_pass(self, part: Part, block_len: int) -> None:
        """Count a pass it takes part in."""
        if self._began_at is None:
            self._began_at = time.perf_counter()
        self.counts.passes += 1
        if self._first_token_at is None:
            self.counts.prefill_passes += 1
            self.counts.prefill_rows += part.rows.num_rows
        self.counts.count_block(num_rows=part.rows.num_rows, block_len=block_len)

    def ends_with(self, token_id: int) -> bool:
        """Hear one token that the pass under way keeps; whether the sequence ends with it."""
        self.finish_reason = self._ending.hear(token_id)
        return self.finish_reason is not None

    def emit(self, selected: Selected) -> StepResult:
        """Append the tokens it has heard, and count them."""
        token_ids = selected.token_ids
        if self.params.logprobs is not None:
            self.choices += selected.choices
        self.token_ids.extend(token_ids)
        counts = self.counts
        if token_ids:
            self._last_token_at = time.perf_counter()
            if self._first_token_at is None:
                self._first_token_at = self._last_token_at
                counts.prefill_tokens = len(token_ids)
        num_accepted = sum(selected.is_proposal)
        counts.count(num_drafted=selected.num_proposed, num_accepted=num_accepted)
        counts.count_sources(self._plan.sources, selected.accepted)
        return StepResult(
            token_ids=token_ids,
            accepted=num_accepted,
            margins=tuple([choice.margin for choice in selected.choices]),
            finish_reason=self.finish_reason,
        )

    def learn(self, part: Part, scores: RowScores, selected: Selected) -> None:
        """Let the sources of drafts hear of the pass, before its tokens are emitted."""
        if self.finish_reason is not None:
            return
        self._drafter.learn(
            PassNews(
                part=part,
                drafts=self.drafts,
                scores=scores,
                path=selected.path,
                token_ids=selected.token_ids,
                goes_on=selected.goes_on,
            )
        )

    def draft(self, *, batch: int) -> None:
        """Plan the next pass, with drafts as deep as the sequence can still grow.

        Args:
            batch: sequences that will share it.
        """
        if self.is_threshold:
            self.num_unverified = self.num_known - 1
        self._plan = plan = self._drafter.plan(
            root_column=self.num_cached, max_depth=max(self._ending.room - 1, 0), batch=batch
        )
        counts = self.counts
        counts.without_drafts += plan.plain_because is PlainReason.NO_DRAFT
        counts.not_worth_drafts += plan.plain_because is PlainReason.NOT_WORTH_A_ROW

    def stats(self) -> GenerationStats:
        """Counts and times so far."""
        counts = self.counts
        now = self._over_at or time.perf_counter()
        began = self._began_at or now
        first = self._first_token_at or now
        last = self._last_token_at or first
        return GenerationStats(
            k=self.k,
            prompt_tokens=self.prompt_len,
            cached_tokens=self.num_reused,
            new_tokens=len(self.token_ids) - self.prompt_len,
            passes=counts.passes,
            prefill_passes=counts.prefill_passes,
            prefill_tokens=counts.prefill_tokens,
            drafted=tuple(counts.drafted),
            accepted=tuple(counts.accepted),
            reread=counts.reread,
            agreed=counts.agreed,
            rechecked=counts.rechecked,
            sources=tuple(
                [
                    SourceCounts(source=name, drafted=drafted, accepted=counts.accepted_by[name])
                    for name, drafted in sorted(counts.drafted_by.items())
                ]
            ),
            without_drafts=counts.without_drafts,
            not_worth_drafts=counts.not_worth_drafts,
            rows=counts.rows,
            prefill_rows=counts.prefill_rows,
            padding_rows=counts.padding_rows,
            queued_s=began - self._asked_at,
            ttft_s=first - self._asked_at,
            decode_s=last - first,
        )
