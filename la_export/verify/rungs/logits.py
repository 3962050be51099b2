"""Rungs 2 and 10: logits of tokens and of slots against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_export.verify.findings import Figure, Finding, Suspect
from la_export.verify.ladder import EncodedPrompt, Ladder
from la_export.verify.passes import (
    describe_scores,
    lookahead_vectors,
    random_vectors,
    read_text,
    score_rows,
)
from la_export.verify.tolerance import Tolerance
from la_runtime.backends.base import CacheSizing
from la_runtime.layout import Group, GroupMask, make_rows

__all__ = ["LogitDifferences", "check_logits", "check_slot_logits"]

_CHUNK: Final = 16
_NUM_DRAFTS: Final = 2
_ODD_TEXT: Final = 128
_SEED: Final = 2


@dataclass(slots=True)
class LogitDifferences:
    """Logits compared with the reference's, text by text.

    Args:
        tolerance: how far they may be apart.
    """

    tolerance: Tolerance
    largest: float = 0.0
    largest_share: float = 0.0
    largest_kl: float = 0.0
    total: float = 0.0
    count: int = 0
    rows: int = 0
    agreed: int = 0
    unsteady: int = 0
    problems: list[str] = field(default_factory=list)
    suspect: Suspect | None = None

    def add(
        self,
        what: str,
        found: NDArray[np.float32],
        truth: NDArray[np.float32],
        text: Suspect,
        *,
        ask_again: Callable[[int], NDArray[np.float32]] | None = None,
    ) -> None:
        """Compare [rows, vocab_size] of one text with the truth.

        Args:
            what: names the text.
            found: the bundle's.
            truth: the reference's.
            text: to look into if they differ.
            ask_again: what the reference says when its input is off by rounding, by seed.
        """
        if ask_again is not None:
            truth = self._steady(found, truth, ask_again)
        num_problems = len(self.problems)
        self._compare(what, found, truth)
        if self.suspect is None and len(self.problems) > num_problems:
            self.suspect = text

    def _steady(
        self,
        found: NDArray[np.float32],
        truth: NDArray[np.float32],
        ask_again: Callable[[int], NDArray[np.float32]],
    ) -> NDArray[np.float32]:
        """The truth, with rows that are too far from what was found as near as it itself strays."""
        bound = self.tolerance.logits * (float(np.ptp(truth)) or 1.0)
        distances = np.abs(found - truth).max(axis=-1)  # [rows]
        far = distances > bound
        if not far.any():
            return truth
        nearest = truth.copy()
        for seed in range(self.tolerance.nudges):
            other = ask_again(seed)
            others = np.abs(found - other).max(axis=-1)
            nearer = far & (others < distances)
            nearest[nearer], distances[nearer] = other[nearer], others[nearer]
            if not (distances[far] > bound).any():
                break
        self.unsteady += int(np.count_nonzero(far & (distances <= bound)))
        return nearest

    def _compare(self, what: str, found: NDArray[np.float32], truth: NDArray[np.float32]) -> None:
        difference = np.abs(found.astype(np.float64) - truth)  # [rows, vocab_size]
        scale = float(np.ptp(truth)) or 1.0
        worst = int(np.argmax(difference.max(axis=-1)))
        largest = float(difference.max())
        self.largest = max(self.largest, largest)
        self.largest_share = max(self.largest_share, largest / scale)
        self.total += float(difference.sum())
        self.count += difference.size
        self._compare_best(what, found, truth)
        self.largest_kl = max(self.largest_kl, float(_divergence(truth, found).max()))
        if not largest <= self.tolerance.logits * scale:
            self.problems.append(
                f"{what}: logits at position {worst} differ by {largest:.3g} of token "
                f"{int(np.argmax(difference[worst]))}, {largest / scale:.2g} of their range "
                f"(at most {self.tolerance.logits:.2g})"
            )

    def _compare_best(
        self, what: str, found: NDArray[np.float32], truth: NDArray[np.float32]
    ) -> None:
        best = found.argmax(axis=-1)
        expected = truth.argmax(axis=-1)
        rows = np.arange(len(truth))
        gaps = truth[rows, expected] - truth[rows, best]
        is_good = (best == expected) | (gaps < self.tolerance.reference_epsilon)
        self.rows += len(rows)
        self.agreed += int(np.count_nonzero(is_good))
        for row in np.flatnonzero(~is_good)[:1]:
            self.problems.append(
                f"{what}: best token at position {row} is {best[row]}, expected {expected[row]} "
                f"(margin {gaps[row]:.3g})"
            )

    @property
    def figures(self) -> tuple[Figure, ...]:
        """What was measured, with the bounds."""
        disagreement = 1.0 - self.agreed / max(self.rows, 1)
        return (
            Figure(name="largest difference", value=self.largest),
            Figure(
                name="largest share of the range",
                value=self.largest_share,
                bound=self.tolerance.logits,
            ),
            *self._unsteady_figures,
            Figure(name="mean difference", value=self.total / max(self.count, 1)),
            Figure(name="top-1 disagreement", value=disagreement, bound=0.0),
            Figure(name="largest KL", value=self.largest_kl, bound=self.tolerance.kl),
        )

    @property
    def _unsteady_figures(self) -> tuple[Figure, ...]:
        """Rows at which the reference does not hold its own answer, if any."""
        if not self.unsteady:
            return ()
        allowed = self.tolerance.excuse_allowance(self.rows)
        return (Figure(name="rows PyTorch is unsteady at", value=self.unsteady, bound=allowed),)


def _divergence(truth: NDArray[np.float32], found: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(truth || found) of each row."""
    log_truth, log_found = _log_softmax(truth), _log_softmax(found)
    divergence = np.exp(log_truth) * (log_truth - log_found)
    return np.asarray(divergence.sum(axis=-1))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def check_logits(ladder: Ladder) -> Finding:
    """Every position of every prompt, read in chunks with a cache, against one causal pass."""
    differences = LogitDifferences(tolerance=ladder.tolerance)
    for prompt in ladder.prompts:
        found = read_text(ladder.backend, prompt.token_ids, width=_CHUNK, context=ladder.context)
        differences.add(
            f"prompt {prompt.name}",
            found,
            ladder.reference.scores(prompt.token_ids),
            Suspect(token_ids=prompt.token_ids),
        )
        differences.problems += [
            f"prompt {prompt.name}: {line}"
            for line in describe_scores(
                ladder.backend, prompt.token_ids[: ladder.most_scored], context=ladder.context
            )
        ]
    num_positions = differences.rows
    num_read = 0
    for token_ids in _unread_tokens(ladder):
        num_read += len(token_ids)
        found = read_text(ladder.backend, token_ids, width=_CHUNK, context=ladder.context)
        differences.add(
            "tokens of no prompt",
            found,
            ladder.reference.scores(token_ids),
            Suspect(token_ids=token_ids),
            ask_again=None if ladder.source is None else partial(_ask_again, ladder, token_ids),
        )
    return Finding(
        figures=differences.figures,
        problems=tuple(differences.problems),
        detail=f"{num_positions} positions of {len(ladder.prompts)} prompts and {num_read} tokens "
        f"that no prompt holds, of {ladder.manifest.contract.vocab_size}; "
        f"{_reference_name(ladder)}",
        suspect=differences.suspect,
    )


