"""A tiny bundle, built once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from la_runtime.generation import Engine
from tests.tiny_models import build_tiny_bundle


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_bundle(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tied_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose embedding table is its head, too."""
    return build_tiny_bundle(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="session")
def engine(tiny_bundle: Path):
    with Engine.open(tiny_bundle, threads=1) as engine:
        yield engine
