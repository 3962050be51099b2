"""What one pass gives one sequence: its rows' scores, and a selection rule applied to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from la_runtime.acceptance import accept_exact, accept_threshold
from la_runtime.backends.base import Scores
from la_runtime.block import Part
from la_runtime.choosing import Choice, Chooser
from la_runtime.errors import LookaheadError, NonFiniteScoreError
from la_runtime.layout import DraftTree

__all__ = [
    "BestScores",
    "ChosenRowScores",
    "RowScores",
    "Selected",
    "read_best",
    "select_exact",
    "select_threshold",
]


def _never(token_id: int) -> bool:
    """For sequences without an end."""
    return False


class BestScores(NamedTuple):
    """The best scores of one sequence's scored rows, in row order.

    Args:
        ids: best token per row.
        logits: per row its logit and the second-best; its own alone where there is one token.
        logsumexp: per row; empty unless probabilities are wanted.
        top_ids: [rows, top_c] best tokens per row, best first.
        top_logits: [rows, top_c] theirs.
    """

    ids: list[int]
    logits: list[list[float]]
    logsumexp: list[float]
    top_ids: NDArray[np.int64]
    top_logits: NDArray[np.float32]


def read_best(scores: Scores, *, with_logsumexp: bool) -> list[BestScores]:
    """The best scores of every sequence of a pass.

    Args:
        scores: of the pass.
        with_logsumexp: whether it computed what probabilities need.
    """
    top_ids, top_logits = scores.top()  # [batch, rows, top_c]
    ids = top_ids[:, :, 0].tolist()
    logits = top_logits[:, :, :2].tolist()
    logsumexp = scores.logsumexp().tolist() if with_logsumexp else [[]] * len(ids)
    return list(map(BestScores, ids, logits, logsumexp, top_ids, top_logits))


class RowScores:
    """Scores of one sequence's scored rows, addressed by block row.

    A row is checked when it is asked for: what no choice depends on can break none.

    Args:
        part: the sequence's part of the block.
        best: the best scores of those rows.
        request: what messages call the sequence.
        first_position: position of the part's first row.
    """

    def __init__(self, part: Part, best: BestScores, *, request: int, first_position: int) -> None:
        self._part = part
        self._first_row = part.scored_from
        self._best = best
        self._request = request
        self._first_position = first_position

    def choose(self, row: int, after: Sequence[int]) -> Choice:
        """The model's token after a row.

        Args:
            row: block row.
            after: tokens between the sequence's known ones and the token to choose.

        Raises:
            NonFiniteScoreError: the row's best score is NaN or infinite.
            LookaheadError: a logits processor failed.
        """
        token_id = self.propose(row, after)
        logits = self._best.logits[row - self._first_row]
        return Choice(token_id=token_id, margin=logits[0] - logits[-1])

    def propose(self, row: int, after: Sequence[int]) -> int:
        """The id of that token alone."""
        index = row - self._first_row
        logit = self._best.logits[index][0]
        if not math.isfinite(logit):
            self._refuse(row, logit)
        return self._best.ids[index]

    def top(self, row: int) -> tuple[list[int], list[float]]:
        """The best tokens after a row and their logits, best first, whatever the request wants."""
        index = row - self._first_row
        return self._best.top_ids[index].tolist(), self._best.top_logits[index].tolist()

    def probability(self, row: int) -> float:
        """Softmax probability of a row's best token.

        Raises:
            NonFiniteScoreError: it cannot be told.
        """
        index = row - self._first_row
        logit = self._best.logits[index][0]
        logsumexp = self._best.logsumexp[index]
        for score in (logit, logsumexp):
            if not math.isfinite(score):
                self._refuse(row, score)
        return math.exp(logit - logsumexp)

    def _refuse(self, row: int, score: float) -> NoReturn:
        position = self._first_position + int(self._part.rows.offsets[row])
        raise NonFiniteScoreError(
            f"the model gave a score of {score} in request {self._request} at position "
            f"{position}; scores must be finite: check the checkpoint, or build at higher precision"
        )


class ChosenRowScores(RowScores):
    """The same for a request with a chooser: a row's logits are read only when it is asked.

    Args:
        part: the sequence's part of the block.
        best: the best scores of those rows.
        request: what messages call the sequence.
        first_position: position of the part's first row.
        logits: [rows, vocab_size] of the scored rows.
        chooser: of the request.
        token_ids: the sequence's known tokens.
    """

    def __init__(
        self,
        part: Part,
        best: BestScores,
        *,
        request: int,
        first_position: int,
        logits: NDArray[np.float32],
        chooser: Chooser,
        token_ids: Sequence[int],
    ) -> None:
        super().__init__(part, best, request=request, first_position=first_position)
        self._logits = logits
        self._chooser = chooser
        self._token_ids = token_ids

    def choose(self, row: int, after: Sequence[int]) -> Choice:
        """See `RowScores.choose`."""
        logits = self._logits[row - self._first_row]
        return self._chooser.choose(logits, [*self._token_ids, *after])

    def propose(self, row: int, after: Sequence[int]) -> int:
        """See `RowScores.propose`."""
        return self.choose(row, after).token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """What a pass gives a sequence.

    Args:
        choices: the tokens, in order.
        is_proposal: per token, whether it had been proposed before the pass or by it.
        path: accepted drafts, to be cached.
        accepted: the same and, where the last token had been drafted but ended the sequence, that
            draft.
        is_decided: whether the bonus token is among the tokens; if not, a pass of its own makes
            that choice.
        num_proposed: how many proposals were put to the test.
        goes_on: whether more tokens can follow, as far as the pass tells.
    """

    choices: tuple[Choice, ...]
    is_proposal: tuple[bool, ...]
    path: tuple[int, ...]
    accepted: tuple[int, ...]
    num_proposed: int
    goes_on: bool = True
    is_decided: bool = True

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens' ids."""
        return tuple([choice.token_id for choice in self.choices])


