from __future__ import annotations

from typing import Any

import pytest

from la_export.checkpoint.features import check_context, check_features, check_supported
from la_runtime.errors import UnsupportedModelError, UsageError
from tests.tiny_models import FAMILIES, make_tiny_config

CONTEXT = 256


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass(family: str) -> None:
    check_supported(make_tiny_config(family), CONTEXT)


@pytest.mark.parametrize(
    ("model_type", "fields", "feature"),
    [
        ("gemma2", {"attn_logit_softcapping": 50.0}, "softcapped attention scores"),
        ("llama", {"final_logit_softcapping": 30.0}, "softcapped logits"),
        ("llama", {"attn_logit_softcap": 30.0}, r"softcapped scores \(attn_logit_softcap\)"),
        ("llama", {"logits_soft_cap": 5}, r"softcapped scores \(logits_soft_cap\)"),
        ("mixtral", {"num_local_experts": 8}, "a mixture of experts"),
        ("qwen3_moe", {"num_experts": 128}, "a mixture of experts"),
        ("deepseek_v3", {"n_routed_experts": 256}, "a mixture of experts"),
        ("minicpm3", {"kv_lora_rank": 256}, r"latent attention \(MLA\)"),
        ("falcon", {"alibi": True}, "ALiBi position biases"),
        ("t5", {"is_encoder_decoder": True}, "an encoder"),
        ("qwen2_vl", {"vision_config": {"depth": 2}}, "a vision tower"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantized with gptq"),
        ("gpt_neox", {}, "'gpt_neox' is not supported; supported are llama"),
        ("qwen", {"auto_map": {"AutoModel": "x"}}, "needs code from its repository"),
    ],
)
def test_unsupported_feature_is_refused_by_name(
    model_type: str, fields: dict[str, Any], feature: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=feature) as raised:
        check_features(model_type, fields)
    assert repr(model_type) in str(raised.value)
    assert "supported" in str(raised.value)


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope"])
def test_unsupported_rope_is_refused_by_name(kind: str) -> None:
    config = make_tiny_config()
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=f"rotary embedding of kind '{kind}'"):
        check_supported(config, CONTEXT)


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention"])
def test_other_kinds_of_layers_are_refused_by_name(kind: str) -> None:
    config = make_tiny_config("qwen3", layer_types=[kind, "full_attention"])
    with pytest.raises(UnsupportedModelError, match=f"layers of type {kind}"):
        check_supported(config, CONTEXT)


def test_windowed_layers_without_a_window_are_refused() -> None:
    config = make_tiny_config(
        "qwen3", layer_types=["sliding_attention", "full_attention"], sliding_window=None
    )
    with pytest.raises(UnsupportedModelError, match="sliding_attention without a sliding_window"):
        check_supported(config, CONTEXT)


@pytest.mark.parametrize("unset", [None, False, 0, 0.0])
def test_softcap_that_is_not_set_passes(unset: object) -> None:
    check_features("llama", {"attn_logit_softcapping": unset, "logits_soft_cap": unset})


def test_active_sliding_window_is_refused_with_the_context_that_would_do() -> None:
    config = make_tiny_config("mistral", sliding_window=64)
    with pytest.raises(UnsupportedModelError, match="sliding window of 64 tokens") as raised:
        check_supported(config, CONTEXT)
    assert "--context 64" in str(raised.value)


def test_window_as_wide_as_the_context_never_acts() -> None:
    check_supported(make_tiny_config("mistral", sliding_window=CONTEXT), CONTEXT)


def test_layers_with_an_active_window_are_refused() -> None:
    config = make_tiny_config(
        "qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1
    )
    with pytest.raises(UnsupportedModelError, match="active sliding window"):
        check_supported(config, CONTEXT)


def test_window_that_no_layer_uses_never_acts() -> None:
    config = make_tiny_config("qwen2", use_sliding_window=False, sliding_window=64)
    check_supported(config, CONTEXT)


def test_context_defaults_to_the_models_own() -> None:
    assert check_context(make_tiny_config(), None) == CONTEXT
    assert check_context(make_tiny_config(), 32) == 32


@pytest.mark.parametrize("context", [-1, 1, 257])
def test_context_out_of_range_is_refused(context: int) -> None:
    with pytest.raises(UsageError, match=f"--context {context} is out of range.*2 to 256"):
        check_context(make_tiny_config(), context)
