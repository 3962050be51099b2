"""Traces transformers' own decoder code into a `StepGraph`, under fake tensors.

Nothing of the model's size is ever allocated: parameters are fake, and their real values join
later, one at a time.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from la_export.adapter import NO_ADAPTER, Adapter
from la_export.checkpoint.rotary import fix_rotary
from la_export.checkpoint.tensors import TORCH_DTYPES
from la_export.graph.attention import ATTENTION_NAME, register_attention
from la_export.graph.experts import EXPERTS_NAME, register_experts
from la_export.graph.passes.constant_reshapes import make_reshapes_constant
from la_export.graph.passes.contract_names import name_by_contract
from la_export.graph.passes.fusion import fuse_norms_and_rotary
from la_export.graph.passes.initializers import initializers_to_inputs
from la_export.graph.passes.integer_blocks import hold_in_blocks
from la_export.graph.passes.integer_products import multiply_in_integers
from la_export.graph.passes.integer_table import look_up_integers
from la_export.graph.passes.lookahead_adapter import add_adapter
from la_export.graph.passes.merged_projections import merge_projections
from la_export.graph.passes.metadata import strip_metadata
from la_export.graph.passes.more_rotary import fuse_more_rotary
from la_export.graph.passes.rotated_inputs import find_inputs, turn_inputs
from la_export.graph.passes.simplify import simplify
from la_export.graph.passes.stored_products import head_products, layer_products
from la_export.graph.passes.tied_head import share_tied_head
from la_export.graph.passes.weight_transposes import store_weights_transposed
from la_export.graph.step import DecoderStep
from la_export.graph.step_graph import OPSET_VERSIONS, StepGraph
from la_export.options import Precision
from la_export.quantize.rotation import Rotation
from la_runtime.contract import Axis, Contract, Name, TensorSpec

__all__ = ["optimize_graph", "trace_model"]

# Sizes of the example inputs: all different, so that tracing cannot take two axes for one.
_EXAMPLE_SIZES: Final = {Axis.BATCH: 2, Axis.BLOCK: 5, Axis.PAST: 7, Axis.KEYS: 12, Axis.ROWS: 3}


def trace_model(
    config: PreTrainedConfig, contract: Contract, *, context: int | None = None
) -> StepGraph:
    """Trace one step of a model of this configuration.

    Args:
        config: a supported configuration, with inactive windows removed.
        contract: inputs and outputs that the graph will have.
        context: positions it will serve; those the model was made for when not given.

    Returns:
        The graph as traced: every weight an input, names by the contract.
    """
    register_attention()
    register_experts()
    with FakeTensorMode(), _quiet_exporter():
        model = AutoModelForCausalLM.from_config(
            _with_experts(config),
            dtype=TORCH_DTYPES[contract.compute_dtype],
            attn_implementation=ATTENTION_NAME,
        ).eval()
        fix_rotary(model, config, context or config.max_position_embeddings)
        step = DecoderStep(model, contract)
        with torch.no_grad():
            exported = torch.export.export(
                step,
                tuple(_example(spec) for spec in contract.inputs),
                dynamic_shapes=_dynamic_shapes(contract),
                strict=False,
            )
        program = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=OPSET_VERSIONS[contract.cache_form],
            optimize=False,
            verbose=False,
            input_names=[str(spec.name) for spec in contract.inputs],
            output_names=[str(spec.name) for spec in contract.outputs],
        )
    assert program is not None, "torch.onnx.export returned no program"
    return initializers_to_inputs(program.model, contract, _parameter_names(model))


def optimize_graph(
    step_graph: StepGraph,
    precision: Precision,
    rotation: Rotation | None = None,
    adapter: Adapter = NO_ADAPTER,
) -> None:
    """Run every pass, in the one order in which they work.

    Args:
        step_graph: as traced.
        precision: what its weights are to be held in.
        rotation: that its weights will have gone through; of an integer precision.
        adapter: of lookahead rows.
    """
    simplify(step_graph)
    fuse_norms_and_rotary(step_graph)
    fuse_more_rotary(step_graph)
    make_reshapes_constant(step_graph)
    simplify(step_graph)
    if not precision.is_integer:
        share_tied_head(step_graph)
    store_weights_transposed(step_graph)
    if precision.is_integer:
        merge_projections(step_graph)
    add_adapter(step_graph, adapter)
    if precision.is_integer:
        look_up_integers(step_graph)
        _hold_in_integers(step_graph, precision, rotation)
    simplify(step_graph)
    name_by_contract(step_graph)
    strip_metadata(step_graph)


def _hold_in_integers(
    step_graph: StepGraph, precision: Precision, rotation: Rotation | None
) -> None:
    """A head multiplies int8 in both: its rows are few and its table is the largest weight."""
    layers, head = layer_products(step_graph), head_products(step_graph)
    turned = {} if rotation is None else find_inputs(step_graph, rotation, layers=layers, head=head)
    if precision is Precision.INT8:
        multiply_in_integers(step_graph, [*layers, *head])
    else:
        hold_in_blocks(step_graph, layers)
        multiply_in_integers(step_graph, head)
    if rotation is not None:
        turn_inputs(step_graph, turned, rotation)


def _with_experts(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration, its mixture of experts computed as `experts` does."""
    if getattr(config, "num_experts", None) is not None:
        config = copy.deepcopy(config)
        config._experts_implementation = EXPERTS_NAME
    return config


def _example(spec: TensorSpec) -> torch.Tensor:
    sizes = [axis if isinstance(axis, int) else _EXAMPLE_SIZES[axis] for axis in spec.axes]
    return torch.zeros(sizes, dtype=TORCH_DTYPES[spec.dtype])


def _dynamic_shapes(contract: Contract) -> tuple[object, ...]:
    """One shared symbol per axis; the cache's tensors arrive through ``*cache_inputs``."""
    symbols = {axis: torch.export.Dim(axis.value) for axis in Axis}
    shapes = [
        {place: symbols[axis] for place, axis in enumerate(spec.axes) if not isinstance(axis, int)}
        for spec in contract.inputs
    ]
    num_fixed = 1 + [spec.name for spec in contract.inputs].index(Name.LOGITS_ROWS)
    return (*shapes[:num_fixed], tuple(shapes[num_fixed:]))


def _parameter_names(model: PreTrainedModel) -> frozenset[str]:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return frozenset([*names, *(name for name, _ in model.named_buffers())])


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Keep the exporter's remarks about its own internals away from the user."""
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    exporter_log.setLevel(max(level, logging.ERROR))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        exporter_log.setLevel(level)
