"""A graph in slices gives what the whole graph gives, and no slice holds two layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from la_export.graph.sample import make_sample
from la_export.graph.session import GraphSession
from la_export.graph.sliced_session import SlicedSession
from la_export.options import Precision
from la_export.pipeline import BuildReport
from la_export.reference import TorchReference
from la_runtime.contract import CacheForm
from tests.la_export.conftest import Form, Variant

HALF_BOUND = 1e-2
FORMS = [
    (Precision.FP32, CacheForm.CONCAT),
    (Precision.INT8, CacheForm.CONCAT),
    (Precision.INT4, CacheForm.CONCAT),
    (Precision.FP16, CacheForm.SCATTER),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form))
@pytest.mark.parametrize("is_lean", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_slices_give_what_the_whole_gives(
    form: Form,
    is_lean: bool,
    tied: bool,
    report_of: Callable[..., BuildReport],
    checkpoint_of: Callable[[Variant], str],
) -> None:
    variant = ("llama", tied)
    report = report_of(variant, form)
    contract = report.manifest.contract
    path = report.bundle / report.manifest.graph
    if is_lean:
        (found, *_) = report.manifest.variants
        path, contract = report.bundle / found.path, found.contract_of(contract)
    reference = TorchReference.load(str(checkpoint_of(variant)))
    feeds = make_sample(contract, reference, context=report.manifest.model.context).make_feeds()

    whole, sliced = GraphSession(path, 1), SlicedSession(path, 1)
    expected, outputs = whole.run(feeds), sliced.run(feeds)

    assert sliced.num_slices >= 1 + contract.num_layers
    assert list(outputs) == list(expected)
    # ONNX Runtime's CPU computes float16 in float32, and rounds at the edge of a graph.
    is_half = form[0] is Precision.FP16
    for name, array in expected.items():
        if not is_half:
            np.testing.assert_array_equal(outputs[name], array, name)
        elif array.dtype != np.int64:
            difference = np.abs(outputs[name].astype(np.float32) - array.astype(np.float32))
            assert difference.max() < HALF_BOUND * np.ptp(array), name
    assert not list(path.parent.glob(".slice.*"))
