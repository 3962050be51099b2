"""A tiny bundle for the tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from la_export.pipeline import BuildReport


@pytest.fixture(scope="session")
def tiny(report_of: Callable[..., BuildReport], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle's folder; not to be changed."""
    built = report_of(("llama", False)).bundle
    return Path(shutil.copytree(built, tmp_path_factory.mktemp("speed") / "bundle"))


@pytest.fixture
def bundle(tiny: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(tiny, tmp_path / "bundle"))
