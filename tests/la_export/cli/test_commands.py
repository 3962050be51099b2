from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner, Result

from la_export import pipeline
from la_export.cli import main
from la_export.cli.console import StageLines, make_console, make_output_console
from la_export.cli.facts import print_manifest
from la_export.cli.report import print_report, report_record
from la_export.options import BuildOptions, Precision
from la_export.pipeline import BuildReport
from la_export.plan import PlanOptions, PlanReport, PlansReport, Target
from la_export.stages import Stage
from la_runtime.bundle import MANIFEST_NAME
from la_runtime.contract import CacheForm
from la_runtime.errors import CheckError, ExitCode

HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "onnx_ir", "onnxscript")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def _assert_fails(result: Result, code: ExitCode, *fragments: str) -> None:
    assert result.exit_code == code, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    for fragment in fragments:
        assert fragment in lines[0]
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [["--help"], ["build", "--help"], ["--version"]])
def test_help_loads_no_heavy_library(arguments: list[str]) -> None:
    program = (
        "import sys; from la_export.cli import main\n"
        f"main({arguments!r}, standalone_mode=False)\n"
        f"print('loaded:', sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


def _run_without(blocked: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The real command where these packages are not installed."""
    program = (
        "from importlib.machinery import PathFinder\n"
        "find_spec = PathFinder.find_spec\n"
        "def find_others(name, path=None, target=None):\n"
        f"    if name.partition('.')[0] not in {blocked!r}:\n"
        "        return find_spec(name, path, target)\n"
        "PathFinder.find_spec = find_others\n"
        "from la_export.cli import main\n"
        f"main({list(arguments)!r})"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("blocked", "arguments"),
    [
        ("rich", ["build", "--model", "x"]),
        ("torch", ["build", "--model", "x"]),
        ("transformers", ["build", "--model", "x"]),
        ("onnxruntime", ["build", "--model", "x"]),
        ("gguf", ["build", "--model", "x"]),
        ("rich", ["inspect", "BUNDLE"]),
    ],
)
def test_missing_package_is_one_line_with_the_extras(
    blocked: str, arguments: list[str], report_of: Callable[[tuple[str, bool]], BuildReport]
) -> None:
    bundle = str(report_of(("llama", True)).bundle)
    arguments = [bundle if argument == "BUNDLE" else argument for argument in arguments]
    done = _run_without((blocked,), *arguments)
    assert done.returncode == ExitCode.ENVIRONMENT, done.stderr
    assert done.stderr == (
        f"error: the package {blocked} is not installed; run: "
        "pip install 'lookahead-attention[export,cpu]'\n"
    )
    assert done.stdout == ""


def test_inspect_needs_no_exporter_library(
    report_of: Callable[[tuple[str, bool]], BuildReport],
) -> None:
    bundle = str(report_of(("llama", True)).bundle)
    done = _run_without(HEAVY, "inspect", bundle)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert "past_key_values.1.value" in done.stdout
    done = _run_without((*HEAVY, "rich"), "inspect", bundle, "--json")
    assert done.returncode == ExitCode.DONE, done.stderr


def test_module_of_our_own_that_is_missing_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "la_export.pipeline", None)
    assert isinstance(_run("build", "--model", "x").exception, ModuleNotFoundError)


@pytest.mark.parametrize("arguments", [["--k", "17"], ["--threads", "0"]])
def test_impossible_option_is_refused_before_any_library_is_loaded(arguments: list[str]) -> None:
    done = _run_without((*HEAVY, "rich"), "build", "--model", "x", *arguments)
    assert done.returncode == ExitCode.USAGE
    assert "is out of range" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "fragments"),
    [
        (["--model", "smolm2-135m"], ExitCode.USAGE, ["unknown model", "smollm2-135m"]),
        (["--model", "/no/such/model"], ExitCode.USAGE, ["/no/such/model: no such file"]),
        (["--model", ""], ExitCode.USAGE, ["--model is empty"]),
        (["--model", "x" * 300], ExitCode.USAGE, ["unknown model"]),
        (["--model", "~nosuchuser/x"], ExitCode.USAGE, ["~nosuchuser/x: no such file"]),
        (["--model", "no-such.gguf"], ExitCode.USAGE, ["no-such.gguf: no such file"]),
        (["--model", "x", "--k", "-1"], ExitCode.USAGE, ["--k -1", "0 to 16"]),
        (["--model", "owner/name"], ExitCode.ENVIRONMENT, ["the hub cannot be reached"]),
        (["--model", "llama-7b"], ExitCode.ENVIRONMENT, ["huggyllama/llama-7b"]),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(
    arguments: list[str], code: ExitCode, fragments: list[str]
) -> None:
    _assert_fails(_run("build", *arguments), code, *fragments)


def test_known_model_note_is_shown_before_the_work() -> None:
    result = _run("build", "--model", "qwen-7b")
    assert "the first Qwen-7B needs code from its repository" in result.stderr


def test_pickle_weights_are_refused(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    _assert_fails(_run("build", "--model", str(folder)), ExitCode.FAILED, "--allow-bin")


def test_unsupported_model_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 8}))
    _assert_fails(
        _run("build", "--model", str(folder)), ExitCode.FAILED, "latent attention", "'llama'"
    )


def test_context_above_the_models_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    _assert_fails(
        _run("build", "--model", str(folder), "--context", "257"), ExitCode.USAGE, "2 to 256"
    )


def test_output_that_is_no_bundle_is_refused(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    _assert_fails(
        _run("build", "--model", str(make_checkpoint()), "--out", str(tmp_path / "full")),
        ExitCode.USAGE,
        "is a folder that is no bundle",
    )


def test_interrupted_build_says_so(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "trace_model", interrupt)
    out = tmp_path / "engines" / "out"
    result = _run("build", "--model", str(make_checkpoint()), "--out", str(out))
    assert result.exit_code == ExitCode.INTERRUPTED
    assert result.stderr.splitlines()[-1] == "interrupted"
    assert not out.parent.exists()


def test_failed_check_is_exit_code_1(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CheckError("the graph differs\nfrom PyTorch")

    monkeypatch.setattr(pipeline, "trace_model", fail)
    result = _run("build", "--model", str(make_checkpoint()), "-q")
    _assert_fails(result, ExitCode.FAILED, "the graph differs from PyTorch")


@pytest.fixture
def asked() -> list[object]:
    """What builds were asked for: options of the bundle, options of its plans, and so on."""
    return []


@pytest.fixture
def stub_build(
    report_of: Callable[[tuple[str, bool]], BuildReport],
    monkeypatch: pytest.MonkeyPatch,
    asked: list[object],
) -> BuildReport:
    """Replaces the build by a finished one: these tests are about what is printed."""
    report = report_of(("llama", True))

    def build(options: BuildOptions, progress: Any, *, plans: PlanOptions) -> BuildReport:
        asked.extend((options, plans))
        for stage in report.stages:
            progress.start(stage.stage)
            progress.finish(stage)
        return report

    monkeypatch.setattr(pipeline, "build", build)
    return report


def test_build_prints_the_path_to_stdout_and_the_rest_to_stderr(stub_build: BuildReport) -> None:
    result = _run("build", "--model", "x")
    assert result.exit_code == ExitCode.DONE
    assert result.stdout == f"{stub_build.bundle}\n"
    for shown in ("resolve", "seal", "total", "peak memory", "onnx/model.onnx.data", "block_kv"):
        assert shown in result.stderr
    assert "\x1b" not in result.stderr


def test_quiet_build_prints_only_the_path(stub_build: BuildReport) -> None:
    result = _run("build", "--model", "x", "-q")
    assert result.stderr == ""
    assert result.stdout == f"{stub_build.bundle}\n"


@pytest.mark.usefixtures("stub_build")
def test_build_passes_on_what_was_asked_for(asked: list[object]) -> None:
    result = _run(
        *("build", "--model", "x", "--k", "2", "--precision", "bf16", "--cache-form", "scatter"),
        *("--prefill-chunk", "64", "--target", "trt-rtx", "--max-batch", "2"),
    )
    assert result.exit_code == ExitCode.DONE
    assert asked == [
        BuildOptions(
            model="x",
            lookahead_lengths=(2,),
            precision=Precision.BF16,
            cache_form=CacheForm.SCATTER,
            prefill_chunk=64,
        ),
        PlanOptions(target=Target.TRT_RTX, lookahead_lengths=(2,), prefill_chunk=64, max_batch=2),
    ]


@pytest.mark.usefixtures("stub_build")
def test_build_asks_for_plans_where_a_builder_is_usable_unless_told_otherwise(
    asked: list[object],
) -> None:
    _run("build", "--model", "x")
    _run("build", "--model", "x", "--target", "onnx")
    plans = [options for options in asked if isinstance(options, PlanOptions)]
    assert [options.target for options in plans] == [Target.AUTO, Target.ONNX]


def test_build_names_the_builders_it_skipped_and_how_to_get_them(
    stub_build: BuildReport, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped = "target trt needs TensorRT, which is not installed; run: pip install 'x[trt]'"
    report = replace(stub_build, plans=PlansReport(plans=(), skipped=(skipped,)))
    print_report(report, make_console(quiet=False))
    assert f"note: skipped: {skipped}" in capsys.readouterr().err
    print_report(report, make_console(quiet=True))
    assert capsys.readouterr().err == ""
    assert report_record(report)["skipped"] == [skipped]


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [("--precision", "fp8", "bf16"), ("--cache-form", "paged", "scatter")],
)
def test_unknown_choice_is_a_usage_error(option: str, value: str, known: str) -> None:
    result = _run("build", "--model", "x", option, value)
    assert result.exit_code == ExitCode.USAGE
    assert f"Invalid value for '{option}': '{value}' is not one of" in result.stderr
    assert f"'{known}'" in result.stderr


def test_json_build_prints_one_object(stub_build: BuildReport) -> None:
    record = json.loads(_run("build", "--model", "x", "--json").stdout)
    assert record["bundle"] == str(stub_build.bundle)
    assert record["manifest"]["lookahead_lengths"] == [2, 4]
    assert record["stages"][0]["stage"] == "resolve"
    assert record["peak_rss_bytes"] > 0


def test_inspect_shows_precision_form_and_capacity(report_of: Callable[..., BuildReport]) -> None:
    report = report_of(("llama", True), (Precision.FP16, CacheForm.SCATTER))
    shown = _run("inspect", str(report.bundle)).stdout
    for text in ("fp16", "scatter cache of 520 places", "write_index", "batch, 2, 520, 16"):
        assert text in shown


def test_inspect_shows_facts_tensors_checks_and_files(
    report_of: Callable[[tuple[str, bool]], BuildReport],
) -> None:
    report = report_of(("llama", True))
    result = _run("inspect", str(report.bundle))
    assert result.exit_code == ExitCode.DONE
    for shown in (
        "source quantization",
        "lookahead lengths",
        "untuned, strict group mask",
        "past_key_values.1.value",
        "batch, 2, past, 16",
        "prefill_logits",
        "tokenizer.json",
        report.manifest.files["tokenizer.json"].sha256,
        "transformers",
    ):
        assert shown in result.stdout


def test_json_inspect_is_the_manifest(
    report_of: Callable[[tuple[str, bool]], BuildReport],
) -> None:
    report = report_of(("llama", True))
    record = json.loads(_run("inspect", str(report.bundle), "--json").stdout)
    assert record == json.loads((report.bundle / MANIFEST_NAME).read_text())


def test_reported_seconds_are_those_the_user_waited(
    stub_build: BuildReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 175.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    record = json.loads(_run("build", "--model", "x", "--json", "-q").stdout)
    assert record["seconds"] == 75.5


def test_brackets_and_colons_in_names_and_paths_are_shown_as_they_are(
    report_of: Callable[[tuple[str, bool]], BuildReport], capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(("llama", True))
    name = "my model[v2] x[/y] :smile: [bold]"
    manifest = report.manifest.model_copy(
        update={
            "model": report.manifest.model.model_copy(update={"name": name}),
            "files": {"a[/b]": report.manifest.files["tokenizer.json"]},
        }
    )
    console = make_console(quiet=False)
    print_report(replace(report, bundle=Path(name), manifest=manifest), console)
    print_manifest(manifest, make_output_console())
    StageLines(console).note(f"note of {name}")
    out, err = capsys.readouterr()
    assert f"bundle {name}" in err
    assert f"note: note of {name}\n" in err
    assert "a[/b]" in err
    assert f" {name} " in out
    assert "a[/b]" in out


def test_plans_are_told_of_as_they_are_built(capsys: pytest.CaptureFixture[str]) -> None:
    facts = SimpleNamespace(path="trt/trt-rtx/k4.plan")
    plan = cast(PlanReport, SimpleNamespace(facts=facts, compiled=SimpleNamespace(seconds=61.26)))
    with StageLines(make_console(quiet=False)) as progress:
        progress.start_plan(facts.path)
        progress.advance("Building engine", 1, 4)
        progress.finish_plan(plan)
    assert capsys.readouterr().err == "  trt/trt-rtx/k4.plan   61.3 s\n"


def test_a_long_stage_says_now_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 10.0, 90.0, 100.0, 400.0, 500.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    lines = StageLines(make_console(quiet=False))
    lines.start(Stage.WEIGHTS)
    for done in (1, 2, 3, 8, 10):
        lines.advance_bytes(done * 10**9, 10 * 10**9)
    assert capsys.readouterr().err.splitlines() == [
        "  weights   2.00 GB of 10.00 GB, about 6 min left",
        "  weights   8.00 GB of 10.00 GB, about 2 min left",
    ]


def test_quiet_inspect_only_checks(report_of: Callable[[tuple[str, bool]], BuildReport]) -> None:
    result = _run("inspect", "-q", str(report_of(("llama", True)).bundle))
    assert result.exit_code == ExitCode.DONE
    assert result.output == ""


def test_inspect_of_no_bundle_is_refused(tmp_path: Path) -> None:
    _assert_fails(_run("inspect", str(tmp_path / "none")), ExitCode.USAGE, "no bundle at")
    _assert_fails(_run("inspect", str(tmp_path)), ExitCode.FAILED, "is not a bundle")


def test_signal_in_the_middle_of_a_build_leaves_nothing(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The real process, interrupted while it traces."""
    out = tmp_path / "engines" / "out"
    command = [sys.executable, "-m", "la_export.cli", "build", "--out", str(out)]
    with subprocess.Popen(
        [*command, "--model", str(make_checkpoint())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stderr is not None
        assert "resolve" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert process.returncode == ExitCode.INTERRUPTED
    assert stderr.splitlines()[-1] == "interrupted"
    assert stdout == ""
    assert not out.exists()
    assert not out.parent.exists() or not list(out.parent.iterdir())
