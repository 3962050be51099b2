from __future__ import annotations

import onnx

from la_export.doctor.operators import PORTABLE_OPERATORS


def operators(path) -> set[tuple[str, str]]:
    model = onnx.load(path, load_external_data=False)
    return {(node.domain, node.op_type) for node in model.graph.node}


def test_the_list_holds_every_operator_of_an_exported_graph(variant, report_of) -> None:
    report = report_of(variant)

    found = operators(report.bundle / report.manifest.graph)

    assert found <= {("", name) for name in PORTABLE_OPERATORS}


def test_the_list_is_sorted_and_holds_each_operator_once() -> None:
    assert list(PORTABLE_OPERATORS) == sorted(set(PORTABLE_OPERATORS))
