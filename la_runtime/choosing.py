"""From one row of logits to one token: adjustments, filters and noise.

Everything depends on the row, the tokens before it, the request's parameters and the position of
the token being chosen; on nothing else. So speculation, batches and drafts cannot change a token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_runtime.errors import LookaheadError, NonFiniteScoreError, UsageError
from la_runtime.filters import filter_scores, find_above, rank_best, sum_exp
from la_runtime.noise import LUCK, find_lucky, gumbel_noise
from la_runtime.sampling import SamplingParams

__all__ = ["Choice", "Chooser"]

# How far below the best score a token is first looked for that has no luck.
_FIRST_REACH: Final = 8.0
# More than what rounding does to a sum of a score and noise.
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One chosen token.

    Args:
        token_id: the token.
        margin: how far the choice is from being another one, in units of logits: best minus
            second-best score, noise included, or the distance to a filter's cut where that is
            less; infinite when one survived alone. While every logit moves by less than a quarter
            of it the choice stands (cuts farther than `filters.NEAR` are not looked for).
        logprob: log-probability of the token under the model's own scores, when asked for.
        top_logprobs: the best tokens with theirs, best first, when asked for.
    """

    token_id: int
    margin: float
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Chooser:
    """Chooses the tokens of one request.

    Args:
        params: of the request.
        request: its index, for messages.
        prompt: its token ids.
        end_token_ids: tokens that `min_new_tokens` holds back.
        scratch: [vocab_size] float32, overwritten by every call; may be shared.

    Raises:
        UsageError: a `logit_bias` names a token outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        request: int,
        prompt: Sequence[int],
        end_token_ids: Sequence[int],
        scratch: NDArray[np.float32],
    ) -> None:
        vocab_size = len(scratch)
        for token_id in params.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise UsageError(
                    f"logit_bias names token {token_id}; ids go from 0 to {vocab_size - 1}"
                )
        self._params = params
        self._request = request
        self._scratch = scratch
        self._prompt_len = len(prompt)
        self._prompt_ids = np.unique(np.asarray(prompt, dtype=np.int64))
        self._end_token_ids = np.asarray(sorted(end_token_ids), dtype=np.int64)
        # The repetition penalty can widen a difference between two logits this many times.
        self._stretch = max(params.repetition_penalty, 1 / params.repetition_penalty)
        self._bias_ids = np.asarray(list(params.logit_bias), dtype=np.int64)
        self._biases = np.asarray(list(params.logit_bias.values()), dtype=np.float32)

    def choose(self, logits: NDArray[np.float32], token_ids: Sequence[int]) -> Choice:
        """The token after `token_ids`.

        Args:
            logits: [vocab_size] scores of the row of the last of them; not changed.
            token_ids: prompt, output, and the drafts on the row's path.

        Raises:
            NonFiniteScoreError: a logit is NaN or infinite, or nothing may be chosen.
            LookaheadError: a logits processor failed.
        """
        params = self._params
        position = len(token_ids)
        if not (math.isfinite(float(logits.max())) and math.isfinite(float(logits.min()))):
            raise NonFiniteScoreError(
                f"the model gave a score that is NaN or infinite in request {self._request} at "
                f"position {position - 1}; check the checkpoint, or build at higher precision"
            )
        scores = self._scratch
        np.copyto(scores, logits)
        if params.has_adjustments:
            self._adjust(scores, token_ids)
        if params.temperature == 0:
            token_id, margin = self._greedy(scores, position)
        else:
            token_id, margin = self._sample(scores, position)
        margin /= self._stretch
        if params.logprobs is None:
            return Choice(token_id=token_id, margin=margin)
        logprob, top = _logprobs(logits, token_id, params.logprobs)
        return Choice(token_id=token_id, margin=margin, logprob=logprob, top_logprobs=top)

    def _adjust(self, scores: NDArray[np.float32], token_ids: Sequence[int]) -> None:
        params = self._params
        if len(self._bias_ids):
            scores[self._bias_ids] += self._biases
        counts = Counter(token_ids[self._prompt_len :])
        said = np.fromiter(counts, dtype=np.int64, count=len(counts))
        if params.repetition_penalty != 1:
            seen = np.union1d(self._prompt_ids, said)
            values = scores[seen]
            penalty = np.float32(params.repetition_penalty)
            scores[seen] = np.where(values > 0, values / penalty, values * penalty)
        if params.presence_penalty != 0 or params.frequency_penalty != 0:
            times = np.fromiter(counts.values(), dtype=np.float32, count=len(counts))
            scores[said] -= (
                np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * times
            )
        if len(token_ids) - self._prompt_len < params.min_new_tokens:
            scores[self._end_token_ids] = -np.inf
        for processor in params.logits_processors:
            try:
                processor(token_ids, scores)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit would end whoever decodes for others, too
                raise LookaheadError(
                    f"a logits processor failed in request {self._request} at position "
                    f"{len(token_ids)}: {type(error).__name__}: {error}"
                ) from error

    def _greedy(self, scores: NDArray[np.float32], position: int) -> tuple[int, float]:
        token_id = int(np.argmax(scores))
        best = float(scores[token_id])
        self._check_choosable(best, position)
        scores[token_id] = -np.inf
        return token_id, best - float(scores.max())

    def _sample(self, scores: NDArray[np.float32], position: int) -> tuple[int, float]:
        params = self._params
        best = float(scores.max())
        self._check_choosable(best, position)
        scores -= np.float32(best)
        scores /= np.float32(params.temperature)
        if params.has_filters:
            token_id, margin = self._draw_filtered(scores, position)
        else:
            token_id, margin = self._draw(scores, position)
        return token_id, margin * params.temperature

    def _draw(self, scores: NDArray[np.float32], position: int) -> tuple[int, float]:
        """Draw from the whole row, whose best score is 0.

        A token draws less than its score and `LUCK`, unless it is lucky. So besides the lucky ones
        only those near the best score matter: nearer in a flat row, where lucky ones draw much.
        """
        lucky = find_lucky(self._params.seed, position, len(scores))
        reach = min(_FIRST_REACH, _needed_reach(scores[lucky.ids] + lucky.noise))
        while True:
            ids = np.union1d(find_above(scores, -reach), lucky.ids)
            drawn = scores[ids] + gumbel_noise(self._params.seed, position, ids)
            needed = _needed_reach(drawn)
            if reach >= needed:
                index, best, second = _best_two(drawn)
                return int(ids[index]), best - second
            reach = needed

    def _draw_filtered(self, scores: NDArray[np.float32], position: int) -> tuple[int, float]:
        """Draw from what the filters leave; tokens cut by a hair bound the margin alone."""
        params = self._params
        left = filter_scores(scores, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        drawn = scores[left.ids] + gumbel_noise(params.seed, position, left.ids)
        index, best, second = _best_two(drawn)
        margin = min(best - second, float(left.slack[index]))
        if len(left.cut_ids):
            cut = scores[left.cut_ids] + gumbel_noise(params.seed, position, left.cut_ids)
            # A cut token matters if it would be the choice: if it survived and, moved with the
            # others, drew more.
            needed = np.maximum(left.cut_by, best - cut)
            margin = min(margin, float(needed.min()))
        return int(left.ids[index]), margin

    def _check_choosable(self, best: float, position: int) -> None:
        if not math.isfinite(best):
            raise NonFiniteScoreError(
                f"no token may be chosen in request {self._request} at position {position}: the "
                f"best adjusted score is {best}; a logits processor or bias forbids everything"
            )


def _needed_reach(drawn: NDArray[np.float64]) -> float:
    """How far below the best score no token without luck draws as much as the second of these."""
    second = float(np.partition(drawn, -2)[-2]) if len(drawn) > 1 else -math.inf
    return max(0.0, LUCK - second + _ROUNDING)


def _best_two(drawn: NDArray[np.float64]) -> tuple[int, float, float]:
    """Index of the best value, the value, and the second-best; overwrites the best."""
    index = int(np.argmax(drawn))
    best = float(drawn[index])
    drawn[index] = -np.inf
    return index, best, float(drawn.max())


def _logprobs(
    logits: NDArray[np.float32], token_id: int, count: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-probability of a token and of the `count` best, under the model's own scores."""
    peak = float(logits.max())
    total = peak + math.log(sum_exp(logits, peak))
    top = tuple((int(i), float(logits[i]) - total) for i in rank_best(logits, count))
    return float(logits[token_id]) - total, top
