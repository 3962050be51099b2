from __future__ import annotations

import numpy as np
import pytest

from la_export.bench.speed.curves import STEP_ROWS
from la_export.bench.speed.steps import Scored, allocate_filled, make_step, make_step_part
from la_runtime.backends.base import StepInputs
from la_runtime.backends.fake import FakeBackend
from la_runtime.layout import Layout, make_rows

CONTEXT = 600


class WatchedBackend(FakeBackend):
    """Keeps the inputs of every pass."""

    def __init__(self) -> None:
        super().__init__(vocab_size=50, k_max=8)
        self.seen: list[StepInputs] = []

    def forward(self, state, inputs):
        self.seen.append(inputs)
        return super().forward(state, inputs)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_a_step_of_2k_plus_1_rows_is_the_root_only_step_of_k(k: int) -> None:
    part = make_step_part(2 * k + 1, vocab_size=50, k_max=8)

    expected = make_rows(1, tuple(range(k)), Layout.ROOT_ONLY.groups(k, k))
    assert part.rows.groups == expected.groups
    np.testing.assert_array_equal(part.rows.offsets, expected.offsets)
    np.testing.assert_array_equal(part.rows.visible, expected.visible)


@pytest.mark.parametrize("k_max", [1, 2, 16])
def test_a_step_has_the_rows_asked_for_and_no_slot_without_a_vector(k_max: int) -> None:
    for num_rows in STEP_ROWS:
        rows = make_step_part(num_rows, vocab_size=50, k_max=k_max).rows

        assert rows.num_rows == num_rows
        assert rows.num_verified == num_rows // 2 + 1
        assert rows.slot_index.max() <= k_max


def test_a_step_without_slots_is_as_wide_and_all_of_it_is_tokens() -> None:
    part = make_step_part(9, vocab_size=50, k_max=8, has_slots=False)

    assert part.rows.num_rows == part.rows.num_verified == len(part.token_ids) == 9


@pytest.mark.parametrize(("scored", "count"), [(Scored.ALL, 9), (Scored.VERIFIED, 5)])
def test_the_head_gets_the_rows_asked_for(scored: Scored, count: int) -> None:
    backend = WatchedBackend()
    state = allocate_filled(backend, past=7, reserved=20, context=CONTEXT)

    make_step(backend, state, num_rows=9, scored=scored, context=CONTEXT)()

    last = backend.seen[-1]
    assert last.input_ids.shape == (1, 9)
    np.testing.assert_array_equal(last.logits_rows, [range(count)])


def test_a_step_leaves_the_cache_as_it_was() -> None:
    backend = FakeBackend(vocab_size=50, k_max=8)
    state = allocate_filled(backend, past=540, reserved=560, context=CONTEXT, batch=2)
    before = [state.read(sequence) for sequence in range(2)]
    step = make_step(backend, state, num_rows=17, scored=Scored.ALL, context=CONTEXT)

    seconds = [step() for _ in range(3)]

    assert min(seconds) > 0
    assert state.lengths.tolist() == [540, 540]
    for sequence in range(2):
        np.testing.assert_array_equal(state.read(sequence), before[sequence])
