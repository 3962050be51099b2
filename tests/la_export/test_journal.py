"""Builds that are killed go on where they were, and every build gives the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from la_export.options import BuildOptions, Precision
from la_export.pipeline import SilentProgress, build
from la_export.stages import Stage
from la_runtime.bundle import MANIFEST_NAME, abandoned_bytes, open_bundle, write_bundle
from tests.tiny_models import make_tiny_checkpoint

# Killed as it enters the last of the arguments, a function of the pipeline.
KILLED = """
import os, signal, sys
from pathlib import Path
from la_export import pipeline
from la_export.options import BuildOptions, Precision

model, out, precision, where = sys.argv[1:]

def die(*_, **__):
    (Path(out).parent / "half.onnx").touch()
    for work in Path(out).parent.glob(".*.partial"):
        (work / "onnx").mkdir(exist_ok=True)
        (work / "onnx" / ".twin.onnx").write_bytes(b"what a check leaves")
    os.kill(os.getpid(), signal.SIGKILL)

setattr(pipeline, where, die)
pipeline.build(
    BuildOptions(
        model=model,
        lookahead_lengths=(2,),
        precision=Precision(precision),
        out=Path(out),
        threads=1,
    )
)
"""
STAGES = {
    "calibrate": ("trace",),
    "write_cpu_variant": ("trace", "calibrate"),
    "check_weights": ("trace", "calibrate", "weights"),
    "seal_bundle": ("trace", "calibrate", "weights", "check", "plans"),
}


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.lines = list[str]()
        self.started = list[Stage]()

    def note(self, text: str) -> None:
        self.lines.append(text)

    def start(self, stage: Stage) -> None:
        self.started.append(stage)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("model") / "checkpoint", "llama", num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that nothing came in the way of."""
    return build(options(checkpoint, tmp_path_factory.mktemp("whole") / "bundle")).bundle


def options(checkpoint: Path, out: Path, precision: Precision = Precision.INT8) -> BuildOptions:
    return BuildOptions(
        model=str(checkpoint), lookahead_lengths=(2,), precision=precision, out=out, threads=1
    )


def kill_build(checkpoint: Path, out: Path, where: str) -> None:
    command = [sys.executable, "-c", KILLED, str(checkpoint), str(out), "int8", where]
    # Sets of texts have another order in another process.
    environment = os.environ | {"PYTHONHASHSEED": "12"}
    assert subprocess.run(command, check=False, env=environment).returncode == -signal.SIGKILL
    (out.parent / "half.onnx").unlink()


def contents(bundle: Path) -> dict[str, bytes]:
    """Every file but the manifest, and that without its date."""
    files = {
        path.relative_to(bundle).as_posix(): path.read_bytes()
        for path in bundle.rglob("*")
        if path.is_file() and path.name != MANIFEST_NAME
    }
    manifest = json.loads((bundle / MANIFEST_NAME).read_text())
    del manifest["created_utc"]
    return files | {MANIFEST_NAME: json.dumps(manifest).encode()}


@pytest.mark.parametrize("where", STAGES)
def test_a_killed_build_goes_on_from_the_last_finished_stage(
    checkpoint: Path, whole: Path, tmp_path: Path, where: str
) -> None:
    out = tmp_path / "killed" / "bundle"
    out.parent.mkdir()
    kill_build(checkpoint, out, where)
    assert not out.exists()
    progress = Notes()
    report = build(options(checkpoint, out), progress)
    (line,) = progress.lines
    assert line == f"goes on from a build that was cut off; it had done: {', '.join(STAGES[where])}"
    assert not {stage.value for stage in progress.started} & set(STAGES[where])
    open_bundle(report.bundle)
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.INT4])
def test_two_builds_give_the_same_bytes(
    checkpoint: Path, tmp_path: Path, precision: Precision
) -> None:
    """Those in int8 are above, built in two processes."""
    bundles = [
        build(options(checkpoint, tmp_path / name, precision)).bundle for name in ("one", "two")
    ]
    first, second = map(contents, bundles)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_a_build_of_something_else_begins_anew(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed" / "bundle"
    out.parent.mkdir()
    kill_build(checkpoint, out, "seal_bundle")
    progress = Notes()
    build(options(checkpoint, out, Precision.FP32), progress)
    assert progress.lines == []
    assert Stage.TRACE in progress.started
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]


def test_another_configuration_or_tokenizer_begins_anew(
    checkpoint: Path, whole: Path, tmp_path: Path
) -> None:
    """None of what changes here is in the weights, or among the manifest's facts."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    out = tmp_path / "killed" / "bundle"
    out.parent.mkdir()
    kill_build(model, out, "seal_bundle")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-2}))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    progress = Notes()
    build(options(model, out), progress)
    assert progress.lines == []
    graph = "onnx/model.onnx"
    assert (out / graph).read_bytes() != (whole / graph).read_bytes()


def test_a_journal_whose_files_are_gone_is_none(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed" / "bundle"
    out.parent.mkdir()
    kill_build(checkpoint, out, "seal_bundle")
    (work,) = out.parent.glob(".*.partial")
    (work / "onnx" / "model.onnx.data").write_bytes(b"")
    progress = Notes()
    build(options(checkpoint, out), progress)
    assert progress.lines == []


def test_another_user_s_folder_is_left_alone(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "killed" / "bundle"
    out.parent.mkdir()
    kill_build(checkpoint, out, "seal_bundle")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    progress = Notes()
    build(options(checkpoint, out), progress)
    assert progress.lines == []


@pytest.mark.parametrize("damage", [b"{}", b"\xff"])
def test_a_damaged_journal_is_none(checkpoint: Path, tmp_path: Path, damage: bytes) -> None:
    out = tmp_path / "killed" / "bundle"
    out.parent.mkdir()
    kill_build(checkpoint, out, "seal_bundle")
    (journal,) = out.parent.glob(".*.partial/.journal/build.json")
    journal.write_bytes(damage)
    progress = Notes()
    build(options(checkpoint, out), progress)
    assert progress.lines == []


def test_disk_that_a_killed_build_holds_counts_as_free_once(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    work = tmp_path / ".bundle.dead.partial"
    (work / "onnx" / ".twin.x").mkdir(parents=True)
    (work / "onnx" / "model.onnx.data").write_bytes(bytes(1000))
    os.link(work / "onnx" / "model.onnx.data", work / "onnx" / ".twin.x" / "model.onnx.data")
    (work / "tokenizer.json").write_bytes(bytes(10))
    assert abandoned_bytes(out) == 1010
    with write_bundle(out, adopts=lambda _: True) as adopted:
        assert adopted == work
        assert abandoned_bytes(out) == 0  # it is in use
        (adopted / MANIFEST_NAME).write_text("{}")
