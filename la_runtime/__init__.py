"""Torch-free runtime for bundles made by `la_export`: lossless multi-token decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from la_runtime.conversation import Conversation
    from la_runtime.generation import DecodeState, Engine
    from la_runtime.replies import AsyncGenerationStream, GenerationStream
    from la_runtime.results import Chunk, GenerationResult, TokenLogprobs
    from la_runtime.sampling import SamplingParams
    from la_runtime.sequence import StepResult
    from la_runtime.stats import GenerationStats, StepEvent
    from la_runtime.stopping import FinishReason

__all__ = [
    "AsyncGenerationStream",
    "Chunk",
    "Conversation",
    "DecodeState",
    "Engine",
    "FinishReason",
    "GenerationResult",
    "GenerationStats",
    "GenerationStream",
    "SamplingParams",
    "StepEvent",
    "StepResult",
    "TokenLogprobs",
]

_HOMES = {
    "AsyncGenerationStream": "la_runtime.replies",
    "Chunk": "la_runtime.results",
    "Conversation": "la_runtime.conversation",
    "DecodeState": "la_runtime.generation",
    "Engine": "la_runtime.generation",
    "FinishReason": "la_runtime.stopping",
    "GenerationResult": "la_runtime.results",
    "GenerationStats": "la_runtime.stats",
    "GenerationStream": "la_runtime.replies",
    "SamplingParams": "la_runtime.sampling",
    "StepEvent": "la_runtime.stats",
    "StepResult": "la_runtime.sequence",
    "TokenLogprobs": "la_runtime.results",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import la_runtime` stays instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'la_runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
