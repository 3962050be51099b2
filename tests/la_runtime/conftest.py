"""A tiny bundle, built once per run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from la_runtime.contract import CacheForm
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
def tiny_bundle_of(
    tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, CacheForm], Path]:
    """The tiny bundle in a precision and cache form; each is built when first asked for."""

    @cache
    def build(precision: str, cache_form: CacheForm) -> Path:
        if (precision, cache_form) == ("fp32", CacheForm.CONCAT):
            return tiny_bundle
        folder = tmp_path_factory.mktemp(f"tiny-{precision}-{cache_form}")
        return build_tiny_bundle(folder, precision=precision, cache_form=cache_form)

    return build


@pytest.fixture(scope="session")
def engine(tiny_bundle: Path):
    with Engine.open(tiny_bundle, threads=1) as engine:
        yield engine
