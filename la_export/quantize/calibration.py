"""Prepares a model for integers: how to turn its residual stream, and what to smooth.

Sizes of activations are measured on text of the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from la_export.layer_kinds import count_kv_heads
from la_export.quantize.rotation import Rotation, largest_block, make_basis
from la_export.quantize.smoothing import Seam, Smoothing, make_smoothing

__all__ = ["calibrate", "find_rotation", "find_seams", "is_turned"]

# Llama's decoder: two norms a layer with plain gains, each read by linear layers alone.
_TURNED_FAMILIES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})
Read = Callable[[str], NDArray[np.float32]]

_SEED: Final = 1729
_SEQUENCES: Final = 8
_TOKENS: Final = 64
# An end id that no model emits; transformers would put its own in the place of none.
_NEVER: Final = -1


@torch.no_grad()
def calibrate(model: PreTrainedModel, read: Read | None = None) -> Smoothing:
    """Turn a model's stream, and smooth it by what its linear layers read.

    They read text that is sampled from the model itself, from tokens drawn at random: no data is
    needed. A model whose weights are read for each pass reads tokens drawn at random instead, in
    one.

    Args:
        model: a causal language model in float32; unchanged.
        read: gives a parameter, where the model holds none: see `streamed_model`.
    """
    held: Read = read or (lambda name: model.get_parameter(name).detach().float().numpy())
    seams = find_seams(model)
    layers = {seam.after: model.get_submodule(seam.after) for seam in seams}
    sums: dict[str, torch.Tensor] = {}
    with _recording(layers, sums):
        num_rows = _write(model) if read is None else _read_at_random(model)
    activations = {name: total / num_rows for name, total in sums.items()}
    weights = {name: np.square(held(f"{name}.weight")).mean(0) for name in layers}
    return make_smoothing(
        seams, _to_numpy(activations), weights, rotation=find_rotation(model, held)
    )


def find_seams(model: PreTrainedModel) -> tuple[Seam, ...]:
    """Values before the output, up before down, in every layer.

    They are the only projections whose channels nothing but a product follows: what is before a
    softmax or an activation function cannot be scaled. A layer whose projections are joined, or
    are those of experts, has none.
    """
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    groups = model.config.num_attention_heads // count_kv_heads(model.config)
    seams = []
    for index, layer in enumerate(decoder.layers):
        place = f"{prefix}.layers.{index}."
        attention, mlp = place + "self_attn.", place + "mlp."
        if _has_linear(layer, "self_attn.v_proj") and _has_linear(layer, "self_attn.o_proj"):
            seams.append(
                Seam(
                    before=attention + "v_proj",
                    after=attention + "o_proj",
                    repeats=groups,
                    width=layer.self_attn.head_dim,
                )
            )
        if _has_linear(layer, "mlp.up_proj") and _has_linear(layer, "mlp.down_proj"):
            seams.append(Seam(before=mlp + "up_proj", after=mlp + "down_proj"))
    return tuple(seams)


def _has_linear(layer: nn.Module, name: str) -> bool:
    """Whether it has this linear layer."""
    try:
        return isinstance(layer.get_submodule(name), nn.Linear)
    except AttributeError:
        return False


def find_rotation(model: PreTrainedModel, read: Read | None = None) -> Rotation | None:
    """Everything that reads or writes the residual stream of a pre-norm decoder.

    Args:
        model: the model.
        read: gives a parameter; the model's own when not given.

    Returns:
        None for a model that norms what a layer adds, or scales it, or joins its projections: there
        the turn cannot be folded into weights.
    """
    if not is_turned(model.config):
        return None
    held: Read = read or (lambda name: model.get_parameter(name).detach().float().numpy())
    decoder = model.get_decoder()
    names = {module: str(name) for name, module in model.named_modules()}
    gains = {f"{names[decoder.norm]}.weight": decoder.norm}
    readers: dict[str, str] = {}
    writers: list[str] = []
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, linears in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            gains[f"{names[norm]}.weight"] = norm
            readers |= {f"{names[linear]}.weight": f"{names[norm]}.weight" for linear in linears}
        writers += [
            f"{names[linear]}.{part}"
            for linear in (attention.o_proj, mlp.down_proj)
            for part in ("weight", "bias")
        ]
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return Rotation(
        basis=make_basis(int(model.config.hidden_size)),
        gains={name: held(name).copy() for name in gains},
        readers=readers,
        tables=frozenset(f"{names[table]}.weight" for table in tables),
        writers=frozenset(writers),
        last=f"{names[decoder.norm]}.weight",
        blocked=frozenset(f"{names[layer.mlp.down_proj]}.weight" for layer in decoder.layers),
        block=largest_block(int(model.config.intermediate_size)),
    )


def is_turned(config: PreTrainedConfig) -> bool:
    """Whether models of this configuration have their stream turned."""
    return config.model_type in _TURNED_FAMILIES


def _new_tokens(model: PreTrainedModel) -> int:
    return min(_TOKENS, int(model.config.max_position_embeddings) - 1)


def _read_at_random(model: PreTrainedModel) -> int:
    """One pass over tokens drawn at random, the same every time; how many there were."""
    generator = torch.Generator().manual_seed(_SEED)
    shape = (_SEQUENCES, _new_tokens(model))
    tokens = torch.randint(0, int(model.config.vocab_size), shape, generator=generator)
    model.get_decoder()(input_ids=tokens, use_cache=False)
    return tokens.numel()


def _write(model: PreTrainedModel) -> int:
    """Sequences sampled at temperature 1, the same every time; how many rows were read.

    The last token of a sequence is never read.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        first = torch.randint(0, int(model.config.vocab_size), (_SEQUENCES, 1))
        model.generate(  # type: ignore[operator]
            first,
            attention_mask=torch.ones_like(first),
            max_new_tokens=_new_tokens(model),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=[_NEVER],
            pad_token_id=0,
        )
    return _SEQUENCES * _new_tokens(model)


@contextmanager
def _recording(layers: Mapping[str, nn.Module], sums: dict[str, torch.Tensor]) -> Iterator[None]:
    """Sum the squares of every input channel of these layers."""

    def record(name: str, read: torch.Tensor) -> None:
        squares = read.detach().flatten(0, -2).square().sum(0)  # [features]
        sums[name] = sums[name] + squares if name in sums else squares

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
