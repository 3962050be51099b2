"""Reads a model's `config.json` and refuses a damaged one, before any weight is read.

Whatever transformers raises over a configuration is the configuration's fault: its strict
dataclasses, its tables of activations and its model classes each have exceptions of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from la_export.checkpoint.features import rope_parameters
from la_export.checkpoint.sources import ModelSource
from la_runtime.errors import CheckpointError

__all__ = ["check_token_ids", "load_config", "make_skeleton", "read_config_fields"]


def read_config_fields(source: ModelSource) -> dict[str, Any]:
    """The raw `config.json`.

    Raises:
        CheckpointError: it is no JSON object.
    """
    path = source.folder / "config.json"
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source.origin}: config.json cannot be read ({error})") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{source.origin}: config.json is not a JSON object")
    return fields


def load_config(source: ModelSource) -> PreTrainedConfig:
    """The configuration as transformers understands it.

    Raises:
        CheckpointError: it cannot be read, or a value that export needs is not of its kind.
    """
    with _blame_configuration(source.origin):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            source.folder,
            gguf_file=source.gguf_name,
            trust_remote_code=False,
            local_files_only=True,
        )
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 2:
        raise CheckpointError(
            f"{source.origin}: max_position_embeddings is {positions!r}, expected 2 or more"
        )
    rope = getattr(config, "rope_parameters", None)
    is_object = isinstance(rope, dict) and bool(rope)
    parts = rope_parameters(config).values() if is_object else ()
    if not parts or not all(isinstance(part.get("rope_theta"), int | float) for part in parts):
        raise CheckpointError(
            f"{source.origin}: rope_parameters is {rope!r:.80}, expected an object with a "
            "number rope_theta"
        )
    check_token_ids(config.eos_token_id, f"{source.origin}: eos_token_id of config.json")
    return config


def make_skeleton(origin: str, config: PreTrainedConfig) -> PreTrainedModel:
    """The model without its weights: every module and every name, no memory.

    Args:
        origin: where the configuration comes from, for messages.
        config: of the model.

    Raises:
        CheckpointError: no model can be made of this configuration.
    """
    with _blame_configuration(origin), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def check_token_ids(value: object, where: str) -> tuple[int, ...]:
    """One id, a list of ids or null, as a tuple.

    Raises:
        CheckpointError: anything else.
    """
    ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
    if any(not isinstance(token_id, int) or isinstance(token_id, bool) for token_id in ids):
        raise CheckpointError(f"{where} is {value!r:.80}, expected a number or a list of numbers")
    return tuple(ids)


@contextmanager
def _blame_configuration(origin: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        if isinstance(error, KeyError) or not reason:
            reason = f"{type(error).__name__} {reason}".strip()
        raise CheckpointError(f"{origin}: its configuration is not valid ({reason})") from error
