"""What a build can be asked for."""

from __future__ import annotations

import pytest

from la_export.options import BuildOptions, Precision
from la_runtime.contract import CacheForm
from la_runtime.errors import UsageError


def test_precision_and_cache_form_may_be_given_by_name() -> None:
    options = BuildOptions(
        model="x",
        lookahead_lengths=(2,),
        precision="fp16",  # type: ignore[arg-type]
        cache_form="scatter",  # type: ignore[arg-type]
    )

    assert options.precision is Precision.FP16
    assert options.cache_form is CacheForm.SCATTER


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("precision", "--precision 'fp8' is not known; expected one of: fp32, fp16, bf16"),
        ("cache_form", "--cache-form 'fp8' is not known; expected one of: concat, scatter"),
    ],
)
def test_other_names_are_refused(field: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BuildOptions(model="x", lookahead_lengths=(2,), **{field: "fp8"})  # type: ignore[arg-type]
