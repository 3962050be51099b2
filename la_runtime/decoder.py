"""Decoding token ids: sequences that share a cache, and the step that advances them.

A sequence's *known* tokens that are not cached yet open its rows in every pass: the prompt in
prefill, the root in exact decoding, the emitted proposals in threshold decoding. So prefill and
both selection rules are one step:

    known tokens | drafts | groups      verify drafts and propose in the same pass
    accept, commit known and accepted rows, discard the rest, draft from the slots
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Final, Protocol

import numpy as np

from la_runtime.backends.base import Backend, CacheSizing, Outputs, Scores
from la_runtime.block import Part, make_step_inputs
from la_runtime.choosing import Choice, Chooser
from la_runtime.errors import NonFiniteScoreError, UsageError
from la_runtime.layout import (
    NO_DRAFTS,
    Group,
    GroupMask,
    Layout,
    make_rows,
)
from la_runtime.sampling import SamplingParams, Select
from la_runtime.selection import (
    BestScores,
    ChosenRowScores,
    RowScores,
    Selected,
    select_exact,
    select_threshold,
)
from la_runtime.stats import GenerationStats, StepCounts
from la_runtime.stopping import FinishReason, cut_at_end

__all__ = [
    "DEFAULT_PREFILL_CHUNK",
    "BlockPolicy",
    "Decoder",
    "Decoding",
    "StepResult",
    "TokenListener",
]

DEFAULT_PREFILL_CHUNK: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one pass added to one sequence.

    Args:
        token_ids: the emitted tokens.
        accepted: how many of them were proposals; the others are the model's own choice.
        margins: per emitted token, best minus second-best logit of the row that chose it.
        finish_reason: set if the sequence ended with the last token.
    """

    token_ids: tuple[int, ...]
    accepted: int
    margins: tuple[float, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPolicy:
    """How passes are shaped.

    Args:
        widths: block widths to pad to; empty leaves every block as wide as its rows.
        prefill_chunk: most prompt tokens in one pass, at least 1.
        cache_sizing: see `CacheSizing`.

    Raises:
        UsageError: a value is out of range.
    """

    widths: tuple[int, ...] = ()
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    cache_sizing: CacheSizing = CacheSizing.STEPPED

    def __post_init__(self) -> None:
        if self.prefill_chunk < 1:
            raise UsageError(f"prefill_chunk must be at least 1, got {self.prefill_chunk}")
        if self.cache_sizing is CacheSizing.EXACT and not self.widths:
            raise UsageError("exact cache sizing needs a block width; use BlockPolicy.fixed_width")

    @classmethod
    def fixed_width(cls, width: int, *, k_max: int) -> BlockPolicy:
        """Every pass at one width and every key's column equal to its position.

        At batch 1 plain and lookahead decoding then do the same arithmetic for the same token:
        logits and tokens are equal bit for bit.

        Raises:
            UsageError: `width` leaves no room for a token beside `k_max` lookaheads.
        """
        if width <= k_max:
            raise UsageError(f"fixed width must be more than k = {k_max}, got {width}")
        return cls(widths=(width,), prefill_chunk=width - k_max, cache_sizing=CacheSizing.EXACT)


class TokenListener(Protocol):
    """Hears every emitted token of a sequence, and may end it."""

    def push(self, token_id: int) -> bool:
        """A token; True ends the sequence with it."""
        ...


class _Sequence:
    """One sequence: its tokens, what of them is cached, and its drafts for the next pass."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: int,
        k: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.index = index
        self.request = request
        self.params = params
        self.k = k
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.chooser: Chooser | None = None
        self.listener: TokenListener | None = None
        self.choices: list[Choice] = []
        self.token_ids = [int(token) for token in prompt]
        self.prompt_len = len(self.token_ids)
        self.num_cached = 0
        self.num_unverified = 0
        self.drafts = NO_DRAFTS
        self.counts = StepCounts(k=k)
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finish_reason: FinishReason | None = None

    def ends_with(self, token_id: int) -> FinishReason | None:
        """The reason if this emitted token ends the sequence."""
        is_text_ended = self.listener is not None and self.listener.push(token_id)
        if token_id in self.eos_token_ids:
            return FinishReason.EOS
        if is_text_ended or token_id in self.stop_token_ids:
            return FinishReason.STOP
        return None

    @property
    def num_known(self) -> int:
        """Known tokens that are not cached yet."""
        return len(self.token_ids) - self.num_cached

    def groups(self) -> tuple[Group, ...]:
        """Where the next pass carries slots."""
        if self.params.select is Select.THRESHOLD:
            return Layout.ROOT_ONLY.groups(0, self.k)
        layout = self.params.layout or Layout.ROOT_ONLY
        return layout.groups(len(self.drafts.token_ids), self.k)


class Decoder:
    """Starts decodings over one backend.

    Args:
        backend: runs the blocks.
        context: number of positions the model has.
        eos_token_ids: tokens that end a sequence.
        group_mask: the group mask that the lookahead vectors were made for.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        context: int,
        eos_token_ids: Sequence[int],
        group_mask: GroupMask = GroupMask.STRICT,
    ) -> None:
        self.backend = backend
        self.context = context
        self.eos_token_ids = frozenset(eos_token_ids)
        self.group_mask = group_mask

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        policy: BlockPolicy | None = None,
        *,
        listeners: Sequence[TokenListener] = (),
        first_request: int = 0,
    ) -> Decoding:
        """Begin decoding these prompts as one batch; nothing runs yet.

        Args:
            prompts: token ids per sequence.
            params: parameters per sequence.
            policy: how passes are shaped; the default pads to the backend's widths.
            listeners: per sequence, who hears its tokens; none by default.
            first_request: what messages call the first sequence.

        Raises:
            UsageError: there is no prompt, a prompt is empty, too long or holds an unknown id, or
                k is out of range.
        """
        if not prompts:
            raise UsageError("there is no prompt to decode")
        policy = policy or BlockPolicy(widths=self.backend.widths)
        sequences = []
        for index, (prompt, wish) in enumerate(zip(prompts, params, strict=True)):
            request = first_request + index
            self.check_prompt(prompt, request=request)
            sequences.append(
                _Sequence(
                    index,
                    prompt,
                    wish,
                    request=request,
                    k=self._resolve_k(wish),
                    eos_token_ids=self.eos_token_ids,
                )
            )
            _check_policy(sequences[-1], policy)
        self._add_choosers(sequences)
        for sequence, listener in zip(sequences, listeners, strict=bool(listeners)):
            sequence.listener = listener
        return Decoding(self, sequences, policy)

    def _add_choosers(self, sequences: Sequence[_Sequence]) -> None:
        """Choosers for the requests that need more than the best score; they share a buffer."""
        wishing = [s for s in sequences if not s.params.is_plain_greedy]
        vocab_size = self.backend.contract.vocab_size if wishing else 0
        scratch = np.empty(vocab_size, dtype=np.float32)
        for sequence in wishing:
            sequence.chooser = Chooser(
                sequence.params,
                request=sequence.request,
                prompt=sequence.token_ids,
                end_token_ids=[*sequence.eos_token_ids, *sequence.stop_token_ids],
                scratch=scratch,
            )

    def _resolve_k(self, params: SamplingParams) -> int:
        k_max = self.backend.contract.k_max
        k = k_max if params.k is None else params.k
        if k > k_max:
            raise UsageError(f"k must be at most the bundle's {k_max}, got {k}")
        return k

    def check_prompt(self, prompt: Sequence[object], *, request: int) -> None:
        """Refuse a prompt that cannot be decoded.

        Raises:
            UsageError: it is empty, too long or holds an unknown id.
        """
        where = f"prompt {request}"
        if len(prompt) == 0:
            raise UsageError(f"{where} is empty; a prompt has at least one token")
        if len(prompt) >= self.context:
            raise UsageError(
                f"{where} has {len(prompt)} tokens, but the context of {self.context} "
                f"leaves room for prompts of at most {self.context - 1}; shorten the prompt"
            )
        vocab_size = self.backend.contract.vocab_size
        for token in prompt:
            if type(token) is bool or not isinstance(token, Integral):
                raise UsageError(f"{where} holds {token!r}, expected whole token ids")
            if not 0 <= int(token) < vocab_size:
                raise UsageError(
                    f"{where} holds a token id outside 0..{vocab_size - 1}: {int(token)}"
                )


