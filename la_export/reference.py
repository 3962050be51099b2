"""The slower truth: transformers' own model, run plainly in PyTorch.

It shares no code with the traced attention function, the recording cache or the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from la_export.adapter import NO_ADAPTER, Adapter
from la_export.checkpoint import find_model, load_checkpoint
from la_export.checkpoint.tensors import TORCH_DTYPES
from la_export.layer_kinds import FULL_ATTENTION, SLIDING_ATTENTION, layer_kinds
from la_export.options import Precision
from la_export.quantize.emulation import (
    Activations,
    IntegerLinear,
    QuantizedWeights,
    quantize_to_int4,
    quantize_to_int8,
)
from la_export.quantize.integers import QuantizedBlocks, QuantizedRows
from la_export.quantize.rotation import (
    BLOCK_ROTATION,
    HEAD_ROTATION,
    LOOKAHEAD_ROTATION,
    ROTATION_PRODUCTS,
    Rotation,
)
from la_export.quantize.smoothing import NO_SMOOTHING, Smoothing
from la_export.streamed_model import HeldWeights, stream_weights
from la_runtime.contract import Dtype
from la_runtime.errors import BundleError, UnsupportedModelError
from la_runtime.storage import round_to

__all__ = ["ReferencePass", "TorchReference"]

_Value = TypeVar("_Value")
_FACTORS: Final = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")
# Families whose layers add attention's output and the MLP's to a stream that their norms read.
_TWO_SUMS: Final = frozenset({"llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"})

# An end id that no model emits; transformers would put its own in the place of none.
_NEVER: Final = -1
# Of an embedding, by itself: some steps of float32.
_NUDGE: Final = np.float32(1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePass:
    """What one full causal pass gives.

    Args:
        logits: [tokens, vocab_size] float32.
        key_values: [2 * layers, kv_heads, tokens, head_dim] float32 in the order key 0,
            value 0, key 1, ...; keys are rotated.
    """

    logits: NDArray[np.float32]
    key_values: NDArray[np.float32]


class TorchReference:
    """Plain causal passes over a float32 transformers model.

    Args:
        model: a causal language model with transformers' own attention, in eval mode.
        precision: of the graph it is the truth for. The model's weights are changed in place to
            what such a graph stores; everything is still computed in float32, but for products of
            integers.
        smoothing: of the weights, before they are quantized. A model whose stream is turned takes
            lookahead vectors as they are, and says what it said.
        adapter: of lookahead rows, as it was tuned.
        read: where the model is a skeleton without weights: gives each of them, every time that it
            is needed. None holds them all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        precision: Precision = Precision.FP32,
        smoothing: Smoothing = NO_SMOOTHING,
        adapter: Adapter = NO_ADAPTER,
        read: Callable[[str], NDArray[np.float32]] | None = None,
    ) -> None:
        _check_smoothing(model, smoothing)
        self.precision = precision
        self._model = model
        if precision in (Precision.FP16, Precision.BF16):
            _round_factors(model, precision.dtype)
        self._rotations = _rotation_products(smoothing)
        self._quantized: QuantizedWeights = {}
        self._held: HeldWeights | None = None
        self._is_lookahead = torch.tensor(False)
        self._passes: dict[Hashable, list[ReferencePass]] = {}
        if read is None:
            _smooth_parameters(model, smoothing)
            self._quantized = _hold_in(model, precision)
        else:
            self._held = HeldWeights.of_model(model, read, smoothing=smoothing, precision=precision)
            stream_weights(model, self._held)
        if smoothing.rotation is not None:
            self._turn_inputs(smoothing.rotation)
        self._adapter = self._attach(_round_adapter(smoothing.adapt(adapter), precision))
        self._kinds = layer_kinds(model.config)
        self.vocab_size = int(model.config.vocab_size)
        self.num_layers = int(model.config.num_hidden_layers)
        self.hidden_size = int(model.config.hidden_size)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        context: int | None = None,
        allow_bin: bool = False,
        precision: Precision = Precision.FP32,
        smoothing: Smoothing = NO_SMOOTHING,
        adapter: Adapter = NO_ADAPTER,
    ) -> TorchReference:
        """Load what `la-export build --model` would load, in a precision, for a context.

        Raises:
            LookaheadError: the model cannot be found or is not supported.
        """
        source = find_model(model, revision=None, allow_bin=allow_bin)
        loaded = load_checkpoint(source, context=context).load_model()
        return cls(loaded, precision=precision, smoothing=smoothing, adapter=adapter)

    def _turn_inputs(self, rotation: Rotation) -> None:
        """Let layers turn what they read, where no weight before them does."""
        _multiply_before(self._model.get_output_embeddings(), self._rotations[HEAD_ROTATION])
        for parameter in rotation.blocked:
            layer = self._model.get_submodule(parameter.rpartition(".")[0])
            _multiply_before(layer, self._rotations[BLOCK_ROTATION])

    def _attach(self, adapter: Adapter) -> Adapter:
        """Let layers add the adapter's products to rows of lookaheads."""
        for pair in adapter.pairs:
            reduce = torch.from_numpy(pair.reduce).T
            for layer, part in pair.parts():
                expand = torch.from_numpy(np.ascontiguousarray(part)).T

                def add(
                    _: torch.nn.Module,
                    inputs: tuple[torch.Tensor, ...],
                    output: torch.Tensor,
                    reduce: torch.Tensor = reduce,
                    expand: torch.Tensor = expand,
                ) -> torch.Tensor:
                    adapted = output + (inputs[0] @ reduce) @ expand
                    return torch.where(self._is_lookahead, adapted, output)

                self._model.get_submodule(layer).register_forward_hook(add)
        return adapter

    @contextmanager
    def float_activations(self) -> Iterator[None]:
        """Within it, products of integers take their activations as they are."""
        layers = [m for m in self._model.modules() if isinstance(m, IntegerLinear)]
        for layer in layers:
            layer.activations = Activations.FLOATS
        try:
            yield
        finally:
            for layer in layers:
                layer.activations = Activations.INTEGERS

    def take_integers(
        self, stored: Callable[[str], QuantizedRows | QuantizedBlocks | None]
    ) -> None:
        """Where weights are read for each pass, take integers that are known to be right.

        Args:
            stored: gives those of a parameter; None for one that it does not have.
        """
        if self._held is not None:
            self._held.stored = stored

    def scores(
        self,
        token_ids: Sequence[int],
        lookahead_embeddings: NDArray[np.float32] | None = None,
        *,
        position_ids: Sequence[int] | None = None,
    ) -> NDArray[np.float32]:
        """Logits [tokens, vocab_size] after every token; see `run`."""
        return self.run(token_ids, lookahead_embeddings, position_ids=position_ids).logits

    def nudged_scores(self, token_ids: Sequence[int], *, seed: int) -> NDArray[np.float32]:
        """The same of embeddings that are off by a millionth of themselves, at random.

        Where they say something else, the text stands between two roundings of an activation, and
        either is as right.
        """
        rng = np.random.default_rng(seed)
        table = self._table()
        original = table.data
        nudges = 1 + _NUDGE * rng.standard_normal(original.shape, dtype=np.float32)
        try:
            table.data = original * torch.from_numpy(nudges)
            return self.scores(token_ids)
        finally:
            table.data = original

    def key_values(
        self,
        token_ids: Sequence[int],
        lookahead_embeddings: NDArray[np.float32] | None = None,
        *,
        position_ids: Sequence[int] | None = None,
    ) -> NDArray[np.float32]:
        """Keys and values [2 * layers, kv_heads, tokens, head_dim]; see `run`."""
        return self.run(token_ids, lookahead_embeddings, position_ids=position_ids).key_values

    @torch.no_grad()
    def run(
        self,
        token_ids: Sequence[int],
        lookahead_embeddings: NDArray[np.float32] | None = None,
        *,
        position_ids: Sequence[int] | None = None,
    ) -> ReferencePass:
        """One full causal pass over a sequence.

        Args:
            token_ids: [tokens]; ids >= vocab_size are lookahead tokens.
            lookahead_embeddings: [k_max, hidden] float32; needed only for such ids.
            position_ids: [tokens]; 0, 1, 2, ... when not given.
        """
        positions = range(len(token_ids)) if position_ids is None else position_ids
        (found,) = self._run_together([(token_ids, positions)], lookahead_embeddings)
        return found

    def run_many(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        lookahead_embeddings: NDArray[np.float32] | None = None,
        *,
        window: int | None = None,
    ) -> list[ReferencePass]:
        """Full causal passes over some sequences: in one where weights are read for each pass.

        Args:
            sequences: token ids and position ids of each.
            lookahead_embeddings: see `run`.
            window: of layers that have one; the model's own when not given.
        """
        if self._held is not None:
            # The checks of every graph of a bundle ask for the same; to read the weights takes
            # minutes.
            asked = _describe_passes(sequences, lookahead_embeddings, window, self._activations())
            if asked not in self._passes:
                self._passes[asked] = self._run_together(sequences, lookahead_embeddings, window)
            return self._passes[asked]
        return [
            self._run_together([sequence], lookahead_embeddings, window)[0]
            for sequence in sequences
        ]

    def _activations(self) -> tuple[Activations, ...]:
        """How products of integers take theirs, if there are any."""
        return tuple({m.activations for m in self._model.modules() if isinstance(m, IntegerLinear)})

    @torch.no_grad()
    def _run_together(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        lookahead_embeddings: NDArray[np.float32] | None,
        window: int | None = None,
    ) -> list[ReferencePass]:
        """Rows behind a sequence's last are seen by none of its own."""
        width = max(len(token_ids) for token_ids, _ in sequences)
        ids = [[*found, *[0] * (width - len(found))] for found, _ in sequences]
        positions = [[*found, *[found[-1]] * (width - len(found))] for _, found in sequences]
        cache = DynamicCache()
        self._is_lookahead = self._gate(ids)
        outputs = self._model(
            inputs_embeds=self._embed(ids, lookahead_embeddings),
            attention_mask=self._masks(positions, window),
            position_ids=torch.tensor(positions, dtype=torch.int64),
            past_key_values=cache,
            use_cache=True,
        )
        logits, key_values = outputs.logits.float().numpy(), _stack_key_values(cache)
        lengths = [len(token_ids) for token_ids, _ in sequences]
        return [
            ReferencePass(logits=logits[i, :length], key_values=key_values[:, i, :, :length])
            for i, length in enumerate(lengths)
        ]

    @torch.no_grad()
    def hidden_states(
        self, token_ids: Sequence[int], *, position_ids: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """What stands between the parts of the model in one full causal pass.

        Args:
            token_ids: [tokens], all of the vocabulary.
            position_ids: [tokens]; 0, 1, 2, ... when not given.

        Returns:
            [2 * layers + 2, tokens, hidden] float32: the embedding, the sum after each attention
            and each MLP in their order, the final norm's output.

        Raises:
            UnsupportedModelError: the model's layers are of another form.
        """
        if self._model.config.model_type not in _TWO_SUMS:
            raise UnsupportedModelError(
                f"model type {self._model.config.model_type!r} has not two sums a layer that are "
                "each read by a norm; layers are told apart in "
                f"{', '.join(sorted(_TWO_SUMS))} models alone"
            )
        decoder = self._model.get_decoder()
        norms = [
            *(
                norm
                for layer in decoder.layers
                for norm in (layer.input_layernorm, layer.post_attention_layernorm)
            ),
            decoder.norm,
        ]
        states: list[torch.Tensor] = []
        # Each norm of a pre-norm decoder reads one sum.
        hooks = [
            norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][0].clone()))
            for norm in norms
        ]
        try:
            ids = [list(token_ids)]
            self._is_lookahead = self._gate(ids)
            positions = [list(range(len(token_ids)) if position_ids is None else position_ids)]
            last = decoder(
                inputs_embeds=self._embed(ids, None),
                attention_mask=self._masks(positions),
                position_ids=torch.tensor(positions, dtype=torch.int64),
            ).last_hidden_state[0]
        finally:
            for hook in hooks:
                hook.remove()
        stacked: NDArray[np.float32] = torch.stack([*states, last]).float().numpy()
        return stacked

    def weights(self) -> Iterator[tuple[tuple[str, ...], Callable[[], NDArray[np.float32]]]]:
        """Every parameter of floats once, with all its names: tied ones have several.

        What gives it may read it anew.
        """
        yield from self._own_weights()
        for name, matrix in self._rotations.items():
            yield (name,), partial(_identity, matrix)
        for name, array in self._adapter.parameters():
            yield (name,), partial(_identity, array)

    def _own_weights(self) -> Iterator[tuple[tuple[str, ...], Callable[[], NDArray[np.float32]]]]:
        if self._held is not None:
            integers = self._held.by_row | self._held.in_blocks
            for held in self._held.names:
                if held[0] not in integers:
                    yield held, partial(self._held.floats, held[0])
            return
        in_integers = {name for names in self._quantized for name in names}
        names: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if name not in in_integers:
                names.setdefault(parameter, []).append(name)
        for parameter, found in names.items():
            yield tuple(found), partial(_identity, parameter.detach().float().numpy())

    def quantized_weights(
        self,
    ) -> Iterator[tuple[tuple[str, ...], Callable[[], QuantizedRows | QuantizedBlocks]]]:
        """Every parameter that the precision holds in integers; none but in int8 and int4."""
        if self._held is None:
            for names, weight in self._quantized.items():
                yield names, partial(_identity, weight)
            return
        for names in self._held.names:
            if names[0] in self._held.by_row | self._held.in_blocks:
                yield names, partial(self._held.require_integers, names[0])

    def buffers(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Every buffer, which no precision rounds: the rotary embedding's frequencies."""
        for name, buffer in self._model.named_buffers():
            yield name, buffer.float().numpy()

    @torch.no_grad()
    def embedding_rows(self, count: int) -> NDArray[np.float32]:
        """Vectors of the first tokens as the first layer gets them, [count, hidden]."""
        rows: NDArray[np.float32] = self._look_up(torch.arange(count)).float().numpy()
        return rows

    @torch.no_grad()
    def generate_greedy(
        self, token_ids: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int]
    ) -> list[int]:
        """Tokens that transformers' own greedy generation adds, the end token included.

        Args:
            token_ids: the prompt.
            max_new_tokens: most tokens to add.
            eos_token_ids: tokens that end the text; none for never.
        """
        prompt = torch.tensor([list(token_ids)], dtype=torch.int64)
        self._is_lookahead = torch.tensor(False)
        generated = self._model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            eos_token_id=list(eos_token_ids) or [_NEVER],
            pad_token_id=0,
        )
        new_ids: list[int] = generated[0, len(token_ids) :].tolist()
        return new_ids

    def _gate(self, token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """[batch, tokens, 1] whether each is a lookahead."""
        return (torch.tensor(token_ids) >= self.vocab_size).unsqueeze(-1)

    def _masks(
        self, positions: Sequence[Sequence[int]], window: int | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """None for the model's own causal mask, where no layer has a window.

        transformers' windows count columns, which for a slot are not positions. Those of plain text
        are its own in `generate_greedy`.
        """
        if SLIDING_ATTENTION not in self._kinds:
            return None
        window = window or int(self._model.config.sliding_window)
        place = torch.tensor(positions)
        is_far = place.unsqueeze(-1) - place.unsqueeze(1) >= window  # [batch, tokens, tokens]
        is_later = torch.ones_like(is_far).triu(1)
        full, sliding = (
            torch.zeros(hidden.shape)
            .masked_fill(hidden, torch.finfo(torch.float32).min)
            .unsqueeze(1)
            for hidden in (is_later, is_later | is_far)
        )
        if self._kinds == {SLIDING_ATTENTION}:
            return sliding
        return {FULL_ATTENTION: full, SLIDING_ATTENTION: sliding}

    def _embed(
        self,
        token_ids: Sequence[Sequence[int]],
        lookahead_embeddings: NDArray[np.float32] | None,
    ) -> torch.Tensor:
        """[batch, tokens, hidden], from the two tables."""
        ids = torch.tensor(token_ids)
        is_lookahead = ids >= self.vocab_size
        rows = self._look_up(torch.where(is_lookahead, 0, ids))
        if is_lookahead.any():
            assert lookahead_embeddings is not None, "lookaheads need their embeddings"
            vectors = torch.from_numpy(lookahead_embeddings)
            matrix = self._rotations.get(LOOKAHEAD_ROTATION)
            turned = vectors if matrix is None else vectors @ torch.from_numpy(matrix)
            rows[is_lookahead] = turned[ids[is_lookahead] - self.vocab_size]
        return rows

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """[..., hidden] of tokens; some models scale the table."""
        embedding = self._model.get_input_embeddings()
        assert isinstance(embedding, torch.nn.Embedding), "tokens are looked up in one table"
        found: torch.Tensor = embedding(ids)
        return found

    def _table(self) -> torch.Tensor:
        embedding = self._model.get_input_embeddings()
        assert isinstance(embedding, torch.nn.Embedding), "tokens are looked up in one table"
        return embedding.weight


def _identity(value: _Value) -> _Value:
    return value


def _hold_in(model: PreTrainedModel, precision: Precision) -> QuantizedWeights:
    """Change a model's weights in place to what a graph of a precision stores."""
    match precision:
        case Precision.FP16 | Precision.BF16:
            _round_parameters(model, precision.dtype)
        case Precision.INT8:
            return quantize_to_int8(model)
        case Precision.INT4:
            return quantize_to_int4(model)
        case _:
            pass
    return {}


@torch.no_grad()
def _smooth_parameters(model: PreTrainedModel, smoothing: Smoothing) -> None:
    for name, parameter in model.named_parameters():
        before = parameter.numpy()
        smoothed = smoothing.apply(name, before)
        if smoothed is not before:
            parameter.copy_(torch.from_numpy(smoothed))


def _check_smoothing(model: PreTrainedModel, smoothing: Smoothing) -> None:
    """Refuse one of another model."""
    sizes = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    problems = [name for name in (*smoothing.rows, *smoothing.columns) if name not in sizes]
    # A layer may have no bias; the names of both are kept.
    problems = [name for name in problems if not name.endswith(".bias")]
    if (rotation := smoothing.rotation) is not None:
        if rotation.basis.size != int(model.config.hidden_size):
            problems.append(f"{rotation.basis.size} channels")
        named = (*rotation.gains, *rotation.readers, *rotation.tables, *rotation.blocked)
        problems += [name for name in named if name not in sizes]
        problems += [
            name for name in rotation.blocked if name in sizes and sizes[name][-1] % rotation.block
        ]
    if problems:
        raise BundleError(
            f"the smoothing is of another model ({problems[0]} does not fit this one); rebuild the "
            "bundle"
        )


def _describe_passes(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    lookahead_embeddings: NDArray[np.float32] | None,
    window: int | None,
    activations: tuple[Activations, ...],
) -> Hashable:
    vectors = None if lookahead_embeddings is None else lookahead_embeddings.tobytes()
    asked = tuple((tuple(ids), tuple(positions)) for ids, positions in sequences)
    return asked, vectors, window, activations


def _rotation_products(smoothing: Smoothing) -> dict[str, NDArray[np.float32]]:
    rotation = smoothing.rotation
    return {} if rotation is None else {n: rotation.product(n) for n in ROTATION_PRODUCTS}


def _multiply_before(layer: torch.nn.Module | None, matrix: NDArray[np.float32]) -> None:
    """Let a layer multiply what it reads by a matrix first, in blocks of the matrix's size."""
    assert layer is not None, "logits come from a layer"
    factor = torch.from_numpy(matrix)

    def turn(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        blocks = inputs[0].unflatten(-1, (-1, len(factor)))  # [..., blocks, size]
        return ((blocks @ factor).flatten(-2),)

    layer.register_forward_pre_hook(turn)


def _round_adapter(adapter: Adapter, precision: Precision) -> Adapter:
    """As a graph of that precision stores it."""
    dtype = precision.dtype
    pairs = [
        replace(
            pair,
            reduce=round_to(pair.reduce, dtype),
            expand=round_to(pair.expand, dtype),
        )
        for pair in adapter.pairs
    ]
    return Adapter(pairs=tuple(pairs))


@torch.no_grad()
def _round_parameters(model: PreTrainedModel, dtype: Dtype) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.to(TORCH_DTYPES[dtype]))


@torch.no_grad()
def _round_factors(model: PreTrainedModel, dtype: Dtype) -> None:
    """Numbers that a model's code multiplies activations by, which takes their dtype."""
    for holder in (*model.modules(), model.config):
        for name in _FACTORS:
            factor = getattr(holder, name, None)
            if isinstance(factor, float):
                setattr(holder, name, float(round_to(np.array(factor, np.float32), dtype)))
        scale = getattr(holder, "embed_scale", None)
        if isinstance(scale, torch.Tensor):
            scale.copy_(scale.to(TORCH_DTYPES[dtype]))


def _stack_key_values(cache: DynamicCache) -> NDArray[np.float32]:
    """[2 * layers, batch, kv_heads, tokens, head_dim]."""
    parts = []
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer), "full attention keeps plain keys and values"
        for part in (layer.keys, layer.values):
            assert isinstance(part, torch.Tensor), "the pass filled every layer"
            parts.append(part.float().numpy())
    return np.stack(parts)
