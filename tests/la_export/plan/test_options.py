from __future__ import annotations

from typing import Any

import pytest

from la_export.plan.options import PlanOptions
from la_runtime.errors import UsageError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_batch": 0}, "--max-batch must be at least 1, got 0"),
        ({"prefill_chunk": 0}, "--prefill-chunk must be at least 1, got 0"),
        ({"workspace_bytes": -1}, "--workspace must be at least 1, got -1"),
        ({"optimization_level": 6}, "--opt-level must be from 0 to 5, got 6"),
        ({"compute_capabilities": ("8.9",)}, "--compute-capability '8.9' is none; expected one"),
    ],
)
def test_value_out_of_range_is_refused_by_the_name_of_its_option(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        PlanOptions(**given)


def test_gpu_that_is_named_twice_is_built_for_once() -> None:
    options = PlanOptions(compute_capabilities=("SM89", "SM120", "SM89"))

    assert options.compute_capabilities == ("SM89", "SM120")