def _check_policy(sequence: _Sequence, policy: BlockPolicy) -> None:
    if policy.cache_sizing is not CacheSizing.EXACT:
        return
    params, k = sequence.params, sequence.k
    most_rows = (
        2 * k + 1
        if params.select is Select.THRESHOLD
        else (params.layout or Layout.ROOT_ONLY).max_rows(k)
    )
    if most_rows > max(policy.widths):
        raise UsageError(
            f"fixed width {max(policy.widths)} is too narrow: a step with k = {k} has up to "
            f"{most_rows} rows"
        )


class Decoding:
    """Sequences being decoded together. Finished ones leave the batch at once.

    Made by `Decoder.start`; a context manager that releases the cache.
    """

    def __init__(self, decoder: Decoder, sequences: list[_Sequence], policy: BlockPolicy) -> None:
        self._decoder = decoder
        self._backend = decoder.backend
        self._policy = policy
        self._sequences = sequences
        self._active = list(sequences)
        self.is_closed = False
        self._started_at = time.perf_counter()
        self.cache = self._backend.allocate(len(sequences), policy.cache_sizing)

    def __enter__(self) -> Decoding:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the cache."""
        self.is_closed = True
        self.cache.close()

    @property
    def is_done(self) -> bool:
        """Whether every sequence has finished."""
        return not self._active

    def token_ids(self, index: int) -> tuple[int, ...]:
        """Tokens emitted so far by a sequence."""
        sequence = self._sequences[index]
        return tuple(sequence.token_ids[sequence.prompt_len :])

    def choices(self, index: int) -> tuple[Choice, ...]:
        """How each emitted token was chosen, if the request asked for log-probabilities."""
        return tuple(self._sequences[index].choices)

    def stats(self, index: int) -> GenerationStats:
        """Counts and times of a sequence so far."""
        sequence = self._sequences[index]
        counts = sequence.counts
        first = sequence.first_token_at or time.perf_counter()
        last = sequence.last_token_at or first
        return GenerationStats(
            k=sequence.k,
            prompt_tokens=sequence.prompt_len,
            new_tokens=len(sequence.token_ids) - sequence.prompt_len,
            passes=counts.passes,
            prefill_passes=counts.prefill_passes,
            prefill_tokens=counts.prefill_tokens,
            drafted=tuple(counts.drafted),
            accepted=tuple(counts.accepted),
            reread=counts.reread,
            agreed=counts.agreed,
            ttft_s=first - self._started_at,
            decode_s=last - first,
        )

    def prefill(self) -> tuple[tuple[int, StepResult], ...]:
        """Read the prompts in chunks; the last one gives each sequence its first tokens.

        Returns:
            Per sequence its index and result, as `step` does.
        """
        while any(s.num_known > self._policy.prefill_chunk for s in self._active):
            self._read_chunk()
        return self.step()

    def step(self) -> tuple[tuple[int, StepResult], ...]:
        """One pass over every unfinished sequence: verify its drafts, emit, draft anew.

        Returns:
            Per sequence that took part, its index and what the pass gave it.

        Raises:
            NonFiniteScoreError: the model produced NaN or infinity.
            UsageError: the decoding is closed.
        """
        if self.is_closed:
            raise UsageError("the decoding is closed; start another")
        assert self._active, "every sequence has finished"
        sequences = self._active
        parts = [self._plan(sequence) for sequence in sequences]
        scores = self._score(parts)
        selected = [
            _select(sequence, part, row_scores)
            for sequence, part, row_scores in zip(sequences, parts, scores, strict=True)
        ]
        results = [
            self._emit(sequence, choice)
            for sequence, choice in zip(sequences, selected, strict=True)
        ]
        self._commit(parts, selected, results)
        for sequence, choice in zip(sequences, selected, strict=True):
            self._draft(sequence, choice)
        self._drop_finished()
        return tuple((s.index, r) for s, r in zip(sequences, results, strict=True))

    def _plan(self, sequence: _Sequence) -> Part:
        """The rows of a sequence's next pass: known tokens, drafts, groups."""
        known = tuple(sequence.token_ids[sequence.num_cached :])
        drafts = sequence.drafts
        rows = make_rows(
            len(known),
            drafts.parents,
            sequence.groups(),
            group_mask=self._decoder.group_mask,
        )
        return Part(
            rows=rows,
            token_ids=known + drafts.token_ids,
            scored_from=len(known) - 1 - sequence.num_unverified,
        )

    def _score(self, parts: Sequence[Part]) -> list[RowScores]:
        """Run the pass; per sequence the scores of its rows."""
        wants_probability = any(s.params.select is Select.THRESHOLD for s in self._active)
        wants_logits = any(s.chooser is not None for s in self._active)
        outputs = (
            Outputs.TOP
            | (Outputs.LOGSUMEXP if wants_probability else Outputs.NONE)
            | (Outputs.LOGITS if wants_logits else Outputs.NONE)
        )
        scores = self._forward(parts, outputs)
        top_ids, top_logits = scores.top()  # [batch, rows, top_c]
        logsumexp = scores.logsumexp().tolist() if wants_probability else [[]] * len(parts)
        second = min(1, top_logits.shape[2] - 1)
        best_ids = top_ids[:, :, 0].tolist()
        best_logits = top_logits[:, :, 0].tolist()
        margins = (top_logits[:, :, 0] - top_logits[:, :, second]).tolist()
        found = []
        for i, (sequence, part) in enumerate(zip(self._active, parts, strict=True)):
            best = BestScores(
                ids=best_ids[i],
                logits=best_logits[i],
                margins=margins[i],
                logsumexp=logsumexp[i],
            )
            _check_finite(sequence, part, best)
            if sequence.chooser is None:
                found.append(RowScores(part, best))
            else:
                found.append(
                    ChosenRowScores(
                        part,
                        best,
                        logits=scores.logits()[i],
                        chooser=sequence.chooser,
                        token_ids=sequence.token_ids,
                    )
                )
        return found

    def _forward(self, parts: Sequence[Part | None], outputs: Outputs) -> Scores:
        inputs = make_step_inputs(
            parts,
            self.cache,
            self._backend.contract,
            context=self._decoder.context,
            widths=self._policy.widths,
            outputs=outputs,
        )
        return self._backend.forward(self.cache, inputs)

    def _read_chunk(self) -> None:
        """Cache one chunk of every prompt that has more than one chunk left."""
        chunk = self._policy.prefill_chunk
        parts: list[Part | None] = []
        for sequence in self._active:
            if sequence.num_known <= chunk:
                parts.append(None)
                continue
            start = sequence.num_cached
            known = tuple(sequence.token_ids[start : start + chunk])
            parts.append(Part(rows=make_rows(chunk, (), ()), token_ids=known, scored_from=chunk))
        self._forward(parts, Outputs.NONE)
        read = [range(0) if part is None else range(chunk) for part in parts]
        self._backend.commit(self.cache, read)
        for sequence, rows in zip(self._active, read, strict=True):
            sequence.num_cached += len(rows)
            if rows:
                sequence.counts.passes += 1
                sequence.counts.prefill_passes += 1

    def _emit(self, sequence: _Sequence, selected: Selected) -> StepResult:
        """Append the selected tokens up to the end of the sequence, and count them."""
        until_length, until_context = self._room(sequence)
        token_ids, finish_reason = cut_at_end(
            selected.token_ids,
            ends_with=sequence.ends_with,
            room=min(until_length, until_context),
            at_room=(
                FinishReason.LENGTH if until_length <= until_context else FinishReason.CONTEXT
            ),
        )
        if sequence.params.logprobs is not None:
            sequence.choices += selected.choices[: len(token_ids)]
        sequence.token_ids.extend(token_ids)
        sequence.finish_reason = finish_reason
        now = time.perf_counter()
        counts = sequence.counts
        counts.passes += 1
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            counts.prefill_passes += 1
            counts.prefill_tokens = len(token_ids)
        sequence.last_token_at = now
        num_accepted = sum(selected.is_proposal[: len(token_ids)])
        counts.count(num_drafted=selected.num_proposed, num_accepted=num_accepted)
        return StepResult(
            token_ids=token_ids,
            accepted=num_accepted,
            margins=tuple(choice.margin for choice in selected.choices[: len(token_ids)]),
            finish_reason=finish_reason,
        )

    def _commit(
        self,
        parts: Sequence[Part],
        selected: Sequence[Selected],
        results: Sequence[StepResult],
    ) -> None:
        """Commit the known rows and the accepted drafts that were emitted before the last token."""
        committed = []
        for sequence, part, choice, result in zip(
            self._active, parts, selected, results, strict=True
        ):
            emitted_path = choice.path[: len(result.token_ids) - 1]
            rows = (*range(part.rows.num_known), *(part.rows.row(node) for node in emitted_path))
            sequence.num_cached += len(rows)
            committed.append(rows)
        self._backend.commit(self.cache, committed)

    def _draft(self, sequence: _Sequence, selected: Selected) -> None:
        """Hand the proposals to the next pass, as deep as the sequence can still grow."""
        if sequence.params.select is Select.THRESHOLD:
            sequence.num_unverified = sequence.num_known - 1
        room = min(self._room(sequence))
        sequence.drafts = selected.next_drafts.cut(max(room - 1, 0))

    def _room(self, sequence: _Sequence) -> tuple[int, int]:
        """How many more tokens the request asks for, and how many the context holds."""
        num_tokens = len(sequence.token_ids)
        until_length = sequence.params.max_new_tokens - (num_tokens - sequence.prompt_len)
        return until_length, self._decoder.context - num_tokens

    def _drop_finished(self) -> None:
        kept = [i for i, s in enumerate(self._active) if s.finish_reason is None]
        if len(kept) < len(self._active):
            self._active = [self._active[i] for i in kept]
            self.cache.keep(kept)


