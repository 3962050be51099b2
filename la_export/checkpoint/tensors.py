"""Readers of weight files: one tensor at a time, by name, as float32."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from la_runtime.contract import Dtype
from la_runtime.errors import CheckpointError

__all__ = [
    "READABLE_DTYPES",
    "TORCH_DTYPES",
    "BinTensors",
    "LoadedTensors",
    "SafetensorsTensors",
    "StoredTensors",
    "to_float32",
]

_DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
# Numbers that are what they say; integers and float8 mean nothing without their scales.
READABLE_DTYPES: Final = frozenset(_DTYPE_NAMES.values())
TORCH_DTYPES: Final = {
    Dtype.INT64: torch.int64,
    Dtype.FLOAT32: torch.float32,
    Dtype.FLOAT16: torch.float16,
    Dtype.BFLOAT16: torch.bfloat16,
}


class StoredTensors(Protocol):
    """Tensors of a checkpoint, read on demand."""

    def names(self) -> frozenset[str]:
        """Every tensor there is."""
        ...

    def dtype(self, name: str) -> str:
        """The dtype one tensor is stored in, as safetensors spells it; nothing is read."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor; nothing is read."""
        ...

    def load(self, name: str) -> torch.Tensor:
        """One tensor, in the dtype it is stored in."""
        ...


class SafetensorsTensors:
    """Tensors in one or more safetensors files; a file is open only while it is read.

    Args:
        files: the shards.

    Raises:
        CheckpointError: a file is damaged, or two shards hold the same name.
    """

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._file_of: dict[str, Path] = {}
        self._dtypes: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            try:
                with safe_open(path, framework="pt") as shard:
                    names = list(shard.keys())
                    slices = {name: shard.get_slice(name) for name in names}
                    dtypes = {name: found.get_dtype() for name, found in slices.items()}
                    shapes = {name: tuple(found.get_shape()) for name, found in slices.items()}
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"weight file {path.name} cannot be read ({error}); copy it again"
                ) from error
            for name in names:
                if name in self._file_of:
                    raise CheckpointError(
                        f"tensor {name} is in both {self._file_of[name].name} and {path.name}; "
                        "keep one set of weights in the folder"
                    )
                self._file_of[name] = path
            self._dtypes.update(dtypes)
            self._shapes.update(shapes)

    def names(self) -> frozenset[str]:
        """Every tensor of every shard."""
        return frozenset(self._file_of)

    def dtype(self, name: str) -> str:
        """As the shard's header says."""
        return self._dtypes[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """As the shard's header says."""
        return self._shapes[name]

    def load(self, name: str) -> torch.Tensor:
        """Read one tensor from its shard."""
        with safe_open(self._file_of[name], framework="pt") as shard:
            tensor: torch.Tensor = shard.get_tensor(name)
        return tensor


class BinTensors:
    """Tensors in `.bin` files, unpickled weights-only and mapped from disk where that can be.

    Args:
        files: the shards.

    Raises:
        CheckpointError: a file holds anything but tensors.
    """

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for path in files:
            try:
                # Files of before PyTorch 1.6 are no zip archives and cannot be mapped.
                is_mapped = zipfile.is_zipfile(path)
                shard = torch.load(path, map_location="cpu", mmap=is_mapped, weights_only=True)
            except Exception as error:
                raise CheckpointError(
                    f"weight file {path.name} is not a plain dictionary of tensors "
                    f"({_first_line(error)}); it was not executed"
                ) from error
            if not isinstance(shard, dict):
                raise CheckpointError(f"weight file {path.name} holds no dictionary of tensors")
            for name, tensor in shard.items():
                if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                    raise CheckpointError(
                        f"weight file {path.name} holds a {type(tensor).__name__} under {name!r}, "
                        "expected tensors only"
                    )
            self._tensors.update(shard)

    def names(self) -> frozenset[str]:
        """Every tensor of every shard."""
        return frozenset(self._tensors)

    def dtype(self, name: str) -> str:
        """As the tensor says."""
        return _dtype_name(self._tensors[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """As the tensor says."""
        return tuple(self._tensors[name].shape)

    def load(self, name: str) -> torch.Tensor:
        """One tensor, still mapped from its file."""
        return self._tensors[name]


class LoadedTensors:
    """Tensors of a model that is in memory already, as a dequantized GGUF file is.

    Args:
        model: the whole model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._tensors = model.state_dict()

    def names(self) -> frozenset[str]:
        """Every tensor of the model."""
        return frozenset(self._tensors)

    def dtype(self, name: str) -> str:
        """As the tensor says."""
        return _dtype_name(self._tensors[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """As the tensor says."""
        return tuple(self._tensors[name].shape)

    def load(self, name: str) -> torch.Tensor:
        """One of the model's own tensors."""
        tensor: torch.Tensor = self._tensors[name]
        return tensor


def to_float32(tensor: torch.Tensor) -> NDArray[np.float32]:
    """The tensor as a NumPy array of float32, without a copy when it is one already."""
    array: NDArray[np.float32] = tensor.detach().to(torch.float32).contiguous().numpy()
    return array


def _dtype_name(tensor: torch.Tensor) -> str:
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
