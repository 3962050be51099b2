"""The noise that draws a token."""

from __future__ import annotations

import math

import numpy as np
import pytest

from la_runtime.noise import LUCK, find_lucky, gumbel_noise


def test_noise_depends_on_seed_position_and_token_alone():
    ids = np.arange(1000)
    noise = gumbel_noise(5, 7, ids)

    assert np.array_equal(gumbel_noise(5, 7, ids[[3, 500, 999]]), noise[[3, 500, 999]])
    assert np.isfinite(noise).all()
    for other in (gumbel_noise(6, 7, ids), gumbel_noise(5, 8, ids)):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.15
    assert np.isfinite(gumbel_noise(-1, 0, ids)).all()


def slow_mix(value):
    """splitmix64's finalizer in unbounded integers."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


@pytest.mark.parametrize("seed", [0, 5, 133, 2**63 + 7, 2**64 + 5, -1])
@pytest.mark.parametrize("position", [0, 1, 4095])
def test_noise_equals_its_definition_in_unbounded_integers(seed, position):
    ids = np.asarray([0, 1, 2, 9, 49151])

    state = slow_mix(slow_mix(seed % 2**64) ^ position)
    uniform = [((slow_mix(state ^ slow_mix(int(i))) >> 12) + 0.5) / 2**52 for i in ids]
    expected = [-math.log(-math.log(u)) for u in uniform]
    np.testing.assert_allclose(gumbel_noise(seed, position, ids), expected, rtol=1e-12)


def test_the_smallest_and_the_largest_hash_have_finite_noise(monkeypatch):
    """Hashes of no ones and of ones alone stand for 2**-53 and 1 - 2**-53."""
    monkeypatch.setattr("la_runtime.noise.mix", np.zeros_like)
    assert gumbel_noise(0, 0, np.arange(2)) == pytest.approx([-math.log(53 * math.log(2))] * 2)

    monkeypatch.setattr("la_runtime.noise.mix", lambda x: np.full_like(x, 2**64 - 1))
    assert gumbel_noise(0, 0, np.arange(2)) == pytest.approx([53 * math.log(2)] * 2)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 4095), (-1, 12), (2**64 + 5, 3)])
@pytest.mark.parametrize("vocab_size", [1, 300, 20_000])
def test_lucky_are_the_tokens_of_much_noise(seed, position, vocab_size):
    noise = gumbel_noise(seed, position, np.arange(vocab_size))

    found = find_lucky(seed, position, vocab_size)

    assert found.ids.tolist() == np.flatnonzero(noise >= LUCK).tolist()
    assert found.noise.tolist() == noise[found.ids].tolist()
    assert vocab_size < 20_000 or len(found.ids) > 20


def test_what_is_remembered_of_luck_cannot_be_written():
    lucky = find_lucky(1, 2, 20_000)

    for array in (lucky.ids, lucky.noise):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