def _select(sequence: _Sequence, part: Part, scores: RowScores) -> Selected:
    """Apply the sequence's selection rule to the scores of its rows."""
    if sequence.params.select is Select.EXACT:
        return select_exact(sequence.drafts, part, scores)
    _count_agreement(sequence, part, scores)
    assert sequence.params.tau is not None, "checked by SamplingParams"
    return select_threshold(part, scores, tau=sequence.params.tau)


def _count_agreement(sequence: _Sequence, part: Part, scores: RowScores) -> None:
    """Compare the proposals that this pass reads with the model's own choice before each."""
    first = part.rows.row(0) - sequence.num_unverified
    reread = part.token_ids[first + 1 :]
    sequence.counts.reread += len(reread)
    sequence.counts.agreed += sum(
        scores.choose(row, ()).token_id == token for row, token in enumerate(reread, first)
    )


def _check_finite(sequence: _Sequence, part: Part, best: BestScores) -> None:
    scored = [*best.logits[: part.num_scored], *best.logsumexp[: part.num_scored]]
    if all(map(math.isfinite, scored)):
        return
    bad = next(i for i, score in enumerate(scored) if not math.isfinite(score))
    row = part.scored_from + bad % part.num_scored
    position = sequence.num_cached + int(part.rows.offsets[row])
    raise NonFiniteScoreError(
        f"the model gave a score of {scored[bad]} in request {sequence.request} at position "
        f"{position}; scores must be finite: check the checkpoint, or build at higher precision"
    )
