from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from la_export.cli import main, plan
from la_export.cli.plan_lines import PlanLines, plans_record, print_plans
from la_export.plan import PlanOptions, PlanReport, PlanSharing, PlansReport, Target
from la_export.plan.layers import LayerCounts
from la_export.plan.options import DEFAULT_MAX_BATCH
from la_export.plan.profiles import Sizes, make_prefill_profile, make_step_profile
from la_export.plan.report import Compiled
from la_runtime.bundle import open_bundle
from la_runtime.errors import ExitCode
from la_runtime.plans import HardwareCompatibility, PlanFacts, PlanTarget
from tests.la_export.plan.bundles import write_decoder_bundle
from tests.la_export.plan.graphs import CONTEXT, make_contract


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_decoder_bundle(tmp_path / "bundle", make_contract())


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[PlanOptions]:
    """The options that a command line comes to; nothing is built."""
    found: list[PlanOptions] = []

    def add_plans(path: Path, options: PlanOptions, *, progress: object) -> None:
        found.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr("la_export.plan.add_plans", add_plans)
    return found


def test_bundle_gets_its_plans(bundle: Path) -> None:
    result = _run(bundle, "--target", "trt-rtx", "--k", "2")

    assert result.exit_code == ExitCode.DONE, result.output
    assert result.stdout == f"{bundle}\n"
    assert "trt/trt-rtx/k2.plan" in result.stderr
    assert "2 of 2" in result.stderr
    assert "prefill k=2 1..66 rows, step k=2 1..9 rows" in result.stderr
    assert [entry.path for entry in open_bundle(bundle).manifest.plans] == ["trt/trt-rtx/k2.plan"]


def test_inspect_shows_what_each_plan_is_for(bundle: Path) -> None:
    _run(bundle, "--target", "trt-rtx", "--k", "2", "--compute-capability", "8.9")

    shown = CliRunner().invoke(main, ["inspect", str(bundle)]).stdout

    assert "trt/trt-rtx/k2.plan" in shown
    for text in ("trt-rtx 1.7", "SM89", "prefill k=2: batch 1..4", "step k=2: batch 1..4"):
        assert text in shown


def test_json_is_one_object_and_quiet_says_nothing_else(bundle: Path) -> None:
    result = _run(bundle, "--target", "trt-rtx", "--plans", "shared", "--json", "-q")

    assert result.exit_code == ExitCode.DONE, result.output
    record = json.loads(result.stdout)
    (built,) = record["plans"]
    assert record["bundle"] == str(bundle)
    assert built["path"] == "trt/trt-rtx/shared.plan"
    assert built["attentions"] == built["fused_attentions"] == 2
    assert built["bytes"] == (bundle / built["path"]).stat().st_size
    assert record["skipped"] == []
    assert result.stderr == ""


def test_options_arrive_as_they_were_given(received: list[PlanOptions]) -> None:
    result = _run(
        *("bundle", "--target", "trt", "--k", "4", "--k", "0", "--plans", "shared"),
        *("--max-batch", "2", "--prefill-chunk", "64", "--workspace", "3", "--opt-level", "5"),
        *("--hardware-compatibility", "same-compute-capability", "--version-compatible"),
        *("--strip", "--compute-capability", "8.9", "--compute-capability", "sm120"),
        *("--timing-cache", "timings"),
    )

    assert result.exit_code == ExitCode.INTERRUPTED
    (options,) = received
    assert options == PlanOptions(
        target=Target.TRT,
        lookahead_lengths=(4, 0),
        sharing=PlanSharing.SHARED,
        max_batch=2,
        prefill_chunk=64,
        workspace_bytes=3 << 20,
        optimization_level=5,
        hardware_compatibility=HardwareCompatibility.SAME_COMPUTE_CAPABILITY,
        is_version_compatible=True,
        is_stripped=True,
        compute_capabilities=("SM89", "SM120"),
        timing_cache=Path("timings"),
    )


def test_what_is_not_given_is_the_default(received: list[PlanOptions]) -> None:
    _run("bundle")

    (options,) = received
    assert options == PlanOptions()
    assert options.max_batch == DEFAULT_MAX_BATCH


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("target", [target for target in Target if target is not Target.ONNX]),
        ("sharing", list(PlanSharing)),
        ("hardware_compatibility", list(HardwareCompatibility)),
    ],
)
def test_choices_are_all_there_are(option: str, values: list[str]) -> None:
    (found,) = (param for param in plan.plan_command.params if param.name == option)

    assert list(found.type.choices) == values


