from __future__ import annotations

import onnx

from la_export.doctor.operators import PORTABLE_OPERATORS
from la_export.graph.export import optimize_graph, trace_model
from la_export.options import Precision
from la_runtime.contract import CacheForm, Contract, Dtype
from tests.tiny_models import make_tiny_config

CONTRACT = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "vocab_size": 320,
    "k_max": 2,
    "top_c": 8,
}
KNOWN = {("", name) for name in PORTABLE_OPERATORS}


def operators_of_a_trace(dtype: Dtype, cache_form: CacheForm) -> set[tuple[str, str]]:
    capacity = 300 if cache_form is CacheForm.SCATTER else None
    contract = Contract(
        **CONTRACT, compute_dtype=dtype, kv_dtype=dtype, cache_form=cache_form, capacity=capacity
    )
    step_graph = trace_model(make_tiny_config(), contract)
    precision = next(p for p in Precision if p.dtype is dtype)
    optimize_graph(step_graph, precision)
    return {(node.domain, node.op_type) for node in step_graph.graph}


def test_the_list_holds_every_operator_of_an_exported_graph(variant, report_of) -> None:
    report = report_of(variant)

    model = onnx.load(report.bundle / report.manifest.graph, load_external_data=False)

    assert {(node.domain, node.op_type) for node in model.graph.node} <= KNOWN


def test_the_list_is_that_of_both_cache_forms_and_of_halves() -> None:
    """One family is enough: which operators a family has depends on neither."""
    found = operators_of_a_trace(Dtype.FLOAT32, CacheForm.CONCAT)
    found |= operators_of_a_trace(Dtype.FLOAT16, CacheForm.SCATTER)
    found |= operators_of_a_trace(Dtype.BFLOAT16, CacheForm.CONCAT)

    assert found <= KNOWN
    assert ("", "TensorScatter") in found


def test_no_operator_of_the_list_is_in_no_graph(checkpoint_of, report_of) -> None:
    """Doctor asks for no operator in vain: a tied and an untied model have all but the scatter."""
    found = {("", "TensorScatter")}
    for variant in (("llama", True), ("qwen2", True)):
        report = report_of(variant)
        model = onnx.load(report.bundle / report.manifest.graph, load_external_data=False)
        found |= {(node.domain, node.op_type) for node in model.graph.node}

    assert found == KNOWN


def test_the_list_is_sorted_and_holds_each_operator_once() -> None:
    assert list(PORTABLE_OPERATORS) == sorted(set(PORTABLE_OPERATORS))