def _ask_again(ladder: Ladder, token_ids: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    return ladder.reference.nudged_scores(token_ids, seed=seed)


def _unread_tokens(ladder: Ladder) -> Iterator[tuple[int, ...]]:
    """Token ids that no prompt holds, all of them or some from everywhere, in odd texts."""
    vocab_size = ladder.manifest.contract.vocab_size
    read = {token_id for prompt in ladder.prompts for token_id in prompt.token_ids}
    unread = np.array([i for i in range(vocab_size) if i not in read], dtype=np.int64)
    count = min(ladder.settings.vocabulary_reads, len(unread))
    chosen = unread[np.arange(count) * len(unread) // max(count, 1)]
    np.random.default_rng(_SEED).shuffle(chosen)
    length = min(_ODD_TEXT, ladder.context)
    for start in range(0, count, length):
        yield tuple(chosen[start : start + length].tolist())


def _reference_name(ladder: Ladder) -> str:
    if ladder.source is None:
        return "against the bundle's own causal pass, PyTorch was not asked"
    return "against PyTorch"


def check_slot_logits(ladder: Ladder) -> Finding:
    """Slot (j, i) behind a cached prefix against [prefix, drafts to j, lookahead token i].

    With the bundle's vectors, and with random ones that differ from slot to slot.
    """
    if not ladder.lookahead_lengths:
        return Finding(skipped="the bundle has no lookahead length above 0")
    # Random vectors are no text's; what they give says the right thing of positions and masks.
    own, distinct = (LogitDifferences(tolerance=ladder.tolerance) for _ in range(2))
    prompt = max(ladder.prompts, key=lambda entry: len(entry.token_ids))
    for name, vectors, differences in (
        ("the bundle's vectors", ladder.own_vectors, own),
        ("random vectors", random_vectors(ladder, seed=10), distinct),
    ):
        with lookahead_vectors(ladder, vectors):
            _compare_slots(ladder, prompt, name, vectors, differences)
    return Finding(
        figures=(
            Figure(
                name="largest share of the range",
                value=own.largest_share,
                bound=ladder.tolerance.logits,
            ),
            Figure(
                name="the same with random vectors",
                value=distinct.largest_share,
                bound=ladder.tolerance.logits,
            ),
        ),
        problems=(*own.problems, *distinct.problems),
        detail=f"{own.rows + distinct.rows} slots; {_reference_name(ladder)}",
        suspect=own.suspect or distinct.suspect,
    )


def _compare_slots(
    ladder: Ladder,
    prompt: EncodedPrompt,
    name: str,
    vectors: NDArray[np.float32],
    differences: LogitDifferences,
) -> None:
    text = ladder.text(prompt)
    num_drafts = min(_NUM_DRAFTS, len(text) - 1)
    cached = len(text) - 1 - num_drafts
    group_mask = ladder.manifest.lookahead.group_mask
    k = max(ladder.lookahead_lengths)
    groups = tuple(Group(node, k) for node in range(num_drafts + 1))
    state = ladder.backend.allocate(1, CacheSizing.STEPPED)
    if cached:
        rows = make_rows(cached, (), ())
        score_rows(
            ladder.backend,
            state,
            text[:cached],
            rows,
            context=ladder.context,
            scored_from=cached - 1,
        )
        ladder.backend.commit(state, [range(cached)])
    rows = make_rows(1, tuple(range(num_drafts)), groups, group_mask=group_mask)
    logits = score_rows(ladder.backend, state, text[cached:], rows, context=ladder.context).copy()
    state.close()
    for group in groups:
        prefix = text[: cached + 1 + group.node]
        for slot in sorted({1, 2, k} & set(range(1, k + 1))):
            if len(prefix) - 1 + slot >= ladder.context:
                continue
            first = slot if group_mask is GroupMask.STRICT else 1
            slots = range(first, slot + 1)
            vocab_size = ladder.manifest.contract.vocab_size
            expected = ladder.reference.scores(
                [*prefix, *(vocab_size + i - 1 for i in slots)],
                vectors,
                position_ids=[*range(len(prefix)), *(len(prefix) - 1 + i for i in slots)],
            )[-1:]
            row = rows.slot_rows(group.node)[slot - 1]
            what = f"slot ({group.node}, {slot}) with {name}, prompt {prompt.name}"
            # The search reads tokens alone; what is wrong with them is wrong before the slots.
            text_before = Suspect(token_ids=prefix)
            differences.add(what, logits[row : row + 1], expected, text_before)
