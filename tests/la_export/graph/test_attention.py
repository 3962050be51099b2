from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from la_export.graph.attention import attention_forward
from la_runtime.errors import UnsupportedModelError


def _inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    query = torch.randn(2, 4, 3, 8)
    key, value = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.where(torch.rand(2, 1, 3, 5) < 0.3, -1e9, 0.0)
    mask[..., 0] = 0.0
    return query, key, value, mask


def test_grouped_attention_equals_pytorch() -> None:
    query, key, value, mask = _inputs()
    found, _ = attention_forward(torch.nn.Identity(), query, key, value, mask, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(2, dim=1),
        value.repeat_interleave(2, dim=1),
        attn_mask=mask,
        scale=0.3,
    )
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_capped_scores_are_eager_attention_s() -> None:
    query, key, value, mask = _inputs()
    found, _ = attention_forward(
        torch.nn.Identity(), query, key, value, mask, scaling=0.3, softcap=0.7
    )

    layer = torch.nn.Identity()
    layer.num_key_value_groups = query.shape[1] // key.shape[1]  # type: ignore[assignment]
    expected, _ = eager_attention_forward(layer, query, key, value, mask, scaling=0.3, softcap=0.7)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("feature", ["s_aux", "something_new"])
def test_unknown_feature_is_refused_by_name(feature: str) -> None:
    features: dict[str, Any] = {feature: 4.0}
    with pytest.raises(UnsupportedModelError, match=f"attention feature {feature}"):
        attention_forward(torch.nn.Identity(), *_inputs(), 0.3, **features)


def test_feature_that_is_off_passes() -> None:
    found, _ = attention_forward(
        torch.nn.Identity(), *_inputs(), 0.3, sliding_window=None, dropout=0.0
    )
    expected, _ = attention_forward(torch.nn.Identity(), *_inputs(), 0.3)
    torch.testing.assert_close(found, expected)
