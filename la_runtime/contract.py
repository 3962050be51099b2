"""The contract between a compiled graph and whatever drives it: tensor names, axes, dtypes.

This is the one place that spells a tensor name. Export builds the graph's inputs and outputs
from it, checks compare a file with it, backends bind by the roles it gives out, and the page of
the documentation is written from it.

Versions read major.minor. An optional tensor more, or another form for a variant of the graph, is a
new minor version, and whoever knows an older one of the same major version can still drive the
bundle's portable graph, if it has none of what is new. Whatever changes a meaning is a new major
version: a bundle of another major version is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from la_runtime.errors import UsageError

__all__ = [
    "CONTRACT_MAJOR",
    "CONTRACT_VERSION",
    "Axis",
    "CacheForm",
    "Contract",
    "Dtype",
    "KvOrder",
    "Name",
    "RowPlaces",
    "TensorSpec",
    "masked_value",
]

CONTRACT_MAJOR: Final = 1
CONTRACT_VERSION: Final = "1.4"


class Axis(StrEnum):
    """Dynamic axes. Their names are the names of the graph's symbolic dimensions.

    ``batch``: sequences that share the pass.
    ``block``: rows of the pass, those that pad shorter sequences included.
    ``past``: cache places; any length, those a sequence does not use are masked and zero.
    ``keys``: what a row may attend to. In cache form `concat` the past, then the block; in
    `scatter` the cache places, the block's among them: the capacity where it is fixed, else any
    number from the longest sequence and the block on.
    ``rows``: rows of the block whose scores are wanted.
    """

    BATCH = "batch"
    BLOCK = "block"
    PAST = "past"
    KEYS = "keys"
    ROWS = "rows"


class Dtype(StrEnum):
    """Element types, named as NumPy names them; it has no ``bfloat16``, see `storage`."""

    INT64 = "int64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class CacheForm(StrEnum):
    """How K/V of a block reach the cache.

    ``concat``: the graph returns the block's K/V and the runtime commits the accepted rows.
    ``scatter``: the graph writes the block's K/V into the cache from `write_index` on. What is not
    to stay is overwritten by the next pass, because `write_index` does not advance over it. The
    mask hides every place that holds nothing. The cache has a fixed capacity, or without one as
    many places as the mask has columns.
    """

    CONCAT = "concat"
    SCATTER = "scatter"


class KvOrder(StrEnum):
    """Axis order of keys and values.

    ``head-major``: [batch, num_kv_heads, places, head_dim].
    ``sequence-major``: [batch, places, num_kv_heads * head_dim]; a place is one run of memory.
    """

    HEAD_MAJOR = "head-major"
    SEQUENCE_MAJOR = "sequence-major"


class RowPlaces(StrEnum):
    """Where cache form `scatter` writes the rows of a block.

    ``behind``: from `write_index` on, one behind the other.
    ``chosen``: each where its entry of `write_index` says. Drafts of a tree can then stand where
    their sums come out as a chain's, bit for bit.
    """

    BEHIND = "behind"
    CHOSEN = "chosen"


class Name(StrEnum):
    """Names of the tensors that do not repeat per layer."""

    INPUT_IDS = "input_ids"
    POSITION_IDS = "position_ids"
    ATTENTION_MASK = "attention_mask"
    SLIDING_ATTENTION_MASK = "sliding_attention_mask"
    LOOKAHEAD_EMBEDDINGS = "lookahead_embeddings"
    LOGITS_ROWS = "logits_rows"
    WRITE_INDEX = "write_index"
    LOGITS = "logits"
    TOP_IDS = "top_ids"
    TOP_LOGITS = "top_logits"
    LOGSUMEXP = "logsumexp"


def masked_value(dtype: Dtype) -> float:
    """Additive mask value for "must not be seen": finite, and exp() of it is exactly zero."""
    return {Dtype.FLOAT32: -1e9, Dtype.BFLOAT16: -1e9, Dtype.FLOAT16: -1e4}[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One graph input or output.

    Args:
        name: the tensor's name in the graph.
        axes: one entry per dimension: an `Axis` when dynamic, an int when fixed.
        dtype: element type.
        meaning: what it holds, in a line.
    """

    name: str
    axes: tuple[Axis | int, ...]
    dtype: Dtype
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The contract of one graph.

    Args:
        version: of the contract this graph was built to.
        cache_form: how K/V of a block reach the cache.
        kv_order: axis order of keys and values.
        num_layers: decoder layers, each with one key and one value cache.
        num_kv_heads: key/value heads per layer.
        head_dim: width of a head.
        hidden_size: width of the residual stream.
        vocab_size: rows of the embedding table; ids from here on are lookahead tokens.
        k_max: number of lookahead vectors the graph takes.
        top_c: how many best tokens `top_ids` / `top_logits` list per row.
        compute_dtype: dtype of the mask and the lookahead vectors.
        kv_dtype: dtype of the cache.
        window: positions that a row sees in layers of sliding attention, its own among them; None
            where no layer has a window.
        row_places: where a block's rows are written; cache form `scatter` without a capacity may
            have them chosen.
        capacity: cache places per sequence, those for the rows of a pass included, where the
            graph fixes them; cache form `scatter` only.

    Raises:
        UsageError: a size is not positive, `top_c` exceeds the vocabulary, or `capacity` or
            `row_places` does not go with the cache form.
    """

    version: str = CONTRACT_VERSION
    cache_form: CacheForm = CacheForm.CONCAT
    kv_order: KvOrder = KvOrder.HEAD_MAJOR
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    k_max: int
    top_c: int
    compute_dtype: Dtype = Dtype.FLOAT32
    kv_dtype: Dtype = Dtype.FLOAT32
    window: int | None = None
    row_places: RowPlaces = RowPlaces.BEHIND
    capacity: int | None = None

    def __post_init__(self) -> None:
        for field in (
            "num_layers",
            "num_kv_heads",
            "head_dim",
            "hidden_size",
            "vocab_size",
            "k_max",
            "top_c",
        ):
            value = getattr(self, field)
            if value < 1:
                raise UsageError(f"contract: {field} must be at least 1, got {value}")
        if self.window is not None and self.window < 1:
            raise UsageError(f"contract: window must be at least 1, got {self.window}")
        if self.top_c > self.vocab_size:
            raise UsageError(
                f"contract: top_c {self.top_c} exceeds the vocabulary of {self.vocab_size}"
            )
        if self.capacity is not None and self.cache_form is not CacheForm.SCATTER:
            raise UsageError(
                f"contract: capacity is {self.capacity} in cache form {self.cache_form}; "
                f"only {CacheForm.SCATTER} can have one"
            )
        can_choose = self.cache_form is CacheForm.SCATTER and self.capacity is None
        if self.row_places is RowPlaces.CHOSEN and not can_choose:
            raise UsageError(
                f"contract: row_places is {self.row_places} in cache form {self.cache_form} with "
                f"capacity {self.capacity}; only {CacheForm.SCATTER} without one has places to "
                "choose"
            )
        if self.capacity is not None and self.capacity < 1:
            raise UsageError(f"contract: capacity must be at least 1, got {self.capacity}")

    @property
    def past_names(self) -> tuple[str, ...]:
        """Cache inputs in the order key 0, value 0, key 1, value 1, ..."""
        return self._per_layer("past_key_values")

    @property
    def block_names(self) -> tuple[str, ...]:
        """Outputs with this block's K/V (`concat`), in the order of `past_names`."""
        return self._per_layer("block")

    @property
    def present_names(self) -> tuple[str, ...]:
        """Outputs with the cache after this block (`scatter`), in the order of `past_names`."""
        return self._per_layer("present")

    def _per_layer(self, prefix: str) -> tuple[str, ...]:
        return tuple(
            f"{prefix}.{layer}.{part}"
            for layer in range(self.num_layers)
            for part in ("key", "value")
        )

    @property
    def cache_axes(self) -> tuple[Axis | int, ...]:
        """Axes of one layer's keys or values in the cache."""
        places = Axis.PAST if self.cache_form is CacheForm.CONCAT else self._keys
        return self._key_value_axes(places)

    @property
    def _keys(self) -> Axis | int:
        return Axis.KEYS if self.capacity is None else self.capacity

    def _key_value_axes(self, places: Axis | int) -> tuple[Axis | int, ...]:
        """Axes of keys or values in so many places, or rows."""
        if self.kv_order is KvOrder.SEQUENCE_MAJOR:
            return (Axis.BATCH, places, self.num_kv_heads * self.head_dim)
        return (Axis.BATCH, self.num_kv_heads, places, self.head_dim)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Every graph input, in graph order."""
        row = (Axis.BATCH, Axis.BLOCK)
        return (
            TensorSpec(
                name=Name.INPUT_IDS,
                axes=row,
                dtype=Dtype.INT64,
                meaning="the row's token; vocab_size + i is lookahead token i, from 0",
            ),
            TensorSpec(
                name=Name.POSITION_IDS,
                axes=row,
                dtype=Dtype.INT64,
                meaning="the row's position in its sequence, from 0; several rows may share one",
            ),
            TensorSpec(
                name=Name.ATTENTION_MASK,
                axes=(Axis.BATCH, 1, Axis.BLOCK, self._keys),
                dtype=self.compute_dtype,
                meaning="added to the scores: 0 where a row sees a key, the masked value elsewhere",
            ),
            TensorSpec(
                name=Name.LOOKAHEAD_EMBEDDINGS,
                axes=(self.k_max, self.hidden_size),
                dtype=self.compute_dtype,
                meaning="the lookahead tokens' vectors, bound once when the bundle is opened",
            ),
            TensorSpec(
                name=Name.LOGITS_ROWS,
                axes=(Axis.BATCH, Axis.ROWS),
                dtype=Dtype.INT64,
                meaning="indices of the block's rows whose scores are wanted",
            ),
            *self._sliding_mask,
            *self._write_index,
            *(
                TensorSpec(
                    name=name,
                    axes=self.cache_axes,
                    dtype=self.kv_dtype,
                    meaning="the layer's cache; places that hold nothing are masked",
                )
                for name in self.past_names
            ),
        )

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Every graph output, in graph order."""
        rows = (Axis.BATCH, Axis.ROWS)
        return (
            TensorSpec(
                name=Name.LOGITS,
                axes=(*rows, self.vocab_size),
                dtype=Dtype.FLOAT32,
                meaning="the model's scores; lookahead tokens have none",
            ),
            TensorSpec(
                name=Name.TOP_IDS,
                axes=(*rows, self.top_c),
                dtype=Dtype.INT64,
                meaning="the best tokens, best first; ties go to the lowest id",
            ),
            TensorSpec(
                name=Name.TOP_LOGITS,
                axes=(*rows, self.top_c),
                dtype=Dtype.FLOAT32,
                meaning="their scores",
            ),
            TensorSpec(
                name=Name.LOGSUMEXP,
                axes=rows,
                dtype=Dtype.FLOAT32,
                meaning="log of the sum of exp(logits): a token's log-probability is its logit "
                "minus this",
            ),
            *self._written,
        )

    @property
    def _sliding_mask(self) -> tuple[TensorSpec, ...]:
        if self.window is None:
            return ()
        return (
            TensorSpec(
                name=Name.SLIDING_ATTENTION_MASK,
                axes=(Axis.BATCH, 1, Axis.BLOCK, self._keys),
                dtype=self.compute_dtype,
                meaning="the same for layers of sliding attention: 0 only where the key's position "
                "is less than the window behind the row's",
            ),
        )

    @property
    def _write_index(self) -> tuple[TensorSpec, ...]:
        if self.cache_form is CacheForm.CONCAT:
            return ()
        if self.row_places is RowPlaces.CHOSEN:
            return (
                TensorSpec(
                    name=Name.WRITE_INDEX,
                    axes=(Axis.BATCH, Axis.BLOCK),
                    dtype=Dtype.INT64,
                    meaning="the cache place of each row; what is not committed stays hidden by "
                    "the mask until it is written over",
                ),
            )
        return (
            TensorSpec(
                name=Name.WRITE_INDEX,
                axes=(Axis.BATCH,),
                dtype=Dtype.INT64,
                meaning="the cache place of the block's first row; to discard rows, do not advance "
                "it over them",
            ),
        )

    @property
    def _written(self) -> tuple[TensorSpec, ...]:
        """The outputs through which a block's K/V leave the graph."""
        if self.cache_form is CacheForm.SCATTER:
            names, axes = self.present_names, self.cache_axes
            meaning = "the cache with the block's K/V in it; may share the past's memory"
        else:
            names = self.block_names
            axes = self._key_value_axes(Axis.BLOCK)
            meaning = "the block's own K/V; what is not copied into the cache is discarded"
        return tuple(
            TensorSpec(name=name, axes=axes, dtype=self.kv_dtype, meaning=meaning) for name in names
        )
