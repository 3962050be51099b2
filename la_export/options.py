"""What a build is asked to do. Knows no library, so that a wrong value is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from la_runtime.contract import CacheForm, Dtype
from la_runtime.errors import UsageError
from la_runtime.group_mask import UNTUNED

__all__ = [
    "DEFAULT_PREFILL_CHUNK",
    "LARGEST_K",
    "SHIPPED",
    "UNTUNED",
    "BuildOptions",
    "Precision",
]

LARGEST_K: Final = 16
DEFAULT_PREFILL_CHUNK: Final = 512
SHIPPED: Final = "shipped"


class Precision(StrEnum):
    """Numbers that weights, activations and cache are held in.

    Normalizations and the angles of the rotary embedding are computed in float32 in each. The
    integer precisions hold weights in them; their cache is float32. ``int8`` multiplies integers:
    each row of activations is quantized by itself. ``int4`` multiplies floats.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def is_integer(self) -> bool:
        """Whether some products are of integers, which only ONNX Runtime computes."""
        return self in (Precision.INT8, Precision.INT4)

    @property
    def dtype(self) -> Dtype:
        """The contract's name of what is computed and cached in."""
        return _DTYPES[self]


_DTYPES: Final = {
    Precision.FP32: Dtype.FLOAT32,
    Precision.FP16: Dtype.FLOAT16,
    Precision.BF16: Dtype.BFLOAT16,
    Precision.INT8: Dtype.FLOAT32,
    Precision.INT4: Dtype.FLOAT32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What to build.

    Args:
        model: folder, `.gguf` file, hub id or known name.
        lookahead_lengths: values of k the bundle serves, 0 to `LARGEST_K`; 0 decodes plainly.
        precision: what weights, activations and cache are held in.
        cache_form: how K/V reach the cache.
        smoothing: whether activations are turned and scaled so that no channel stands out, by what
            the weights undo, see `quantize.rotation`. Precision ``int8`` only.
        lookahead: where lookahead vectors, and the adapter of their rows, come from: `SHIPPED`,
            `UNTUNED` or a file that `la-export tune` wrote. Not given: what is shipped for this
            model, else untuned.
        lora: folder of a PEFT adapter that is merged into the weights.
        packed: whether weights are also stored as the kernels of this processor read them, so that
            processes share them; elsewhere nothing is lost but the disk space.
        prefill_chunk: prompt tokens that a pass of cache form `scatter` has room for.
        out: the bundle's folder; `engines/<name>` when not given.
        context: positions to serve; the model's own limit when not given.
        revision: hub revision.
        threads: CPU threads for the checks; PyTorch's own choice when not given.
        allow_bin: whether pickle-based weights may be read, weights only.

    Raises:
        UsageError: a value is out of range.
    """

    model: str
    lookahead_lengths: tuple[int, ...]
    precision: Precision = Precision.FP32
    cache_form: CacheForm = CacheForm.CONCAT
    smoothing: bool = True
    lookahead: str | None = None
    lora: Path | None = None
    packed: bool = False
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    out: Path | None = None
    context: int | None = None
    revision: str | None = None
    threads: int | None = None
    allow_bin: bool = False

    def __post_init__(self) -> None:
        for field, kind in (("precision", Precision), ("cache_form", CacheForm)):
            value = getattr(self, field)
            try:
                object.__setattr__(self, field, kind(value))  # callers may use their names
            except ValueError as error:
                option = field.replace("_", "-")
                known = ", ".join(kind)
                raise UsageError(
                    f"--{option} {value!r} is not known; expected one of: {known}"
                ) from error
        if not self.model:
            raise UsageError("--model is empty; give a folder, a .gguf file, a hub id or a name")
        if not self.lookahead_lengths:
            raise UsageError("no k was given; pass at least one --k, for example --k 4")
        for k in self.lookahead_lengths:
            if not 0 <= k <= LARGEST_K:
                raise UsageError(f"--k {k} is out of range; expected 0 to {LARGEST_K}")
        if self.prefill_chunk < 1:
            raise UsageError(
                f"--prefill-chunk {self.prefill_chunk} is out of range; expected at least 1"
            )
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads {self.threads} is out of range; expected at least 1")

    @property
    def is_smoothed(self) -> bool:
        """Whether weights are smoothed before they are quantized."""
        return self.precision is Precision.INT8 and self.smoothing

    @property
    def sorted_lengths(self) -> tuple[int, ...]:
        """Each k once, ascending."""
        return tuple(sorted(set(self.lookahead_lengths)))

    @property
    def k_max(self) -> int:
        """Number of lookahead vectors; one even for plain decoding, so that axes are not empty."""
        return max(1, *self.lookahead_lengths)
