"""Torch-free runtime for bundles made by `la_export`: lossless multi-token decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from la_runtime.generation import Chunk, DecodeState, Engine, GenerationResult
    from la_runtime.sampling import SamplingParams

__all__ = ["Chunk", "DecodeState", "Engine", "GenerationResult", "SamplingParams"]

_HOMES = {
    "Chunk": "la_runtime.generation",
    "DecodeState": "la_runtime.generation",
    "Engine": "la_runtime.generation",
    "GenerationResult": "la_runtime.generation",
    "SamplingParams": "la_runtime.sampling",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import la_runtime` stays instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'la_runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
