from __future__ import annotations

import pytest

from la_export.bench.gpu.ceiling import find_listed_bandwidth, least_step_ms
from la_export.bench.gpu.shapes import LLAMA_7B, SMOLLM2_135M


def test_a_7b_in_16_bits_on_an_h200_takes_at_least_2_8_ms_a_step() -> None:
    bandwidth = find_listed_bandwidth("NVIDIA H200")
    assert bandwidth is not None

    assert least_step_ms(2 * LLAMA_7B.num_read, bandwidth) == pytest.approx(2.75, abs=0.01)


def test_the_whole_name_counts() -> None:
    assert find_listed_bandwidth("NVIDIA H100 PCIe") == 2.0e12
    assert find_listed_bandwidth("NVIDIA H100 80GB HBM3") == 3.35e12
    assert find_listed_bandwidth("NVIDIA L40") == 0.864e12
    assert find_listed_bandwidth("NVIDIA L4") == 0.3e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA T400 4GB",
        "NVIDIA H200 MIG 1g",
    ],
)
def test_a_gpu_whose_name_only_resembles_a_listed_one_is_not_listed(name: str) -> None:
    assert find_listed_bandwidth(name) is None


def test_what_a_step_reads_is_all_but_an_untied_embedding_table() -> None:
    assert SMOLLM2_135M.num_read == 134_515_008  # the parameters of the model, tied
    assert LLAMA_7B.num_read + 32_000 * 4096 == 6_738_415_616  # those of the model, untied
    assert 2 * LLAMA_7B.kv_per_token == 512 * 1024
