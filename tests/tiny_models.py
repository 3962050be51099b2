"""Tiny random models and tokenizers: real Hugging Face folders, made in well under a second.

Every maker is seeded, touches no network and is usable outside pytest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from la_export.options import DEFAULT_PREFILL_CHUNK, Precision
from la_runtime.contract import CacheForm

__all__ = [
    "CHAT_TEMPLATE",
    "END_TOKEN",
    "FAMILIES",
    "OTHER_FAMILIES",
    "VOCAB_SIZE",
    "build_tiny_bundle",
    "make_tiny_checkpoint",
    "make_tiny_config",
    "make_tiny_model",
    "make_tiny_tokenizer",
]

VOCAB_SIZE: Final = 320
END_TOKEN: Final = "<|im_end|>"
FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", END_TOKEN)
_TRAINING_TEXT: Final = (
    "The cat sat on the mat and the dog sat on the log.",
    "A model predicts the next token, and then the next token after that.",
    "One, two, three; the rain in Spain stays mainly in the plain.",
)
_CONFIG_TYPES: Final[dict[str, type[PreTrainedConfig]]] = {
    "cohere": CohereConfig,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
    "gpt_neox": GPTNeoXConfig,
    "granite": GraniteConfig,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "olmo2": Olmo2Config,
    "phi3": Phi3Config,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "smollm3": SmolLM3Config,
    "stablelm": StableLmConfig,
}
_WINDOW: Final = 8
# What makes a family different, switched on.
_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "cohere": {"logit_scale": 0.5, "tie_word_embeddings": True},
    # Windows in every other layer.
    "gemma2": {"sliding_window": _WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3_text": {
        "sliding_window": _WINDOW,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 256},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    # No rotation in every other layer.
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {"use_qkv_bias": True},
}
OTHER_FAMILIES: Final = tuple(sorted(_CONFIG_TYPES.keys() - set(FAMILIES)))


def make_tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `VOCAB_SIZE` tokens, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in _SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    return tokenizer


def make_tiny_config(family: str = "llama", **overrides: Any) -> PreTrainedConfig:
    """A two-layer configuration with grouped-query attention, but for GPT-NeoX, which has none.

    Args:
        family: one of `FAMILIES` or `OTHER_FAMILIES`.
        overrides: configuration fields to change.
    """
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "gpt_neox":  # which has no such fields
        del fields["num_key_value_heads"], fields["head_dim"]
    return _CONFIG_TYPES[family](**(fields | _FIELDS.get(family, {}) | overrides))


def make_tiny_model(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """A float32 model with random weights; norms and biases are random too, so none is inert."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
    model.eval()
    return model


def make_tiny_checkpoint(
    folder: Path, family: str = "llama", seed: int = 0, **overrides: Any
) -> Path:
    """Write a Hugging Face folder: config, safetensors weights, tokenizer, chat template.

    Args:
        folder: where to write; made when missing.
        family: one of `FAMILIES`.
        seed: seed of the random weights.
        overrides: configuration fields to change.

    Returns:
        `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    make_tiny_model(make_tiny_config(family, **overrides), seed=seed).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tiny_tokenizer(),
        bos_token="<|im_start|>",
        eos_token=END_TOKEN,
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def build_tiny_bundle(
    folder: Path,
    family: str = "llama",
    *,
    lookahead_lengths: tuple[int, ...] = (2, 4),
    precision: Precision | str = Precision.FP32,
    cache_form: CacheForm = CacheForm.CONCAT,
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Make a tiny checkpoint in `folder`/checkpoint and build it into `folder`/bundle.

    Returns:
        The bundle's folder.
    """
    from la_export.pipeline import BuildOptions, build

    checkpoint = make_tiny_checkpoint(folder / "checkpoint", family, seed, **overrides)
    options = BuildOptions(
        model=str(checkpoint),
        lookahead_lengths=lookahead_lengths,
        precision=Precision(precision),
        cache_form=cache_form,
        prefill_chunk=prefill_chunk,
        out=folder / "bundle",
    )
    return build(options).bundle
