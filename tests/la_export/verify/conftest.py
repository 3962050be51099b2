"""A tiny bundle that every test of the ladder may read and none may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import build_tiny_bundle


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with `bundle`, k 2 and 4, and the `checkpoint` it was made from."""
    folder = tmp_path_factory.mktemp("ladder")
    build_tiny_bundle(folder)
    return folder
