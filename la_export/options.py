"""What a build is asked to do. Knows no library, so that a wrong value is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from la_runtime.errors import UsageError

__all__ = ["FP32", "LARGEST_K", "BuildOptions"]

LARGEST_K: Final = 16
FP32: Final = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What to build.

    Args:
        model: folder, `.gguf` file, hub id or known name.
        lookahead_lengths: values of k the bundle serves, 0 to `LARGEST_K`; 0 decodes plainly.
        precision: `fp32`.
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
    precision: str = FP32
    out: Path | None = None
    context: int | None = None
    revision: str | None = None
    threads: int | None = None
    allow_bin: bool = False

    def __post_init__(self) -> None:
        if not self.model:
            raise UsageError("--model is empty; give a folder, a .gguf file, a hub id or a name")
        if not self.lookahead_lengths:
            raise UsageError("no k was given; pass at least one --k, for example --k 4")
        for k in self.lookahead_lengths:
            if not 0 <= k <= LARGEST_K:
                raise UsageError(f"--k {k} is out of range; expected 0 to {LARGEST_K}")
        if self.precision != FP32:
            raise UsageError(f"--precision {self.precision!r} is not known; expected {FP32}")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads {self.threads} is out of range; expected at least 1")

    @property
    def sorted_lengths(self) -> tuple[int, ...]:
        """Each k once, ascending."""
        return tuple(sorted(set(self.lookahead_lengths)))

    @property
    def k_max(self) -> int:
        """Number of lookahead vectors; one even for plain decoding, so that axes are not empty."""
        return max(1, *self.lookahead_lengths)
