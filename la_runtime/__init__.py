"""Torch-free runtime for bundles made by `la_export`: lossless multi-token decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from la_runtime.generation import (
        Chunk,
        DecodeState,
        Engine,
        GenerationResult,
        GenerationStream,
        TokenLogprobs,
    )
    from la_runtime.sampling import SamplingParams
    from la_runtime.sequence import StepResult
    from la_runtime.stats import GenerationStats
    from la_runtime.stopping import FinishReason

__all__ = [
    "Chunk",
    "DecodeState",
    "Engine",
    "FinishReason",
    "GenerationResult",
    "GenerationStats",
    "GenerationStream",
    "SamplingParams",
    "StepResult",
    "TokenLogprobs",
]

_HOMES = {
    "Chunk": "la_runtime.generation",
    "DecodeState": "la_runtime.generation",
    "Engine": "la_runtime.generation",
    "FinishReason": "la_runtime.stopping",
    "GenerationResult": "la_runtime.generation",
    "GenerationStats": "la_runtime.stats",
    "GenerationStream": "la_runtime.generation",
    "SamplingParams": "la_runtime.sampling",
    "StepResult": "la_runtime.sequence",
    "TokenLogprobs": "la_runtime.generation",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import la_runtime` stays instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'la_runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
