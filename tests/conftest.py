"""Settings of the whole test run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

# Property tests draw the same examples every time and have no deadline: the machine's load must
# never decide a result. `HYPOTHESIS_PROFILE=search` looks for new counterexamples.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# No test may reach a hub; transformers then says so at once instead of waiting for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def documented_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny bundle for the code of README and docs/."""
    from tests.tiny_models import build_tiny_bundle  # torch, which few tests need

    folder = tmp_path_factory.mktemp("documented")
    return build_tiny_bundle(folder, max_position_embeddings=1024)


@pytest.fixture
def workplace(documented_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a copy of it where the pages have their bundle."""
    shutil.copytree(documented_bundle, tmp_path / "engines" / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def smollm2_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M for k of 2 and 4; building it takes most of a minute."""
    from la_export.pipeline import BuildOptions, SilentProgress, build  # torch, likewise

    out = tmp_path_factory.mktemp("real") / "smollm2-135m"
    options = BuildOptions(model="smollm2-135m", lookahead_lengths=(2, 4), out=out)
    return build(options, SilentProgress()).bundle