@pytest.mark.parametrize(
    ("given", "written"),
    [("8.9", "SM89"), ("89", "SM89"), ("sm89", "SM89"), ("SM120", "SM120"), ("12.0", "SM120")],
)
def test_compute_capability_is_read_in_every_usual_spelling(
    given: str, written: str, received: list[PlanOptions]
) -> None:
    _run("bundle", "--compute-capability", given)

    assert received[0].compute_capabilities == (written,)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--opt-level", "6"], ExitCode.USAGE, "error: --opt-level must be from 0 to 5, got 6\n"),
        (
            ["--target", "trt-rtx", "--strip"],
            ExitCode.USAGE,
            "error: --strip cannot be used for target trt-rtx",
        ),
        (["--k", "3"], ExitCode.USAGE, "error: --k 3 is not among the lookahead lengths"),
    ],
)
def test_error_is_one_line_and_an_exit_code(
    arguments: list[str], code: ExitCode, message: str, bundle: Path
) -> None:
    result = _run(bundle, *arguments)

    assert result.exit_code == code
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_missing_package_is_one_line_with_its_pip_line(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    result = _run(bundle, "--target", "trt")

    assert result.exit_code == ExitCode.ENVIRONMENT
    assert result.stderr == (
        "error: target trt needs TensorRT, which is not installed; run: "
        "pip install 'lookahead-attention[trt]'\n"
    )


# --- lines


def _report() -> PlansReport:
    contract = make_contract()
    sizes = Sizes(context=CONTEXT, max_batch=1, prefill_chunk=16)
    facts = PlanFacts(
        path="trt/trt/k4.plan",
        target=PlanTarget.TRT,
        lookahead_lengths=(4,),
        graph_sha256="0" * 64,
        version="11.4.0.106",
        compute_capabilities=("SM90",),
        driver="580",
        profiles=(
            make_prefill_profile(contract, sizes, k=4),
            make_step_profile(contract, sizes, k=4),
        ),
    )
    compiled = Compiled(bytes=1_500_000, seconds=2.25, num_attentions=30, layers=None)
    counted = Compiled(
        bytes=1_500_000,
        seconds=2.25,
        num_attentions=30,
        layers=LayerCounts(num_layers=400, fused_attentions=(30, 28)),
    )
    return PlansReport(
        plans=(
            PlanReport(facts=facts, compiled=compiled),
            PlanReport(facts=facts, compiled=counted),
        ),
        skipped=("target trt-rtx is missing",),
    )


def test_table_shows_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    print_plans(_report())

    out, err = capsys.readouterr()
    profiles = "prefill k=4 1..20 rows, step k=4 1..25 rows"
    assert out == ""
    assert err.splitlines() == [
        "plan             size    seconds  fused attentions  profiles",
        f"trt/trt/k4.plan  1.5 MB  2.2      unknown           {profiles}",
        f"trt/trt/k4.plan  1.5 MB  2.2      28 of 30          {profiles}",
        "note: skipped: target trt-rtx is missing",
    ]


def test_record_holds_facts_and_figures() -> None:
    record = plans_record(_report())

    assert record["skipped"] == ["target trt-rtx is missing"]
    assert [(p["fused_attentions"], p["layers"]) for p in record["plans"]] == [
        (None, None),
        (28, 400),
    ]
    assert record["plans"][0]["compute_capabilities"] == ["SM90"]
    json.dumps(record)


def test_lines_are_plain_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with PlanLines(quiet=False) as lines:
        lines.start_plan("trt/trt/k4.plan")
        lines.advance("Building engine", 1, 6)
        lines.note("something")
        lines.finish_plan(_report().plans[0])

    assert capsys.readouterr().err == "note: something\n  trt/trt/k4.plan      2.2 s\n"


def test_terminal_shows_the_running_phase_and_clears_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)

    with PlanLines(quiet=False) as lines:
        lines.start_plan("k4.plan")
        lines.advance("Building engine", 1, 6)

    assert capsys.readouterr().err == (
        "\r\x1b[K  k4.plan   reading the graph\r\x1b[K  k4.plan   Building engine 1/6\r\x1b[K"
    )


def test_quiet_lines_say_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)

    with PlanLines(quiet=True) as lines:
        lines.start_plan("k4.plan")
        lines.advance("Building engine", 1, 6)
        lines.note("something")
        lines.finish_plan(_report().plans[0])

    assert capsys.readouterr().err == ""


def test_verbose_shows_what_tensorrt_logs(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        result = _run(bundle, "--target", "trt-rtx", "--k", "2", "-v")

    assert result.exit_code == ExitCode.DONE
    assert any("Int64 binding" in record.message for record in caplog.records)
