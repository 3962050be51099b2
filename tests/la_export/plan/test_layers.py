from __future__ import annotations

from la_export.plan.layers import LayerCounts, count_layers

MESSAGE = """Layers:
Name: __mye6822_0_myl0_0, LayerType: shape_call, Inputs: [], Outputs: [], Metadata:
Name: _gemm_mha_v2_myl0_5, LayerType: kgen, Inputs: [ { Name: _gemm_mha_v2_in }]
Name: node_linear_2+node_linear_1_myl0_3, LayerType: gemm, Inputs: [ { Name: mul.1 }], Outputs: []
Name: _gemm_mha_v2_myl0_17, LayerType: kgen, Inputs: [], Outputs: []
Name: _gemm_mha_v2_myl1_5, LayerType: kgen, Inputs: [], Outputs: []

I/O Tensors:
 Name: input_ids, IOMode: Input, DataType: Int64, Dimensions: [-1,-1]
"""


def test_layers_and_fused_attentions_are_counted_by_profile() -> None:
    assert count_layers(MESSAGE, num_profiles=2) == LayerCounts(
        num_layers=5, fused_attentions=(2, 1)
    )


def test_profile_without_fused_attention_counts_none() -> None:
    assert count_layers(MESSAGE, num_profiles=3).fused_attentions == (2, 1, 0)
