from __future__ import annotations

from typing import Any

import pytest

from la_export.checkpoint.features import (
    active_window,
    check_context,
    check_features,
    check_supported,
)
from la_runtime.errors import UnsupportedModelError, UsageError
from tests.tiny_models import FAMILIES, OTHER_FAMILIES, make_tiny_config

CONTEXT = 256


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES])
def test_supported_families_pass(family: str) -> None:
    check_supported(make_tiny_config(family))


@pytest.mark.parametrize(
    ("model_type", "fields", "feature"),
    [
        ("llama", {"attn_logit_softcapping": 5.0}, r"softcapped scores \(attn_logit_softcapping\)"),
        ("llama", {"final_logit_softcapping": 3.0}, r"softcapped scores \(final_logit_softcap"),
        ("llama", {"attn_logit_softcap": 30.0}, r"softcapped scores \(attn_logit_softcap\)"),
        ("llama", {"logits_soft_cap": 5}, r"softcapped scores \(logits_soft_cap\)"),
        ("mixtral", {"num_local_experts": 8}, "a mixture of experts"),
        ("olmoe", {"num_experts": 64}, "a mixture of experts"),
        ("deepseek_v3", {"n_routed_experts": 256}, "a mixture of experts"),
        ("minicpm3", {"kv_lora_rank": 256}, r"latent attention \(MLA\)"),
        ("falcon", {"alibi": True}, "ALiBi position biases"),
        ("gemma2", {"use_bidirectional_attention": True}, "attention to later tokens"),
        ("t5", {"is_encoder_decoder": True}, "an encoder"),
        ("qwen2_vl", {"vision_config": {"depth": 2}}, "a vision tower"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantized with gptq"),
        ("gpt2", {}, "'gpt2' is not supported; supported are cohere"),
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


def test_unknown_rope_is_refused_by_name() -> None:
    config = make_tiny_config()
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="rotary embedding of kind 'spiral'"):
        check_supported(config)


def test_tables_of_the_length_in_some_layers_alone_are_refused() -> None:
    config = make_tiny_config("gemma3_text")
    config.rope_parameters["full_attention"] |= {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="'dynamic' in some layers alone"):
        check_supported(config)


@pytest.mark.parametrize("family", ["llama", "granite", "olmo2"])
def test_a_window_that_a_family_s_code_does_not_read_is_none(family: str) -> None:
    config = make_tiny_config(family)
    config.sliding_window = 8
    assert active_window(config, CONTEXT) is None


def test_one_window_is_every_layer_s_whatever_they_are_called() -> None:
    config = make_tiny_config("mistral", sliding_window=8)
    config.layer_types = ["full_attention"] * 2
    assert active_window(config, CONTEXT) == 8


def test_rope_of_each_kind_of_layer_is_looked_at() -> None:
    config = make_tiny_config("gemma3_text")
    config.rope_parameters["sliding_attention"]["rope_type"] = "spiral"
    with pytest.raises(UnsupportedModelError, match="rotary embedding of kind 'spiral'"):
        check_supported(config)


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention"])
def test_other_kinds_of_layers_are_refused_by_name(kind: str) -> None:
    config = make_tiny_config("qwen3", layer_types=[kind, "full_attention"])
    with pytest.raises(UnsupportedModelError, match=f"layers of type {kind}"):
        check_supported(config)


def test_windowed_layers_without_a_window_are_refused() -> None:
    config = make_tiny_config(
        "qwen3", layer_types=["sliding_attention", "full_attention"], sliding_window=None
    )
    with pytest.raises(UnsupportedModelError, match="sliding_attention without a sliding_window"):
        check_supported(config)


@pytest.mark.parametrize("unset", [None, False, 0, 0.0])
def test_softcap_that_is_not_set_passes(unset: object) -> None:
    check_features("llama", {"attn_logit_softcapping": unset, "logits_soft_cap": unset})


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_families_whose_own_code_caps_scores_pass(family: str) -> None:
    check_features(family, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0})


def test_a_window_acts_in_a_longer_context_alone() -> None:
    config = make_tiny_config("mistral", sliding_window=64)
    assert [active_window(config, context) for context in (63, 64, 65)] == [None, None, 64]


def test_a_window_of_some_layers_acts() -> None:
    config = make_tiny_config(
        "qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1
    )
    assert active_window(config, CONTEXT) == 64


def test_window_that_no_layer_uses_never_acts() -> None:
    config = make_tiny_config("qwen2", use_sliding_window=False, sliding_window=64)
    assert active_window(config, CONTEXT) is None


def test_context_defaults_to_the_models_own() -> None:
    assert check_context(make_tiny_config(), None) == CONTEXT
    assert check_context(make_tiny_config(), 32) == 32


def test_frequencies_of_the_length_take_as_much_more_as_they_say() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = make_tiny_config(rope_parameters=rope)
    assert check_context(config, None) == CONTEXT
    assert check_context(config, 2 * CONTEXT) == 2 * CONTEXT
    with pytest.raises(UsageError, match="2 to 512"):
        check_context(config, 2 * CONTEXT + 1)


@pytest.mark.parametrize("context", [-1, 1, 257])
def test_context_out_of_range_is_refused(context: int) -> None:
    with pytest.raises(UsageError, match=f"--context {context} is out of range.*2 to 256"):
        check_context(make_tiny_config(), context)
