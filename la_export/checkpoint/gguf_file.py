"""Reads GGUF files: their header, their quantization, and the whole dequantized model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Final

from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map

from la_export.checkpoint.features import check_features
from la_runtime.errors import CheckpointError, UnsupportedModelError

__all__ = ["NO_QUANTIZATION", "check_gguf", "check_gguf_tensors", "source_quantization"]

NO_QUANTIZATION: Final = "none"
# What transformers makes of other families' GGUF files is not tested here.
_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
_ROPE_FACTORS: Final = "rope_freqs.weight"
_UNQUANTIZED: Final = frozenset({"F64", "F32", "F16", "BF16"})


def check_gguf(path: Path) -> GGUFReader:
    """Read the header and refuse an architecture that is not supported.

    Raises:
        CheckpointError: not a GGUF file, or a truncated one.
        UnsupportedModelError: its architecture is not supported.
    """
    try:
        reader = GGUFReader(path)
        architecture = _value(reader, "general.architecture")
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise CheckpointError(
            f"{path.name} is not a readable GGUF file ({error}); download it again"
        ) from error
    check_features(
        str(architecture), {"num_experts": _value(reader, f"{architecture}.expert_count")}
    )
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF files of architecture {architecture!r} are not read; supported are "
            f"{', '.join(_ARCHITECTURES)}: use the model's safetensors folder"
        )
    _check_rope(reader, str(architecture))
    return reader


def _check_rope(reader: GGUFReader, architecture: str) -> None:
    """Refuse rotary scaling, which transformers would drop from a GGUF file without a word."""
    kind = _value(reader, f"{architecture}.rope.scaling.type")
    scaled = kind not in (None, "", "none")
    if scaled or any(tensor.name == _ROPE_FACTORS for tensor in reader.tensors):
        raise UnsupportedModelError(
            f"this GGUF file scales its rotary embedding ({kind or _ROPE_FACTORS}), which cannot "
            "be read from GGUF; use the model's safetensors folder"
        )


def _value(reader: GGUFReader, key: str) -> object:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def check_gguf_tensors(reader: GGUFReader, parameters: Collection[str]) -> None:
    """Refuse tensors that transformers would drop from a GGUF file without a word.

    Args:
        reader: of a checked file.
        parameters: names that the model of its header reads.

    Raises:
        CheckpointError: a tensor has no place in the model.
        UnsupportedModelError: tensors of this architecture have no known names.

    Source: huggingface/transformers, `get_gguf_hf_weights_map`, for the way names are matched.
    """
    architecture = str(_value(reader, "general.architecture"))
    kind = next((kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if kind is None:
        raise UnsupportedModelError(
            f"GGUF files of architecture {architecture!r} cannot be read; "
            "use the model's safetensors folder"
        )
    blocks = _value(reader, f"{architecture}.block_count")
    name_map = get_tensor_name_map(kind, blocks if isinstance(blocks, int) else 0)
    read = {
        f"{name_map.get_name(parameter.removesuffix(suffix))}{suffix}"
        for parameter in parameters
        for suffix in (".weight", ".bias")
        if parameter.endswith(suffix)
    }
    unread = sorted({tensor.name for tensor in reader.tensors} - read)
    if unread:
        raise CheckpointError(
            f"this GGUF file has {len(unread)} tensors that the model of its header does not "
            f"read, first {unread[0]}; use the model's safetensors folder"
        )


def source_quantization(reader: GGUFReader) -> str:
    """The quantized type that most tensors are stored in, such as `Q4_1`, or `none`."""
    kinds = Counter(
        tensor.tensor_type.name
        for tensor in reader.tensors
        if tensor.tensor_type.name not in _UNQUANTIZED
    )
    return kinds.most_common(1)[0][0] if kinds else NO_QUANTIZATION
