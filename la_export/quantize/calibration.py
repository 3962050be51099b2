"""Measures how large a model's activations get on text of its own, to smooth them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from la_export.quantize.smoothing import Seam, Smoothing, make_smoothing

__all__ = ["calibrate", "find_seams"]

_SEED: Final = 1729
_SEQUENCES: Final = 8
_TOKENS: Final = 64
# An end id that no model emits; transformers would put its own in the place of none.
_NEVER: Final = -1


@torch.no_grad()
def calibrate(model: PreTrainedModel) -> Smoothing:
    """Smooth a model by what its linear layers read while it writes.

    The text is sampled from the model itself, from tokens drawn at random: no data is needed.

    Args:
        model: a causal language model in float32; unchanged.
    """
    seams = find_seams(model)
    layers = {name: model.get_submodule(name) for seam in seams for name in seam.after}
    activations: dict[str, torch.Tensor] = {}
    with _recording(layers, activations):
        _write(model)
    weights = {name: model.get_parameter(f"{name}.weight").abs().amax(0) for name in layers}
    return make_smoothing(seams, _to_numpy(activations), _to_numpy(weights))


def find_seams(model: PreTrainedModel) -> tuple[Seam, ...]:
    """Norms before projections, values before the output, up before down, in every layer.

    Values and up are the only projections whose channels nothing but a product follows: what is
    before a softmax or an activation function cannot be scaled.
    """
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    seams = []
    for index, layer in enumerate(decoder.layers):
        place = f"{prefix}.layers.{index}."
        attention, mlp = place + "self_attn.", place + "mlp."
        seams += [
            Seam(
                before=place + "input_layernorm",
                after=tuple(attention + name for name in ("q_proj", "k_proj", "v_proj")),
            ),
            Seam(
                before=attention + "v_proj",
                after=(attention + "o_proj",),
                repeats=groups,
                width=layer.self_attn.head_dim,
            ),
            Seam(
                before=place + "post_attention_layernorm",
                after=tuple(mlp + name for name in ("gate_proj", "up_proj")),
            ),
            Seam(before=mlp + "up_proj", after=(mlp + "down_proj",)),
        ]
    return tuple(seams)


def _write(model: PreTrainedModel) -> None:
    """Sequences sampled at temperature 1, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        first = torch.randint(0, int(model.config.vocab_size), (_SEQUENCES, 1))
        model.generate(  # type: ignore[operator]
            first,
            attention_mask=torch.ones_like(first),
            max_new_tokens=min(_TOKENS, int(model.config.max_position_embeddings) - 1),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=[_NEVER],
            pad_token_id=0,
        )


@contextmanager
def _recording(layers: Mapping[str, nn.Module], largest: dict[str, torch.Tensor]) -> Iterator[None]:
    """Keep the largest size of every input channel of these layers."""

    def record(name: str, read: torch.Tensor) -> None:
        sizes = read.detach().abs().flatten(0, -2).amax(0)  # [features]
        largest[name] = torch.maximum(largest[name], sizes) if name in largest else sizes

    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: record(name, inputs[0]))
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _to_numpy(tensors: Mapping[str, torch.Tensor]) -> dict[str, NDArray[np.float32]]:
    return {name: tensor.detach().float().numpy() for name, tensor in tensors.items()}
