"""What arithmetic of a precision is allowed."""

from __future__ import annotations

import pytest

from la_export.verify.tolerance import FP32, tolerance_of
from la_runtime.contract import Contract, Dtype


def tolerance(dtype: Dtype):
    return tolerance_of(
        Contract(
            num_layers=1,
            num_kv_heads=1,
            head_dim=4,
            hidden_size=4,
            vocab_size=16,
            k_max=1,
            top_c=8,
            compute_dtype=dtype,
            kv_dtype=dtype,
        )
    )


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "allowed"),
    [
        (Dtype.FLOAT32, 0, 1),
        (Dtype.FLOAT32, 9_999, 1),
        (Dtype.FLOAT32, 10_000, 2),
        (Dtype.FLOAT32, 50_000, 10),
        (Dtype.FLOAT16, 999, 1),
        (Dtype.FLOAT16, 1_000, 2),
        (Dtype.BFLOAT16, 50_000, 100),
    ],
)
def test_one_token_in_5000_or_in_500_may_be_excused_and_one_always(dtype, num_tokens, allowed):
    assert tolerance(dtype).excuse_allowance(num_tokens) == allowed


def test_fewer_bits_are_allowed_more_and_fp32_what_it_always_was():
    fp32, fp16, bf16 = (
        tolerance(dtype) for dtype in (Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16)
    )

    assert fp32 == FP32
    assert (fp32.epsilon, fp32.logits, fp32.excused_share) == (1e-3, 1e-4, 1 / 5000)
    for bound in ("logits", "kl", "epsilon", "reference_epsilon", "perplexity"):
        assert getattr(fp32, bound) < getattr(fp16, bound) < getattr(bf16, bound)
