from __future__ import annotations

from collections.abc import Callable

import pytest

from la_export.bench.ort_options import COMPARISONS, Comparison, compare_option
from la_export.options import Precision
from la_export.pipeline import BuildReport
from la_runtime.bundle import Bundle, open_bundle
from la_runtime.contract import CacheForm
from tests.processors import saturates

BASIC = "optimization level basic"
ROUNDS_TO_INT8 = "int4 products at accuracy level 4"
# Sums in another order, on logits of a range of 6.
FLOAT_TOLERANCE = 1e-4


@pytest.fixture
def bundle(report_of: Callable[..., BuildReport]) -> Bundle:
    form = (Precision.INT4, CacheForm.CONCAT)
    return open_bundle(report_of(("llama", True), form).bundle)


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda entry: entry.option)
def test_only_the_level_that_rounds_activations_changes_what_is_computed(
    bundle: Bundle, comparison: Comparison
) -> None:
    found = compare_option(bundle, comparison, threads=1, rounds=1, past=16)
    difference = found.pop("logits")
    assert isinstance(difference, float)
    # The head is int8; without VNNI what keeps it exact is an optimization of a higher level.
    is_saturated = saturates() and comparison.option == BASIC
    is_different = is_saturated or comparison.option == ROUNDS_TO_INT8
    assert (difference > FLOAT_TOLERANCE) == is_different
    assert list(found) == ["rows_1", "rows_9", "rows_17", "rows_25"]
