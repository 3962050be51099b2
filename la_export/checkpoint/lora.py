"""Merges a PEFT adapter into the weights of the model it was trained for.

    W' = W + scaling * B A        scaling = alpha / r, or alpha / sqrt(r) with rank-stabilized LoRA

(Hu et al. 2021; names and options as PEFT writes them.) Nothing of an adapter is left in a bundle.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from la_export.checkpoint.tensors import SafetensorsTensors, to_float32
from la_runtime.errors import CheckpointError, UnsupportedModelError, UsageError

__all__ = ["LoraAdapter", "read_lora"]

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PICKLES: Final = "adapter_model.bin"
_PREFIX: Final = "base_model.model."
_PART: Final = re.compile(r"(.+)\.lora_([AB])\.weight")
# What would change the model beside the products of two matrices, by the field that says so.
_UNSUPPORTED: Final[Mapping[str, str]] = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules",
    "lora_bias": "biases",
    "trainable_token_indices": "trained tokens",
    "layer_replication": "replicated layers",
    "target_parameters": "parameters of no layer",
    "alora_invocation_tokens": "tokens that switch it on",
    "loftq_config": "weights quantized beside it",
    "corda_config": "weights taken apart beside it",
    "eva_config": "ranks of each layer's own",
}
# How its matrices began, where that left the model's weights as they are; other ways took a part of
# them out, which a file does not say.
_HARMLESS_BEGINNINGS: Final = (None, True, False, "gaussian", "orthogonal")
_PLAIN_PATTERN: Final = re.compile(r"[\w.*|()\[\]-]{1,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """An adapter, its matrices still in their file.

    Args:
        name: of its folder.
        scalings: factor of each parameter that it changes.
        tensors: of its file.
        names: of matrices A and B of each parameter.
        digest: SHA-256 of its configuration and its file.
    """

    name: str
    scalings: Mapping[str, float]
    tensors: SafetensorsTensors
    names: Mapping[str, tuple[str, str]]
    digest: str

    def merge(self, parameter: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """The parameter with what the adapter adds to it: in float32, rounded once at the end.

        Args:
            parameter: its name.
            weight: [out_features, in_features] as the model has it.
        """
        if parameter not in self.names:
            return weight
        first, second = (to_float32(self.tensors.load(name)) for name in self.names[parameter])
        product = second.astype(np.float64) @ first.astype(np.float64)
        merged: NDArray[np.float32] = (weight + self.scalings[parameter] * product).astype(
            np.float32
        )
        return merged

    @torch.no_grad()
    def merge_into(self, model: torch.nn.Module) -> None:
        """Change a model's parameters in place."""
        for parameter in self.names:
            held = model.get_parameter(parameter)
            merged = self.merge(parameter, held.detach().float().numpy())
            held.copy_(torch.from_numpy(merged))


