"""Trains lookaheads: batches, schedule, optimizer, and what it takes to go on later."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from la_export.tune.evaluation import Acceptance, Anchors, measure, spread_anchors
from la_export.tune.groups import draw_anchors, pack_groups
from la_export.tune.library import TextLibrary
from la_export.tune.lookaheads import Lookaheads
from la_export.tune.loss import LossKind, backpropagate, best_tokens
from la_export.tune.passes import run_groups
from la_runtime.errors import HostError, UsageError
from la_runtime.layout import GroupMask

__all__ = ["Evaluation", "Learned", "Schedule", "Trainer"]

_VECTORS_RATE: Final = 5e-3
_ADAPTER_RATE: Final = 2e-3
_LAST_RATE: Final = 0.02  # of the peak
_WARMUP: Final = 0.03
_LARGEST_GRADIENT: Final = 1.0
# The last part of the training counts a slot only as far as a draft chain gets to it.
_UNTIL_FAIL_FROM: Final = 0.7
_TEXTS: Final = 8
_ROWS: Final = 128
_EVALUATED_TEXTS: Final = 32
_EVALUATED_ANCHORS: Final = 16
_EVALUATED_SLOTS: Final = 8
# Of all that training may take: how often it is looked at.
_EVALUATIONS: Final = 14
# Evaluations without a better one, after which it ends.
_PATIENCE: Final = 6
_SAVE_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long to train: whichever of the two ends first.

    Args:
        seconds: of training, those of earlier runs included.
        steps: likewise.
    """

    seconds: float
    steps: int

    def progress(self, seconds: float, steps: int) -> float:
        """From 0 at the beginning to 1 at the end."""
        return min(1.0, max(seconds / self.seconds, steps / self.steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One look at held-out texts while training.

    Args:
        step: steps taken.
        seconds: of training.
        by_slot: share of proposals that were right.
        accepted: drafts of a group accepted, in the mean.
        loss: mean of the steps since the last look; 0 before the first.
    """

    step: int
    seconds: float
    by_slot: tuple[float, ...]
    accepted: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What came of training.

    Args:
        history: every look at held-out texts.
        steps: taken.
        seconds: of training.
        stopped_early: whether it ended because nothing got better.
    """

    history: tuple[Evaluation, ...]
    steps: int
    seconds: float
    stopped_early: bool


class Trainer:
    """Trains one set of lookaheads.

    Args:
        model: the frozen model.
        lookaheads: changed in place.
        training: texts to learn from.
        held_out: texts to look at.
        group_mask: what slots see of their group.
        state_path: where a training that was broken off goes on from.
        seed: of the batches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lookaheads: Lookaheads,
        *,
        training: TextLibrary,
        held_out: TextLibrary,
        group_mask: GroupMask,
        state_path: Path,
        seed: int = 0,
    ) -> None:
        self.model = model
        self._lookaheads = lookaheads
        self._training = training
        self._held_out = held_out
        self._group_mask = group_mask
        self._state_path = state_path
        self._seed = seed
        adapter = [*lookaheads.reduce, *lookaheads.expand]
        groups = [{"params": [lookaheads.vectors], "lr": _VECTORS_RATE}]
        groups += [{"params": adapter, "lr": _ADAPTER_RATE}] if adapter else []
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
        self._peaks = [group["lr"] for group in self._optimizer.param_groups]
        self._step = 0
        self._seconds = 0.0
        self._history: list[Evaluation] = []
        self._best = self._copy()

    def train(
        self,
        schedule: Schedule,
        *,
        tell_step: Callable[[int, float, float], None],
        tell_evaluation: Callable[[Evaluation], None],
    ) -> Learned:
        """Train to the end of the schedule, from where an earlier run was broken off.

        The lookaheads are then those of the best look at held-out texts.

        Args:
            schedule: how long.
            tell_step: is told the step, the seconds and the loss.
            tell_evaluation: is told of every look.

        Raises:
            UsageError: what an earlier run left is another training's.
        """
        self._load()
        try:
            stopped_early = self._run(schedule, tell_step, tell_evaluation)
        finally:
            self._save()
        self._lookaheads.load_state_dict(self._best)
        return Learned(
            history=tuple(self._history),
            steps=self._step,
            seconds=self._seconds,
            stopped_early=stopped_early,
        )

    def _run(
        self,
        schedule: Schedule,
        tell_step: Callable[[int, float, float], None],
        tell_evaluation: Callable[[Evaluation], None],
    ) -> bool:
        """Steps and looks until the schedule ends; whether nothing got better before."""
        losses: list[float] = []
        began = last_saved = time.monotonic()
        before = self._seconds
        if not self._history:
            self._evaluate(losses, tell_evaluation)
        if self._is_stuck():
            return True
        next_look = self._next_look(schedule)
        while (progress := schedule.progress(self._seconds, self._step)) < 1:
            losses.append(self._take_step(progress))
            self._step += 1
            self._seconds = before + time.monotonic() - began
            tell_step(self._step, self._seconds, losses[-1])
            if schedule.progress(self._seconds, self._step) >= next_look:
                self._evaluate(losses, tell_evaluation)
                losses.clear()
                next_look = self._next_look(schedule)
                if self._is_stuck():
                    return True
            if time.monotonic() - last_saved > _SAVE_SECONDS:
                self._save()
                last_saved = time.monotonic()
        return False

    def propose(
        self, library: TextLibrary, indices: Sequence[int], anchors: Sequence[Anchors]
    ) -> NDArray[np.int64]:
        """What slots propose now, see `evaluation.Propose`."""
        block = pack_groups([library.texts[index] for index in indices], anchors)
        with torch.no_grad():
            states = library.states(indices)
            hidden = run_groups(self.model, self._lookaheads, states, block, self._group_mask)
            found: NDArray[np.int64] = best_tokens(hidden, self._head).cpu().numpy()
        return found

    @property
    def _head(self) -> torch.nn.Module:
        head = self.model.get_output_embeddings()
        assert isinstance(head, torch.nn.Module), "logits come from a head"
        return head

    def _take_step(self, progress: float) -> float:
        """One batch; its loss."""
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * _rate(progress)
        rng = np.random.default_rng((self._seed, self._step))
        indices = self._batch()
        texts = [self._training.texts[index] for index in indices]
        anchors = draw_anchors(
            texts, num_slots=len(self._lookaheads.vectors), num_rows=_ROWS, rng=rng
        )
        block = pack_groups(texts, anchors)
        states = self._training.states(indices)
        hidden = run_groups(self.model, self._lookaheads, states, block, self._group_mask)
        kind = LossKind(until_fail=progress >= _UNTIL_FAIL_FROM)
        loss = backpropagate(hidden, states.hidden, self._head, block, kind)
        torch.nn.utils.clip_grad_norm_(self._lookaheads.parameters(), _LARGEST_GRADIENT)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss

    def _batch(self) -> list[int]:
        """Every text once before any comes again, in another order each time."""
        size = min(_TEXTS, len(self._training))
        per_round = len(self._training) // size
        turn, place = divmod(self._step, per_round)
        order = np.random.default_rng((self._seed, turn, 1)).permutation(len(self._training))
        return [int(index) for index in order[place * size : (place + 1) * size]]

    def _evaluate(
        self, losses: Sequence[float], tell_evaluation: Callable[[Evaluation], None]
    ) -> None:
        found = self.acceptance(num_texts=_EVALUATED_TEXTS)
        evaluation = Evaluation(
            step=self._step,
            seconds=self._seconds,
            by_slot=found.by_slot,
            accepted=found.accepted,
            loss=float(np.mean(losses)) if losses else 0.0,
        )
        if all(evaluation.accepted > earlier.accepted for earlier in self._history):
            self._best = self._copy()
        self._history.append(evaluation)
        tell_evaluation(evaluation)

    def acceptance(self, *, num_texts: int | None = None) -> Acceptance:
        """On held-out texts as the lookaheads are now.

        Args:
            num_texts: the first so many; all when not given.
        """
        num_slots = min(len(self._lookaheads.vectors), _EVALUATED_SLOTS)
        texts = self._held_out.texts[:num_texts]
        anchors = [spread_anchors(text, num_slots, _EVALUATED_ANCHORS) for text in texts]
        return measure(self._held_out, anchors, num_slots, self.propose)

    def _next_look(self, schedule: Schedule) -> float:
        """Progress of the next evaluation; the last is at the end."""
        done = schedule.progress(self._seconds, self._step)
        return min(1.0, (math.floor(done * _EVALUATIONS) + 1) / _EVALUATIONS)

    def _is_stuck(self) -> bool:
        accepted = [evaluation.accepted for evaluation in self._history]
        return len(accepted) > _PATIENCE and max(accepted[-_PATIENCE:]) <= max(
            accepted[:-_PATIENCE]
        )

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self._lookaheads.state_dict().items()}

    def _save(self) -> None:
        """In one step, so that a run broken off meanwhile leaves the state before."""
        tensors = {f"now.{name}": value for name, value in self._copy().items()}
        tensors |= {f"best.{name}": value.clone() for name, value in self._best.items()}
        for index, moments in self._optimizer.state_dict()["state"].items():
            tensors |= {f"moments.{index}.{name}": value for name, value in moments.items()}
        record = {
            "step": self._step,
            "seconds": self._seconds,
            "history": [_as_record(evaluation) for evaluation in self._history],
        }
        partial = self._state_path.with_suffix(".partial")
        try:
            save_file(tensors, partial, metadata={"training": json.dumps(record)})
            os.replace(partial, self._state_path)
        except (OSError, SafetensorError) as error:
            raise HostError(f"{self._state_path} cannot be written: {error}") from error

    def _load(self) -> None:
        if not self._state_path.exists():
            return
        try:
            self._read_state()
        except (OSError, SafetensorError, KeyError, RuntimeError, ValueError, TypeError) as error:
            raise UsageError(
                f"{self._state_path} is of a tuning with other options, or damaged; remove its "
                "folder or choose another --out"
            ) from error

    def _read_state(self) -> None:
        with safe_open(self._state_path, framework="pt") as file:
            record = json.loads(file.metadata()["training"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self._lookaheads.load_state_dict(_named(tensors, "now."))
        self._best = _named(tensors, "best.")
        state = self._optimizer.state_dict()
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in _named(tensors, "moments.").items():
            index, _, kind = name.partition(".")
            moments.setdefault(int(index), {})[kind] = value
        self._optimizer.load_state_dict({**state, "state": moments})
        self._step, self._seconds = int(record["step"]), float(record["seconds"])
        self._history = [
            Evaluation(**{**entry, "by_slot": tuple(entry["by_slot"])})
            for entry in record["history"]
        ]


def _named(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _as_record(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "step": evaluation.step,
        "seconds": evaluation.seconds,
        "by_slot": list(evaluation.by_slot),
        "accepted": evaluation.accepted,
        "loss": evaluation.loss,
    }


def _rate(progress: float) -> float:
    """Share of the peak: linear up, then a half cosine down."""
    if progress < _WARMUP:
        return max(progress / _WARMUP, _LAST_RATE)
    done = (progress - _WARMUP) / (1 - _WARMUP)
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))
