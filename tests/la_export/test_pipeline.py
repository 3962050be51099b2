from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from la_export import pipeline
from la_export.checkpoint import Checkpoint, facts
from la_export.graph.export import optimize_graph
from la_export.graph.step_graph import StepGraph
from la_export.journal import Journal
from la_export.options import Precision
from la_export.pipeline import (
    NO_PLANS,
    BuildOptions,
    BuildReport,
    SilentProgress,
    Stage,
    StageReport,
    build,
)
from la_export.plan import (
    PlanOptions,
    PlanReport,
    PlanSharing,
    PlanSource,
    PlansReport,
    Target,
)
from la_export.plan.flavors import FLAVORS
from la_export.plan.namespace import Choice, Installation, TensorRT
from la_export.plan.report import Compiled
from la_runtime.bundle import GRAPH_PATH, MANIFEST_NAME, open_bundle
from la_runtime.contract import Axis
from la_runtime.digests import hash_file
from la_runtime.errors import (
    CheckError,
    CheckpointError,
    HostError,
    LookaheadError,
    PlanError,
    UsageError,
)
from la_runtime.plans import AxisRange, PlanFacts, PlanProfile, PlanTarget
from la_runtime.storage import storage_dtype

# What finds out whether there is a builder; nothing of it is used.
_BUILDER = Installation(
    flavor=FLAVORS[PlanTarget.TRT_RTX],
    trt=cast(TensorRT, SimpleNamespace(__version__="1.2")),
    gpu=None,
)
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
    monkeypatch.setattr(pipeline, "trace_model", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(pipeline, "optimize_graph", lambda *_: None)
    monkeypatch.setattr(Journal, "write_trace", lambda *_: None)
    monkeypatch.setattr(Journal, "read_trace", lambda *_: SimpleNamespace())


def _options(checkpoint: Path, out: Path, **changes: Any) -> BuildOptions:
    return BuildOptions(model=str(checkpoint), lookahead_lengths=(2,), out=out, **changes)


def _raise_while_writing(error: BaseException) -> Callable[..., Path]:
    def write(_: object, __: object, folder: Path, **___: object) -> Path:
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
    stages = [stage for stage in Stage if stage not in (Stage.CALIBRATE, Stage.PLANS)]
    assert [entry.stage for entry in report.stages] == stages
    assert report.peak_rss_bytes == report.stages[-1].peak_rss_bytes > 0


def test_plain_only_bundle_has_one_vector() -> None:
    assert BuildOptions(model="x", lookahead_lengths=(0,)).k_max == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lookahead_lengths": ()}, "no k was given"),
        ({"lookahead_lengths": (-1,)}, r"--k -1 is out of range; expected 0 to 16"),
        ({"lookahead_lengths": (4, 17)}, r"--k 17 is out of range"),
        ({"prefill_chunk": 0}, r"--prefill-chunk 0 is out of range; expected at least 1"),
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
    monkeypatch.setattr(
        pipeline, "trace_model", lambda *_, **__: pytest.fail("the long work began")
    )
    with pytest.raises(HostError, match="not enough disk space"):
        build(_options(make_checkpoint(), tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("precision", "plans", "bytes_per_parameter"),
    [
        (Precision.FP32, NO_PLANS, 4),
        (Precision.FP16, NO_PLANS, 2),
        (Precision.BF16, NO_PLANS, 2),
        # The graph, and the weights once more in each plan.
        (Precision.FP16, PlanOptions(), 2 + 3 * 2),
        (Precision.FP32, PlanOptions(sharing=PlanSharing.SHARED), 4 + 4),
        (Precision.FP32, PlanOptions(is_stripped=True), 4),
        (Precision.FP32, PlanOptions(lookahead_lengths=(4, 8)), 4 + 2 * 4),
    ],
)
def test_disk_space_is_asked_for_all_that_lies_there_at_a_time(
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: Precision,
    plans: PlanOptions,
    bytes_per_parameter: int,
) -> None:
    has_builder = plans.target is not Target.ONNX
    monkeypatch.setattr(
        pipeline,
        "check_plan_options",
        lambda _: Choice(installation=_BUILDER if has_builder else None),
    )
    monkeypatch.setattr(facts, "_OTHER_BYTES", 0)
    monkeypatch.setattr(
        pipeline, "weight_bytes", lambda _, kind: 10**9 * storage_dtype(kind.dtype).itemsize
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    options = BuildOptions(
        model=str(make_checkpoint()),
        lookahead_lengths=(2, 4, 8),
        precision=precision,
        out=tmp_path / "out",
    )
    with pytest.raises(HostError, match=rf"about {bytes_per_parameter}\.0 GB are needed"):
        build(options, plans=plans)


def test_unusable_tokenizer_is_refused_before_the_long_work(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pipeline, "trace_model", lambda *_, **__: pytest.fail("the long work began")
    )
    monkeypatch.setattr(Checkpoint, "source_digest", lambda _: pytest.fail("weights were read"))
    folder = make_checkpoint()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        build(_options(folder, tmp_path / "out"))


def test_too_little_memory_is_said_before_the_long_work(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "available_memory_bytes", lambda: 10**8)
    monkeypatch.setattr(Checkpoint, "source_digest", lambda _: pytest.fail("weights were read"))
    with pytest.raises(HostError, match=r"not enough memory to build .*0\.1 GB are free"):
        build(_options(make_checkpoint(), tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_memory_that_the_kernel_does_not_tell_stops_nothing(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise HostError("this works on Linux only")

    monkeypatch.setattr(pipeline, "available_memory_bytes", refuse)

    def trace(*_: object, **__: object) -> None:
        raise RuntimeError("traced")

    monkeypatch.setattr(pipeline, "trace_model", trace)
    with pytest.raises(RuntimeError, match="traced"):
        build(_options(make_checkpoint(), tmp_path / "out"))


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
    assert not engines.exists()


def test_old_bundle_survives_a_failed_rebuild(
    report: BuildReport,
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    skip_tracing: None,  # behind the bundle that is built
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
    assert not (tmp_path / "engines").exists()


def test_planted_graph_fault_gives_no_bundle(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exchange two projections of equal shape: the file is valid, the model is not."""

    def optimize_wrongly(step_graph: StepGraph, precision: Precision, *_: object) -> None:
        optimize_graph(step_graph, precision)
        weights = step_graph.weights
        gate, up = (f"model.layers.0.mlp.{part}_proj.weight.transposed" for part in ("gate", "up"))
        weights[gate], weights[up] = weights[up], weights[gate]

    monkeypatch.setattr(pipeline, "optimize_graph", optimize_wrongly)
    with pytest.raises(CheckError, match="no bundle was written"):
        build(_options(make_checkpoint(num_hidden_layers=1), tmp_path / "engines" / "out"))
    assert not (tmp_path / "engines").exists()


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

    def refuse(*_: object, **__: object) -> None:
        raise LookaheadError("no")

    monkeypatch.setattr(pipeline, "trace_model", refuse)
    listener = Listener()
    with pytest.raises(LookaheadError):
        build(_options(make_checkpoint(), tmp_path / "out"), listener)
    assert listener.started == [Stage.RESOLVE, Stage.TRACE]
    assert listener.finished == [Stage.RESOLVE]


@pytest.fixture
def fake_builder(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PlanSource, PlanOptions]]:
    """Replaces TensorRT: writes a plan for each k, after the graph was checked."""
    asked = list[tuple[PlanSource, PlanOptions]]()

    def build_plans(
        root: Path, source: PlanSource, options: PlanOptions, *, progress: Any
    ) -> PlansReport:
        asked.append((source, options))
        reports = []
        for k in source.lookahead_lengths:
            facts = _make_plan_facts(root, source, k)
            progress.start_plan(facts.path)
            (root / facts.path).parent.mkdir(parents=True, exist_ok=True)
            (root / facts.path).write_bytes(b"plan of %d" % k)
            compiled = Compiled(bytes=9, seconds=0.1, num_attentions=1, layers=None)
            reports.append(PlanReport(facts=facts, compiled=compiled))
            progress.finish_plan(reports[-1])
        return PlansReport(plans=tuple(reports), skipped=("another",))

    monkeypatch.setattr(pipeline, "check_plan_options", lambda _: Choice(installation=_BUILDER))
    monkeypatch.setattr(pipeline, "build_plans", build_plans)
    return asked


def _make_plan_facts(root: Path, source: PlanSource, k: int) -> PlanFacts:
    every = AxisRange(least=1, likely=1, most=1)
    axes = {axis for spec in source.contract.inputs for axis in spec.axes if isinstance(axis, Axis)}
    return PlanFacts(
        path=f"trt/trt-rtx/k{k}.plan",
        target=PlanTarget.TRT_RTX,
        lookahead_lengths=(k,),
        graph_sha256=hash_file(root / source.graph).sha256,
        version="1.7",
        compute_capabilities=("SM89",),
        driver=None,
        profiles=(PlanProfile(name="step", k=k, axes=dict.fromkeys(axes, every)),),
    )


def test_plans_are_in_the_bundle_and_its_manifest(
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    fake_builder: list[tuple[PlanSource, PlanOptions]],
) -> None:
    options = BuildOptions(
        model=str(make_checkpoint(num_hidden_layers=1)),
        lookahead_lengths=(4, 2),
        out=tmp_path / "out",
    )
    plans = PlanOptions(max_batch=3)
    report = build(options, plans=plans)
    stages = [stage for stage in Stage if stage is not Stage.CALIBRATE]
    assert [stage.stage for stage in report.stages] == stages
    assert report.plans.skipped == ("another",)
    manifest = open_bundle(report.bundle).manifest
    assert manifest == report.manifest
    assert [plan.path for plan in manifest.plans] == [f"trt/trt-rtx/k{k}.plan" for k in (2, 4)]
    assert {plan.path for plan in manifest.plans} < set(manifest.files)
    assert {plan.graph_sha256 for plan in manifest.plans} == {manifest.files[GRAPH_PATH].sha256}
    ((source, asked),) = fake_builder
    assert asked is plans
    assert source == PlanSource.of(manifest)


def test_graph_that_fails_a_check_gets_no_plans(
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake_builder: list[tuple[PlanSource, PlanOptions]],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CheckError("differs")

    monkeypatch.setattr(pipeline, "check_parity", fail)
    with pytest.raises(CheckError):
        build(_options(make_checkpoint(num_hidden_layers=1), tmp_path / "out"), plans=PlanOptions())
    assert fake_builder == []


@pytest.mark.parametrize("target", [Target.AUTO, Target.TRT_RTX])
def test_graph_that_a_tensorrt_refuses_costs_the_bundle_only_when_that_was_named(
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: Target,
) -> None:
    def refuse(root: Path, *_: object, **__: object) -> PlansReport:
        (root / "trt" / "trt-rtx").mkdir(parents=True)
        (root / "trt" / "trt-rtx" / "k2.plan").write_bytes(b"the one that went well")
        raise PlanError("no plan of model.onnx")

    monkeypatch.setattr(pipeline, "check_plan_options", lambda _: Choice(installation=None))
    monkeypatch.setattr(pipeline, "build_plans", refuse)
    options = _options(make_checkpoint(num_hidden_layers=1), tmp_path / "out")
    plans = PlanOptions(target=target)
    if target is not Target.AUTO:
        with pytest.raises(PlanError):
            build(options, plans=plans)
        assert not options.out.exists()
        return

    report = build(options, plans=plans)

    assert report.plans == PlansReport(plans=(), skipped=("no plan of model.onnx",))
    assert not open_bundle(report.bundle).manifest.plans
    assert not (report.bundle / "trt").exists()


def test_target_that_cannot_be_built_here_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: PlanOptions) -> None:
        raise HostError("target trt needs TensorRT")

    monkeypatch.setattr(pipeline, "check_plan_options", refuse)
    monkeypatch.setattr(pipeline, "find_model", lambda *_, **__: pytest.fail("it was looked for"))
    with pytest.raises(HostError, match="target trt needs TensorRT"):
        build(_options(Path("x"), tmp_path / "out"), plans=PlanOptions(target=Target.TRT))


def test_graph_path_is_where_the_manifest_says(report: BuildReport) -> None:
    assert report.manifest.graph == GRAPH_PATH
    assert (report.bundle / GRAPH_PATH).is_file()


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_integer_precisions_have_no_plans_and_say_so(
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake_builder: list[tuple[PlanSource, PlanOptions]],
    precision: Precision,
) -> None:
    options = _options(Path("x"), tmp_path / "out", precision=precision)
    with pytest.raises(UsageError, match=r"--target trt-rtx has no plans in --precision int"):
        build(options, plans=PlanOptions(target=Target.TRT_RTX))
    notes = list[str]()

    class Listener(SilentProgress):
        def note(self, text: str) -> None:
            notes.append(text)

    options = _options(make_checkpoint(num_hidden_layers=1), tmp_path / "out", precision=precision)
    report = build(options, Listener(), plans=PlanOptions())

    assert not report.manifest.plans
    assert fake_builder == []
    assert [note for note in notes if "TensorRT multiplies no integers" in note]


def test_packed_weights_change_the_files_and_nothing_that_is_computed(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(num_hidden_layers=1)
    built = {
        packed: build(
            _options(checkpoint, tmp_path / f"{packed}", precision=Precision.INT8, packed=packed)
        )
        for packed in (False, True)
    }
    sizes = {p: report.manifest.files[GRAPH_PATH + ".data"].bytes for p, report in built.items()}
    assert sizes[True] > sizes[False]
    assert built[True].manifest.recipe["packed"] is True
    assert Stage.CALIBRATE in [stage.stage for stage in built[True].stages]
    values = {p: [check.value for check in report.manifest.checks] for p, report in built.items()}
    assert values[True] == values[False]