def read_lora(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> LoraAdapter:
    """Open an adapter and see that it belongs to a model.

    Args:
        folder: with `adapter_config.json` and `adapter_model.safetensors`.
        shapes: of the model's parameters, by name.

    Raises:
        UsageError: there is no such folder, or no adapter in it.
        UnsupportedModelError: it is another kind of adapter.
        CheckpointError: it is damaged, or another model's.
    """
    folder = folder.resolve()  # its name is what is shown, and kept
    fields = _read_config(folder)
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"--lora {folder.name} is an adapter of kind {kind!r}; only LORA is merged"
        )
    for field, feature in _UNSUPPORTED.items():
        if fields.get(field):
            raise UnsupportedModelError(
                f"--lora {folder.name} has {feature} ({field}), which is not merged; "
                "merge it with PEFT and build from that folder"
            )
    if fields.get("init_lora_weights") not in _HARMLESS_BEGINNINGS:
        raise UnsupportedModelError(
            f"--lora {folder.name} began as {fields['init_lora_weights']!r} (init_lora_weights), "
            "which changes the model's own weights too; merge it with PEFT and build from that "
            "folder"
        )
    if fields.get("bias", "none") != "none" or fields.get("fan_in_fan_out"):
        raise UnsupportedModelError(
            f"--lora {folder.name} changes biases or transposed weights, which are not merged; "
            "merge it with PEFT and build from that folder"
        )
    path = folder / _WEIGHTS
    if not path.is_file():
        hint = (
            f"{_PICKLES} is a pickle, which is not read: save it with safe_serialization"
            if (folder / _PICKLES).is_file()
            else "copy it again"
        )
        raise CheckpointError(f"--lora {folder.name} has no {_WEIGHTS}; {hint}")
    tensors = SafetensorsTensors((path,))
    names = _pair(tensors, folder.name)
    ranks = {
        parameter: _check_pair(tensors, parameter, pair, shapes, folder.name)
        for parameter, pair in names.items()
    }
    digest = hashlib.sha256((folder / _CONFIG).read_bytes())
    digest.update(path.read_bytes())
    return LoraAdapter(
        name=folder.name,
        scalings={n: _scaling(fields, n, rank, folder.name) for n, rank in ranks.items()},
        tensors=tensors,
        names=names,
        digest=digest.hexdigest(),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    if not path.is_file():
        raise UsageError(
            f"--lora {folder} is no folder with an {_CONFIG}; give one that PEFT saved"
        )
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{_CONFIG} of --lora {folder.name} is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{_CONFIG} of --lora {folder.name} is not a JSON object")
    return fields


def _pair(tensors: SafetensorsTensors, adapter: str) -> dict[str, tuple[str, str]]:
    """Matrices A and B by the parameter that they change."""
    found: dict[str, dict[str, str]] = {}
    for name in sorted(tensors.names()):
        part = _PART.fullmatch(name.removeprefix(_PREFIX))
        if part is None:
            raise CheckpointError(
                f"--lora {adapter} has a tensor {name}, which is no matrix A or B of a layer; "
                "merge it with PEFT and build from that folder"
            )
        found.setdefault(f"{part[1]}.weight", {})[part[2]] = name
    for parameter, parts in found.items():
        if len(parts) != len("AB"):
            raise CheckpointError(f"--lora {adapter} has half of a pair for {parameter}")
    if not found:
        raise CheckpointError(f"--lora {adapter} holds no tensors; copy it again")
    return {parameter: (parts["A"], parts["B"]) for parameter, parts in found.items()}


def _check_pair(
    tensors: SafetensorsTensors,
    parameter: str,
    pair: tuple[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    adapter: str,
) -> int:
    """Its rank."""
    if parameter not in shapes:
        raise CheckpointError(
            f"--lora {adapter} changes {parameter}, which this model does not have; it belongs to "
            "another model"
        )
    first, second = (tuple(tensors.load(name).shape) for name in pair)
    fits = len(first) == len(second) == 2 and 0 < first[0] == second[1]
    if not fits or (second[0], first[1]) != shapes[parameter]:
        raise CheckpointError(
            f"--lora {adapter} has matrices of shapes {list(first)} and {list(second)} for "
            f"{parameter}, whose shape is {list(shapes[parameter])}; it belongs to another model"
        )
    return first[0]


def _scaling(fields: Mapping[str, Any], parameter: str, rank: int, adapter: str) -> float:
    """Alpha may be given for some layers apart, the first pattern counts; the rank is the
    matrices'.
    """
    layer = parameter.removesuffix(".weight")
    patterns = fields.get("alpha_pattern") or {}
    alpha = fields.get("lora_alpha", rank)
    if not isinstance(patterns, dict) or not _are_plain(patterns):
        raise CheckpointError(
            f"alpha_pattern of --lora {adapter} is {patterns!r:.80}, expected names of layers and "
            "numbers"
        )
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):
            alpha = value
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(
            f"lora_alpha of --lora {adapter} is {alpha!r:.80}, expected a finite number"
        )
    return float(alpha) / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def _are_plain(patterns: Mapping[Any, Any]) -> bool:
    """Whether they are regular expressions as PEFT writes them, and none that takes for ever."""
    for pattern in patterns:
        if not isinstance(pattern, str) or _PLAIN_PATTERN.fullmatch(pattern) is None:
            return False
        try:
            re.compile(pattern)
        except re.error:
            return False
    return True
