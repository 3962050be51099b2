"""The commands as they are written in the documentation, for every known name on the hub.

A tiny model of the name's family lies where the hub's library keeps a download; nothing is fetched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from la_export.checkpoint.known_models import KNOWN_MODELS, HubModel
from la_runtime import Engine
from tests.tiny_models import make_tiny_checkpoint

HUB_MODELS = tuple(model for model in KNOWN_MODELS if isinstance(model.place, HubModel))
FAMILIES = {"llama-7b": "llama", "qwen-7b": "qwen2", "deepseek-7b": "llama"}


def lay_into_cache(cache: Path, place: HubModel, family: str) -> None:
    """As `huggingface_hub` lays a snapshot down."""
    folder = cache / ("models--" + place.repository.replace("/", "--"))
    snapshot = folder / "snapshots" / place.revision
    make_tiny_checkpoint(snapshot, family, max_position_embeddings=64)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(place.revision)


def test_every_known_model_of_the_hub_has_a_family_here() -> None:
    assert {model.name for model in HUB_MODELS} == FAMILIES.keys()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_signature_command_builds_offline_what_is_in_the_cache(
    name: str, tmp_path: Path
) -> None:
    (model,) = [model for model in HUB_MODELS if model.name == name]
    assert isinstance(model.place, HubModel)
    lay_into_cache(tmp_path / "hub", model.place, FAMILIES[name])
    program = shutil.which("la-export", path=Path(sys.executable).parent)
    assert program is not None, "the command is installed beside the interpreter"

    done = subprocess.run(
        [program, *f"build --model {name} --k 8".split()],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    with Engine.open(tmp_path / "engines" / name, threads=1) as engine:
        assert engine.bundle.manifest.lookahead_lengths == (8,)
        assert engine.bundle.manifest.model.revision == model.place.revision
        plain, ahead = (
            engine.generate("One, two", k=k, max_new_tokens=8, ignore_eos=True) for k in (0, 8)
        )
    assert len(plain.token_ids) == 8
    assert plain.token_ids == ahead.token_ids


def test_without_a_download_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    program = shutil.which("la-export", path=Path(sys.executable).parent)
    assert program is not None, "the command is installed beside the interpreter"

    done = subprocess.run(
        [program, *["build", "--model", "llama-7b", "--k", "8"]],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 4, done.stderr
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert "offline mode is set" in line
    assert not (tmp_path / "engines").exists()
