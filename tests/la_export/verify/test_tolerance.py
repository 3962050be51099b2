"""What arithmetic of a precision is allowed."""

from __future__ import annotations

import pytest

from la_export.options import Precision
from la_export.verify.tolerance import FP32, tolerance_of
from la_runtime.errors import NotRunError


@pytest.mark.parametrize(
    ("precision", "num_tokens", "allowed"),
    [
        ("fp32", 0, 1),
        ("fp32", 9_999, 1),
        ("fp32", 10_000, 2),
        ("fp32", 50_000, 10),
        ("fp16", 999, 1),
        ("fp16", 1_000, 2),
        ("bf16", 50_000, 100),
        ("int8", 50_000, 100),
        ("int4", 50_000, 100),
    ],
)
def test_one_token_in_5000_or_in_500_may_be_excused_and_one_always(precision, num_tokens, allowed):
    assert tolerance_of(precision).excuse_allowance(num_tokens) == allowed


@pytest.mark.parametrize(
    ("precision", "allowed"), [("fp32", 1), ("fp16", 2), ("int8", 250), ("int4", 2)]
)
def test_of_two_implementations_only_int8_is_allowed_more(precision, allowed):
    assert tolerance_of(precision).reference_allowance(1_000) == allowed


def test_fewer_bits_are_allowed_more_and_fp32_what_it_always_was():
    fp32, fp16, bf16 = (tolerance_of(precision) for precision in ("fp32", "fp16", "bf16"))

    assert fp32 == FP32
    assert (fp32.epsilon, fp32.logits, fp32.excused_share) == (1e-3, 1e-4, 1 / 5000)
    for bound in ("logits", "kl", "epsilon", "reference_epsilon", "perplexity"):
        assert getattr(fp32, bound) < getattr(fp16, bound) < getattr(bf16, bound)


@pytest.mark.parametrize("precision", list(Precision))
def test_no_precision_is_allowed_less_than_fp32(precision):
    tolerance = tolerance_of(precision)

    for bound in ("logits", "kl", "epsilon", "reference_epsilon", "perplexity", "departure"):
        assert getattr(tolerance, bound) >= getattr(FP32, bound)


def test_a_precision_of_a_later_version_is_not_verified():
    with pytest.raises(NotRunError, match="precision 'fp2' is none that can be verified"):
        tolerance_of("fp2")
