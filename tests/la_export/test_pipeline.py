from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from la_export import pipeline
from la_export.checkpoint import Checkpoint
from la_export.graph.export import optimize_graph
from la_export.graph.step_graph import StepGraph
from la_export.pipeline import BuildOptions, BuildReport, Stage, StageReport, build
from la_runtime.bundle import GRAPH_PATH, MANIFEST_NAME, open_bundle
from la_runtime.errors import CheckError, CheckpointError, HostError, LookaheadError, UsageError

BUNDLE_FILES = {
    "chat_template.jinja",
    "generation_config.json",
    "lookahead.safetensors",
    "onnx/model.onnx",
    "onnx/model.onnx.data",
    "onnx/model.ort-cpu.onnx",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def report(report_of: Callable[[tuple[str, bool]], BuildReport]) -> BuildReport:
    return report_of(("qwen2", True))


@pytest.fixture
def skip_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the slow stages in tests of what comes after them."""
    monkeypatch.setattr(pipeline, "trace_model", lambda *_: SimpleNamespace())
    monkeypatch.setattr(pipeline, "optimize_graph", lambda _: None)


def _options(checkpoint: Path, out: Path, **changes: Any) -> BuildOptions:
    return BuildOptions(model=str(checkpoint), lookahead_lengths=(2,), out=out, **changes)


def _raise_while_writing(error: BaseException) -> Callable[..., Path]:
    def write(_: object, __: object, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(b"half")
        raise error

    return write


def _entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_bundle_holds_the_listed_files_and_no_other(report: BuildReport) -> None:
    found = {
        path.relative_to(report.bundle).as_posix()
        for path in report.bundle.rglob("*")
        if path.is_file()
    }
    assert found == BUNDLE_FILES | {MANIFEST_NAME}
    assert set(report.manifest.files) == BUNDLE_FILES


def test_manifest_states_the_model(report: BuildReport) -> None:
    manifest = report.manifest
    assert manifest.lookahead_lengths == (2, 4)
    assert manifest.contract.k_max == 4
    assert manifest.contract.num_kv_heads == 2
    assert manifest.contract.vocab_size == 320
    assert manifest.model.family == "qwen2"
    assert manifest.model.context == 256
    assert manifest.model.tied_embeddings
    assert manifest.model.eos_token_ids == (2,)
    assert manifest.model.source_quantization == "none"
    assert manifest.lookahead.origin == "untuned"
    assert {"torch", "transformers", "onnx", "onnxscript", "onnx-ir"} <= set(manifest.built_with)


def test_stages_are_reported_in_order(report: BuildReport) -> None:
    assert [entry.stage for entry in report.stages] == list(Stage)
    assert report.peak_rss_bytes == report.stages[-1].peak_rss_bytes > 0


def test_plain_only_bundle_has_one_vector() -> None:
    assert BuildOptions(model="x", lookahead_lengths=(0,)).k_max == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lookahead_lengths": ()}, "no k was given"),
        ({"lookahead_lengths": (-1,)}, r"--k -1 is out of range; expected 0 to 16"),
        ({"lookahead_lengths": (4, 17)}, r"--k 17 is out of range"),
        ({"precision": "fp8"}, r"--precision 'fp8' is not known"),
        ({"model": ""}, r"--model is empty"),
        ({"threads": 0}, r"--threads 0 is out of range"),
    ],
)
def test_impossible_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BuildOptions(**({"model": "x", "lookahead_lengths": (2,)} | changes))


def test_folder_that_is_no_bundle_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="exists and is a folder that is no bundle"):
        build(_options(Path("/no/such/model"), tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_too_small_disk_is_noticed_before_the_long_work(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    monkeypatch.setattr(pipeline, "trace_model", lambda *_: pytest.fail("the long work began"))
    with pytest.raises(HostError, match="not enough disk space"):
        build(_options(make_checkpoint(), tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_unusable_tokenizer_is_refused_before_the_long_work(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "trace_model", lambda *_: pytest.fail("the long work began"))
    monkeypatch.setattr(Checkpoint, "source_digest", lambda _: pytest.fail("weights were read"))
    folder = make_checkpoint()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        build(_options(folder, tmp_path / "out"))


def test_seconds_cover_the_stages_and_what_is_between_them(report: BuildReport) -> None:
    assert report.seconds > sum(entry.seconds for entry in report.stages)


@pytest.mark.usefixtures("skip_tracing")
@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), HostError, "No space left on device"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
    ids=["disk full", "Ctrl-C"],
)
def test_broken_off_build_leaves_nothing(
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: type[BaseException],
    message: str,
) -> None:
    monkeypatch.setattr(pipeline, "write_graph", _raise_while_writing(error))
    engines = tmp_path / "engines"
    with pytest.raises(raised, match=message):
        build(_options(make_checkpoint(), engines / "out"))
    assert _entries(engines) == set()


@pytest.mark.usefixtures("skip_tracing")
def test_old_bundle_survives_a_failed_rebuild(
    report: BuildReport,
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = _entries(report.bundle.parent)
    monkeypatch.setattr(
        pipeline, "write_graph", _raise_while_writing(OSError(errno.ENOSPC, "full"))
    )
    with pytest.raises(HostError):
        build(_options(make_checkpoint(), report.bundle))
    assert open_bundle(report.bundle).manifest == report.manifest
    assert _entries(report.bundle.parent) == before


def test_disk_that_fills_up_while_weights_are_streamed_is_one_clear_error(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real writer, stopped at a tensor in the middle."""
    reads = list[str]()
    read = Checkpoint.read

    def read_until_full(self: Checkpoint, parameter: str) -> object:
        reads.append(parameter)
        if len(reads) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return read(self, parameter)

    monkeypatch.setattr(Checkpoint, "read", read_until_full)
    with pytest.raises(HostError, match=r"could not write the bundle .*No space left on device"):
        build(_options(make_checkpoint(num_hidden_layers=1), tmp_path / "engines" / "out"))
    assert _entries(tmp_path / "engines") == set()


def test_planted_graph_fault_gives_no_bundle(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exchange two projections of equal shape: the file is valid, the model is not."""

    def optimize_wrongly(step_graph: StepGraph) -> None:
        optimize_graph(step_graph)
        weights = step_graph.weights
        gate, up = (f"model.layers.0.mlp.{part}_proj.weight.transposed" for part in ("gate", "up"))
        weights[gate], weights[up] = weights[up], weights[gate]

    monkeypatch.setattr(pipeline, "optimize_graph", optimize_wrongly)
    with pytest.raises(CheckError, match="no bundle was written"):
        build(_options(make_checkpoint(num_hidden_layers=1), tmp_path / "engines" / "out"))
    assert _entries(tmp_path / "engines") == set()


def test_progress_hears_of_every_stage_and_stops_at_the_one_that_fails(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Listener:
        def __init__(self) -> None:
            self.started = list[Stage]()
            self.finished = list[Stage]()

        def note(self, text: str) -> None:
            pytest.fail(f"nothing is to be said about an unknown folder: {text}")

        def start(self, stage: Stage) -> None:
            self.started.append(stage)

        def finish(self, report: StageReport) -> None:
            self.finished.append(report.stage)

    def refuse(*_: object) -> None:
        raise LookaheadError("no")

    monkeypatch.setattr(pipeline, "trace_model", refuse)
    listener = Listener()
    with pytest.raises(LookaheadError):
        build(_options(make_checkpoint(), tmp_path / "out"), listener)
    assert listener.started == [Stage.RESOLVE, Stage.TRACE]
    assert listener.finished == [Stage.RESOLVE]


def test_graph_path_is_where_the_manifest_says(report: BuildReport) -> None:
    assert report.manifest.graph == GRAPH_PATH
    assert (report.bundle / GRAPH_PATH).is_file()
