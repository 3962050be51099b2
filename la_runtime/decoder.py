"""Decoding token ids: what starts sequences over a backend, and a batch of them by index."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.base import Backend, CacheState
from la_runtime.batch import Batch, BlockPolicy, PassReport
from la_runtime.choosing import Choice, Chooser
from la_runtime.drafter import Drafter, make_chain, make_sources
from la_runtime.errors import UsageError
from la_runtime.layout import GroupMask, Layout
from la_runtime.planner import CostPlanner, FixedPlanner
from la_runtime.sampling import SamplingParams, Select
from la_runtime.sequence import StepResult, TokenSequence
from la_runtime.source_names import SourceName
from la_runtime.stats import GenerationStats
from la_runtime.step_costs import ASSUMED_COSTS, StepCosts
from la_runtime.stopping import TokenListener

__all__ = [
    "DEFAULT_EPSILON",
    "LARGEST_EPSILON",
    "MOST_PLANNED_ROWS",
    "BlockPolicy",
    "Decoder",
    "Decoding",
    "StepResult",
    "TokenListener",
]

# Most that the margin of a near-tie can be, by the precision of a bundle: what counts where no
# verification has measured it. A float16 logit near 32 is a multiple of 1/32.
LARGEST_EPSILON: Final = {"fp32": 1e-3, "fp16": 0.5, "bf16": 4.0, "int8": 4.0, "int4": 1.0}
DEFAULT_EPSILON: Final = LARGEST_EPSILON["fp32"]

# Rows of the widest step that is planned, and drafts of a step with a layout of its own.
MOST_PLANNED_ROWS: Final = 32
_DRAFTS_OF_A_LAYOUT: Final = 8


class Decoder:
    """Starts decodings over one backend.

    Args:
        backend: runs the blocks.
        context: number of positions the model has.
        eos_token_ids: tokens that end a sequence.
        group_mask: the group mask that the lookahead vectors were made for.
        epsilon: margin of a near-tie, see `SamplingParams.strict`.
        costs: how long passes take, for requests whose steps are planned.
        most_rows: rows of the widest step to plan, at most 32 and what the backend can run.
        is_tuned: whether the lookaheads were taught; decides what they are first taken to be worth.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        context: int,
        eos_token_ids: Sequence[int],
        group_mask: GroupMask = GroupMask.STRICT,
        epsilon: float = DEFAULT_EPSILON,
        costs: StepCosts = ASSUMED_COSTS,
        most_rows: int = MOST_PLANNED_ROWS,
        is_tuned: bool = False,
    ) -> None:
        self.backend = backend
        self.costs = costs
        limits = (most_rows, backend.limits.block, backend.limits.rows, MOST_PLANNED_ROWS)
        self._most_rows = min(limit for limit in limits if limit is not None)
        self._is_tuned = is_tuned
        self.context = context
        self.eos_token_ids = frozenset(eos_token_ids)
        self.group_mask = group_mask
        self.epsilon = epsilon

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
        policy = policy or self.default_policy
        sequences = self.make_sequences(
            prompts, params, listeners=listeners, first_request=first_request
        )
        for sequence in sequences:
            policy.check(sequence)
        return Decoding(sequences, self.make_batch(sequences, policy))

    @property
    def default_policy(self) -> BlockPolicy:
        """Blocks as wide as the backend likes them, and no wider than it can run."""
        return BlockPolicy.within(
            self.backend.limits, k_max=self.backend.contract.k_max, widths=self.backend.widths
        )

    def make_batch(
        self,
        sequences: Sequence[TokenSequence],
        policy: BlockPolicy,
        *,
        cache: CacheState | None = None,
        siblings: Sequence[TokenSequence] = (),
    ) -> Batch:
        """Sequences that share a cache; see `Batch`."""
        return Batch(
            self.backend,
            sequences,
            policy,
            context=self.context,
            group_mask=self.group_mask,
            cache=cache,
            siblings=siblings,
        )

    def make_sequences(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        listeners: Sequence[TokenListener] = (),
        first_request: int = 0,
        scratch: NDArray[np.float32] | None = None,
    ) -> list[TokenSequence]:
        """Check prompts and parameters; see `start`.

        `scratch`, [vocab_size], serves to choose tokens: sequences that share it must be decoded
        by one thread. By default these sequences share a new one.
        """
        if not prompts:
            raise UsageError("there is no prompt to decode")
        hearing: Sequence[TokenListener | None] = listeners or [None] * len(prompts)
        sequences = []
        for index, (prompt, wish, listener) in enumerate(
            zip(prompts, params, hearing, strict=True)
        ):
            request = first_request + index
            self.check_prompt(prompt, request=request)
            self._check_stop_ids(wish)
            k = self._resolve_k(wish)
            sequences.append(
                TokenSequence(
                    prompt,
                    wish,
                    request=request,
                    k=k,
                    drafter=self._make_drafter(prompt, wish, k=k),
                    context=self.context,
                    eos_token_ids=self.eos_token_ids,
                    epsilon=self.epsilon,
                    listener=listener,
                )
            )
        wishing = [s for s in sequences if not s.params.is_plain_greedy]
        if wishing:
            self._add_choosers(wishing, self.make_scratch() if scratch is None else scratch)
        return sequences

    def _make_drafter(self, prompt: Sequence[int], params: SamplingParams, *, k: int) -> Drafter:
        """What plans the passes of a request."""
        layout, names, most_drafts = params.layout, params.sources, params.drafts
        row_places = self.backend.contract.row_places
        if names is None:
            is_exact = params.select is Select.EXACT
            planner = FixedPlanner(
                k=k, layout=layout or Layout.ROOT_ONLY, most_drafts=k if is_exact else 0
            )
            return Drafter(make_chain() if is_exact and k else {}, planner, row_places=row_places)
        num_slots = k if SourceName.LOOKAHEAD in names else 0
        sources = make_sources(
            names,
            prompt=[int(token) for token in prompt],
            k=num_slots,
            is_tuned=self._is_tuned,
        )
        if most_drafts is None and layout is None:
            planned = CostPlanner(
                self.costs, k=num_slots, most_rows=self._most_rows, is_tuned=self._is_tuned
            )
            return Drafter(sources, planned, row_places=row_places)
        planner = FixedPlanner(
            k=num_slots,
            layout=layout or Layout.ROOT_ONLY,
            most_drafts=most_drafts or _DRAFTS_OF_A_LAYOUT,
        )
        return Drafter(sources, planner, row_places=row_places)

    def make_scratch(self) -> NDArray[np.float32]:
        """A buffer to choose tokens in, [vocab_size]."""
        return np.empty(self.backend.contract.vocab_size, dtype=np.float32)

    @staticmethod
    def _add_choosers(sequences: Sequence[TokenSequence], scratch: NDArray[np.float32]) -> None:
        """Choosers for requests that need more than the best score."""
        for sequence in sequences:
            sequence.chooser = Chooser(
                sequence.params,
                request=sequence.request,
                prompt=sequence.token_ids,
                end_token_ids=[*sequence.eos_token_ids, *sequence.stop_token_ids],
                scratch=scratch,
            )

    def _resolve_k(self, params: SamplingParams) -> int:
        k_max, served = self.backend.contract.k_max, self.backend.limits.k
        most = k_max if served is None else served
        k = most if params.k is None else params.k
        if k > k_max:
            raise UsageError(f"k must be at most the bundle's {k_max}, got {k}")
        if k > most:
            raise UsageError(
                f"k must be at most {most}, that of the plan that was opened, got {k}; open the "
                f"engine with k={k}"
            )
        return k

    def _check_stop_ids(self, params: SamplingParams) -> None:
        vocab_size = self.backend.contract.vocab_size
        for token_id in params.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise UsageError(
                    f"stop_token_ids names token {token_id}; ids go from 0 to {vocab_size - 1}"
                )

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


