"""Training: what it learns, and that broken off it goes on as if it had not been."""

from __future__ import annotations

import pytest
import torch

from la_export.tune.attention import use_tuning_attention
from la_export.tune.library import TextLibrary
from la_export.tune.lookaheads import Lookaheads, find_sites
from la_export.tune.texts import OwnText
from la_export.tune.trainer import Schedule, Trainer
from la_runtime.errors import UsageError
from la_runtime.layout import GroupMask
from tests.tiny_models import make_tiny_config, make_tiny_model

NUM_STEPS = 6
ENDLESS = 1e9


def make_trainer(folder, *, rank=2, num_vectors=3):
    model = make_tiny_model(make_tiny_config()).requires_grad_(False)
    use_tuning_attention(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (24, 20), generator=generator)
    texts = [OwnText(token_ids=tuple(row), answered_from=5) for row in tokens.tolist()]
    lookaheads = Lookaheads(
        torch.zeros(num_vectors, model.config.hidden_size), find_sites(model) if rank else (), rank
    )
    trainer = Trainer(
        model,
        lookaheads,
        training=TextLibrary(model, texts[8:], memory_bytes=2**20),
        held_out=TextLibrary(model, texts[:8], memory_bytes=0),
        group_mask=GroupMask.STRICT,
        state_path=folder / "state.safetensors",
    )
    return trainer, lookaheads


def train(trainer, *, break_off_at=None, steps=NUM_STEPS):
    told = []

    def tell_step(step, seconds, loss):
        told.append((step, loss))
        if step == break_off_at:
            raise KeyboardInterrupt

    schedule = Schedule(seconds=ENDLESS, steps=steps)
    learned = trainer.train(schedule, tell_step=tell_step, tell_evaluation=lambda _: None)
    return learned, told


@pytest.mark.parametrize("rank", [0, 2])
def test_a_training_that_was_broken_off_goes_on_as_if_it_had_not_been(tmp_path, rank):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole, expected = make_trainer(tmp_path / "whole", rank=rank)
    _, told = train(whole)

    first, _ = make_trainer(tmp_path / "parts", rank=rank)
    with pytest.raises(KeyboardInterrupt):
        train(first, break_off_at=4)
    second, found = make_trainer(tmp_path / "parts", rank=rank)
    learned, told_later = train(second)

    assert learned.steps == NUM_STEPS
    assert told_later == told[4:]
    for part, truth in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(part, truth)


def test_a_training_that_is_over_takes_no_further_step(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    train(trainer)
    again, _ = make_trainer(tmp_path)

    learned, told = train(again)

    assert told == []
    assert learned.steps == NUM_STEPS


def test_the_best_look_at_held_out_texts_is_what_stays(tmp_path):
    trainer, lookaheads = make_trainer(tmp_path)

    learned, _ = train(trainer, steps=30)

    accepted = [look.accepted for look in learned.history]
    assert trainer.acceptance(num_texts=8).accepted == pytest.approx(max(accepted))
    assert learned.history[0].step == 0
    assert learned.history[-1].step == learned.steps
    assert torch.isfinite(lookaheads.vectors).all()


def test_the_state_of_another_training_is_refused(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    train(trainer)
    other, _ = make_trainer(tmp_path, num_vectors=2)

    with pytest.raises(UsageError, match=r"is of a tuning with other options, or damaged"):
        train(other)


def test_a_damaged_state_is_refused(tmp_path):
    (tmp_path / "state.safetensors").write_bytes(b"no state")
    trainer, _ = make_trainer(tmp_path)

    with pytest.raises(UsageError, match=r"is of a tuning with other options, or damaged"):
        train(trainer)


@pytest.mark.parametrize(
    ("seconds", "steps", "expected"),
    [(0, 0, 0), (50, 1, 0.5), (1, 8, 0.8), (500, 1, 1), (1, 99, 1)],
)
def test_a_schedule_ends_with_whatever_ends_first(seconds, steps, expected):
    assert Schedule(seconds=100, steps=10).progress(seconds, steps) == pytest.approx(expected)
