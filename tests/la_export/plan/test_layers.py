from __future__ import annotations

import pytest

from la_export.plan.layers import LayerCounts, count_layers

MESSAGE = """Layers:
Name: __mye6822_0_myl0_0, LayerType: shape_call, Inputs: [], Outputs: [], Metadata:
Name: _gemm_mha_v2_myl0_5, LayerType: kgen, Inputs: [ { Name: _gemm_mha_v2_in }]
Name: node_linear_2+node_linear_1_myl0_3, LayerType: gemm, Inputs: [ { Name: mul.1 }], Outputs: []
Name: _gemm_mha_v2_myl0_17, LayerType: kgen, Inputs: [], Outputs: []
Name: _gemv_mha_v1_myl1_5, LayerType: kgen, Inputs: [], Outputs: []

I/O Tensors:
 Name: input_ids, IOMode: Input, DataType: Int64, Dimensions: [-1,-1]
"""


def _message(*names: str) -> str:
    return "Layers:\n" + "".join(f"Name: {name}, LayerType: kgen, Inputs: []\n" for name in names)


def test_layers_and_fused_attentions_are_counted_by_profile() -> None:
    assert count_layers(MESSAGE, num_profiles=2) == LayerCounts(
        num_layers=5, fused_attentions=(2, 1)
    )


def test_profile_without_fused_attention_counts_none() -> None:
    assert count_layers(MESSAGE, num_profiles=3).fused_attentions == (2, 1, 0)


def test_profiles_that_are_named_are_taken_by_name() -> None:
    """Two graphs of a profile are numbered then, and both profiles from 0 on."""
    names = [f"_gemm_mha_v2_myl{graph}_{i}" for graph in range(2) for i in range(3)]

    found = count_layers(
        _message(*names, *(f"{name} [profile 1]" for name in names)), num_profiles=2
    )

    assert found == LayerCounts(num_layers=12, fused_attentions=(6, 6))


@pytest.mark.parametrize(
    "names",
    [
        ["fmha_v2_flash_attention_fp16_myl0_1", "node_linear_2_myl0_3"],  # a kernel nobody knows
        ["_gemm_mha_v2_myl0_1", "_gemm_mha_v2_myl3_1"],  # more graphs than profiles
        [],
    ],
)
def test_what_the_names_do_not_tell_is_unknown(names: list[str]) -> None:
    found = count_layers(_message(*names), num_profiles=2)

    assert found == LayerCounts(num_layers=len(names), fused_attentions=None)
