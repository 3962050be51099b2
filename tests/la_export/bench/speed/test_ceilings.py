from __future__ import annotations

from pathlib import Path

import pytest

from la_export.bench.speed.ceilings import measure_rates, step_cost
from la_export.bench.speed.record import MachineRates
from la_runtime.bundle import Manifest, read_manifest

RATES = MachineRates(
    bandwidth_bytes_per_s=1000.0,
    gemm_rows=32,
    float_operations_per_s=100.0,
    integer_operations_per_s=400.0,
    samples=3,
)


@pytest.fixture(scope="module")
def manifest(tiny: Path) -> Manifest:
    return read_manifest(tiny)


def _operations(manifest: Manifest, **wanted: int) -> float:
    return step_cost(manifest, RATES, weight_bytes=0, **wanted).operations_s * 100.0


def test_reading_the_weights_takes_their_bytes_over_the_bandwidth(manifest: Manifest) -> None:
    cost = step_cost(manifest, RATES, weight_bytes=5000, rows=1, scored_rows=1, past=0)

    assert cost.weights_s == 5.0
    assert cost.ceiling_s == max(5.0, cost.operations_s)


def test_operations_of_a_row_are_two_for_each_weight_it_meets(manifest: Manifest) -> None:
    # The tiny model: hidden size 64, inner 96, 4 heads of 16 over 2 of keys, vocabulary 320.
    norms = 5 * 64
    layer = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96
    attention = 2 * 2 * (4 * 16)  # a key and a value of the row itself, two layers

    found = _operations(manifest, rows=1, scored_rows=1, past=0)

    assert found == pytest.approx(2 * (2 * layer + norms + 64 * 320 + attention))


def test_the_head_counts_for_scored_rows_only_and_attention_for_every_key(
    manifest: Manifest,
) -> None:
    some = _operations(manifest, rows=9, scored_rows=5, past=100)

    head = _operations(manifest, rows=9, scored_rows=9, past=100) - some
    attention = _operations(manifest, rows=9, scored_rows=5, past=101) - some
    assert head == pytest.approx(2 * 4 * 64 * 320)
    assert attention == pytest.approx(2 * 9 * 2 * 2 * 64)


def test_a_tied_head_is_among_the_parameters_once(manifest: Manifest) -> None:
    model = manifest.model
    tied = manifest.model_copy(
        update={
            "model": model.model_copy(
                update={
                    "tied_embeddings": True,
                    "num_parameters": model.num_parameters - 64 * 320,
                }
            )
        }
    )

    wanted = {"rows": 3, "scored_rows": 2, "past": 10}
    assert _operations(tied, **wanted) == pytest.approx(_operations(manifest, **wanted))


def test_integers_are_multiplied_at_their_own_rate(manifest: Manifest) -> None:
    integer = manifest.model_copy(update={"precision": "int8"})

    costs = [
        step_cost(some, RATES, weight_bytes=0, rows=1, scored_rows=1, past=0).operations_s
        for some in (manifest, integer)
    ]

    assert costs[0] == pytest.approx(4 * costs[1])


def test_the_machine_multiplies_bytes_no_slower_than_it_could_read_them() -> None:
    rates = measure_rates(threads=1)

    # 32 rows reuse each weight they read 32 times: no machine is that unbalanced.
    assert rates.integer_operations_per_s > rates.bandwidth_bytes_per_s
    assert min(rates.float_operations_per_s, rates.bandwidth_bytes_per_s) > 0