def select_exact(
    drafts: DraftTree,
    part: Part,
    scores: RowScores,
    *,
    ends: Callable[[int], bool] = _never,
    epsilon: float = 0.0,
) -> Selected:
    """Keep what the model itself chooses.

    No row behind the end is asked: a grammar, say, may have nothing to answer there.

    Args:
        drafts: what the pass verified.
        part: the sequence's part of the block.
        scores: of its rows.
        ends: is told each token that is kept, in order, and whether it is the last one.
        epsilon: a choice of a smaller margin is left undecided, and ends what is kept.

    Raises:
        LookaheadError: the first choice cannot be made. Where a later one cannot, what was kept
            stands, and the next pass meets the error.
    """
    rows = part.rows
    choices: list[Choice] = []
    token_ids: list[int] = []
    is_decided, goes_on = True, True

    def choose(node: int) -> int | None:
        nonlocal is_decided, goes_on
        try:
            choice = scores.choose(rows.row(node), token_ids)
        except LookaheadError:
            if not choices:
                raise
            goes_on = False
            return None
        if choice.margin < epsilon:
            is_decided = goes_on = False
            return None
        choices.append(choice)
        token_ids.append(choice.token_id)
        if ends(choice.token_id):
            goes_on = False
            return None
        return choice.token_id

    path = accept_exact(drafts, choose)
    accepted = path
    if len(choices) > len(path) and not goes_on:
        last = drafts.child(path[-1] if path else 0, token_ids[-1])
        accepted = path if last is None else (*path, last)
    num_others = len(choices) - len(accepted)
    return Selected(
        choices=tuple(choices),
        is_proposal=(True,) * len(accepted) + (False,) * num_others,
        path=path,
        accepted=accepted,
        num_proposed=drafts.depth if len(choices) > len(path) else len(path),
        goes_on=goes_on,
        is_decided=is_decided,
    )


def select_threshold(
    part: Part, scores: RowScores, *, tau: float, ends: Callable[[int], bool] = _never
) -> Selected:
    """Emit the model's token and, unverified, the probable proposals behind it.

    Args:
        part: the sequence's part of the block.
        scores: of its rows.
        tau: probability from which a proposal is emitted.
        ends: is told each token that is kept, in order, and whether it is the last one.
    """
    root = part.rows.row(0)
    slots = part.rows.slot_rows(0)
    num_emitted = accept_threshold([scores.probability(row) for row in slots], tau)
    choices: list[Choice] = []
    for row in (root, *slots[:num_emitted]):
        choices.append(scores.choose(row, ()))
        if ends(choices[-1].token_id):
            break
    return Selected(
        choices=tuple(choices),
        is_proposal=(False,) + (True,) * (len(choices) - 1),
        path=(),
        accepted=(),
        num_proposed=len(slots),
    )
