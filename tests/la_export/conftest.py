"""Tiny models and bundles, built once for the whole run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from la_export.options import Precision
from la_export.pipeline import BuildOptions, BuildReport, build
from la_runtime.contract import CacheForm
from tests.tiny_models import make_tiny_checkpoint

# Family and whether the head reads the embedding table.
Variant = tuple[str, bool]
# How a graph holds its numbers and its cache.
Form = tuple[Precision, CacheForm]
VARIANTS: tuple[Variant, ...] = (
    ("llama", True),
    ("llama", False),
    ("mistral", False),
    ("qwen2", True),
    ("qwen3", False),
)


@pytest.fixture(params=VARIANTS, ids=lambda variant: f"{variant[0]}-{variant[1]}")
def variant(request: pytest.FixtureRequest) -> Variant:
    """Each family, tied and untied."""
    found: Variant = request.param
    return found


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], Path]:
    """The checkpoint folder of a variant, written on first use."""
    folders: dict[Variant, Path] = {}

    def find(variant: Variant) -> Path:
        if variant not in folders:
            family, tied = variant
            folder = tmp_path_factory.mktemp(f"{family}-{tied}") / "checkpoint"
            folders[variant] = make_tiny_checkpoint(folder, family, tie_word_embeddings=tied)
        return folders[variant]

    return find


@pytest.fixture(scope="session")
def report_of(checkpoint_of: Callable[[Variant], Path]) -> Callable[..., BuildReport]:
    """The report of a variant's build in a form, float32 and `concat` by default, made once."""
    reports: dict[tuple[Variant, Form], BuildReport] = {}

    def find(variant: Variant, form: Form = (Precision.FP32, CacheForm.CONCAT)) -> BuildReport:
        if (variant, form) not in reports:
            precision, cache_form = form
            checkpoint = checkpoint_of(variant)
            reports[variant, form] = build(
                BuildOptions(
                    model=str(checkpoint),
                    lookahead_lengths=(4, 2, 4),
                    precision=precision,
                    cache_form=cache_form,
                    out=checkpoint.parent / f"bundle-{precision}-{cache_form}",
                )
            )
        return reports[variant, form]

    return find


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint with configuration overrides into a fresh folder."""

    def make(family: str = "llama", **overrides: Any) -> Path:
        return make_tiny_checkpoint(tmp_path / "checkpoint", family, **overrides)

    return make