class Decoding:
    """Sequences being decoded together, known by their place among the prompts.

    Made by `Decoder.start`; a context manager that releases the cache.
    """

    def __init__(self, sequences: Sequence[TokenSequence], batch: Batch) -> None:
        self._sequences = list(sequences)
        self._places = {sequence: place for place, sequence in enumerate(sequences)}
        self._batch = batch
        self.is_closed = False

    def __enter__(self) -> Decoding:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the cache."""
        self.is_closed = True
        self._batch.close()

    @property
    def cache(self) -> CacheState:
        """The cache of the sequences that have not finished."""
        return self._batch.cache

    @property
    def is_done(self) -> bool:
        """Whether every sequence has finished."""
        return not self._batch.sequences

    def token_ids(self, index: int) -> tuple[int, ...]:
        """Tokens emitted so far by a sequence."""
        return self._sequences[index].new_token_ids

    def choices(self, index: int) -> tuple[Choice, ...]:
        """How each emitted token was chosen, if the request asked for log-probabilities."""
        return tuple(self._sequences[index].choices)

    def stats(self, index: int) -> GenerationStats:
        """Counts and times of a sequence so far."""
        return self._sequences[index].stats()

    def prefill(self) -> tuple[tuple[int, StepResult], ...]:
        """Read the prompts in chunks; the last one gives each sequence its first tokens.

        Returns:
            Per sequence its index and result, as `step` does.
        """
        self._check_open()
        while self._batch.needs_reading:
            self._batch.read_chunk()
        return self.step()

    def step(self) -> tuple[tuple[int, StepResult], ...]:
        """One pass over every unfinished sequence: verify its drafts, emit, draft anew.

        Returns:
            Per sequence that took part, its index and what the pass gave it.

        Raises:
            NonFiniteScoreError: the model produced NaN or infinity.
            LookaheadError: a logits processor failed.
            UsageError: the decoding is closed.
        """
        self._check_open()
        return tuple(self._results(self._batch.step()))

    def _results(self, report: PassReport) -> list[tuple[int, StepResult]]:
        results = []
        for sequence, outcome in report.outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            results.append((self._places[sequence], outcome))
        return results

    def _check_open(self) -> None:
        if self.is_closed:
            raise UsageError("the decoding is closed; start another")
