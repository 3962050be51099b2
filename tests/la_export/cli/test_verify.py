"""`la-export verify`: exit codes, what is printed, what is written, and what it needs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from la_export.cli import main
from la_export.verify import ladder, rungs, verification
from la_export.verify.findings import Finding
from la_export.verify.ladder import QUICK, Rung
from la_runtime.bundle import read_manifest, seal_bundle
from la_runtime.errors import ExitCode, HostError
from tests.tiny_models import build_tiny_bundle

HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "onnx_ir", "onnxscript", "rich")
TORCH_SIDE = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "polygraphy")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    build_tiny_bundle(folder)
    return folder


@pytest.fixture
def bundle(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny / "bundle", tmp_path / "bundle"))


@pytest.fixture(autouse=True)
def small_ladders(monkeypatch):
    """As quick as can be; a full one is a little larger than a quick one."""
    small = replace(QUICK, new_tokens=4, prompt_tokens=12, epsilon_positions=8, seeds=1)
    monkeypatch.setattr(ladder, "QUICK", small)
    full = replace(small, seeds=2)
    monkeypatch.setattr(ladder, "FULL", full)
    monkeypatch.setattr(verification, "FULL", full)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, arguments), "--threads", "1"])


def assert_refused(result: Result, code: ExitCode, *fragments: str) -> None:
    assert result.exit_code == code, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    for fragment in fragments:
        assert fragment in lines[0]


def test_help_loads_no_heavy_library():
    program = (
        "import sys; from la_export.cli import main\n"
        "main(['verify', '--help'], standalone_mode=False)\n"
        f"print('loaded:', sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_a_sound_bundle_is_verified_and_certified(tiny, bundle):
    result = run(bundle, "--model", tiny / "checkpoint")

    assert result.exit_code == ExitCode.DONE, result.output
    assert result.stdout == "verified: 16 passed\n"
    assert "  16 perplexity                 passed" in result.stderr
    assert "a change of" in result.stderr  # the table
    (certificate,) = read_manifest(bundle).certificates
    assert certificate.reference == "torch"
    assert set(certificate.rungs.values()) == {"passed"}
    report = json.loads((bundle / certificate.report).read_text())
    assert [rung["number"] for rung in report["rungs"]] == list(range(1, 17))
    assert CliRunner().invoke(main, ["inspect", str(bundle)]).stdout.count("16 passed") == 1


def test_a_quick_run_reports_and_does_not_certify(bundle, tmp_path):
    junit = tmp_path / "junit.xml"

    result = run(bundle, "--reference", "self", "--quick", "--json", "-q", "--junit", junit)

    assert result.exit_code == ExitCode.DONE
    assert result.stderr == ""
    record = json.loads(result.stdout)
    assert record["verdict"] == "verified: 15 passed, 1 skipped"
    assert (record["quick"], record["reference"]) == (True, "self")
    assert read_manifest(bundle).certificates == ()
    assert len(list((bundle / "reports").iterdir())) == 1
    assert len(ET.parse(junit).getroot().findall("testcase")) == 16


def test_a_certificate_can_be_declined(bundle):
    result = run(bundle, "--reference", "self", "--no-certificate")

    assert result.exit_code == ExitCode.DONE
    assert read_manifest(bundle).certificates == ()


def test_prompts_and_lengths_are_the_users(bundle, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text("rain\nThe cat sat\n")

    result = run(bundle, "--reference", "self", "--json", "--prompts", prompts, "--k", 2)

    record = json.loads(result.stdout)
    assert record["lookahead_lengths"] == [2]
    assert record["rungs"][1]["detail"].startswith("5 positions of 2 prompts")
    assert record["prompts"] == 2
    assert record["exit_code"] == ExitCode.DONE


def test_a_narrower_run_leaves_the_wider_ones_certificate(bundle, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text("a\n")
    assert run(bundle, "--reference", "self").exit_code == ExitCode.DONE
    (certificate,) = read_manifest(bundle).certificates

    narrow = run(bundle, "--reference", "self", "--k", 2)
    short = run(bundle, "--reference", "self", "--prompts", prompts)

    assert narrow.exit_code == short.exit_code == ExitCode.DONE
    assert "note: no certificate without lookahead length 4, which the bundle" in narrow.stderr
    assert "note: no certificate without the prompts that ship with the package" in short.stderr
    assert read_manifest(bundle).certificates == (certificate,)


def break_a_rung(monkeypatch):
    changed = list(rungs.RUNGS)
    finding = Finding(problems=("prompt cat: token 3",))
    changed[2] = Rung(number=3, name="epsilon", check=lambda ladder: finding)
    monkeypatch.setattr(verification, "RUNGS", tuple(changed))


def test_a_failure_takes_the_certificate_away_and_says_so(bundle, monkeypatch):
    run(bundle, "--reference", "self")
    break_a_rung(monkeypatch)

    declined = run(bundle, "--reference", "self", "--quick", "--no-certificate")
    assert "--no-certificate leaves the bundle's certificates as they are" in declined.stderr
    assert len(read_manifest(bundle).certificates) == 1
    result = run(bundle, "--reference", "self", "--quick")

    assert result.exit_code == ExitCode.FAILED
    assert "1 certificate(s) for ort-cpu taken away, because the verification" in result.stderr
    assert read_manifest(bundle).certificates == ()


def test_a_void_certificate_is_shown_as_one(bundle):
    run(bundle, "--reference", "self")
    assert "no: " not in CliRunner().invoke(main, ["inspect", str(bundle)]).stdout
    manifest = read_manifest(bundle)
    shutil.rmtree(bundle / "reports")
    (bundle / "chat_template.jinja").write_text("another")
    seal_bundle(bundle, manifest)

    shown = CliRunner().invoke(main, ["inspect", str(bundle)]).stdout

    assert "no: chat_template.jinja changed since" in shown


@pytest.mark.parametrize("arguments", [[], ["--no-certificate"]])
def test_a_bundle_that_cannot_be_written_is_refused_before_the_work(bundle, arguments):
    (bundle / "reports").write_text("in the way")

    result = run(bundle, "--reference", "self", *arguments)

    assert_refused(result, ExitCode.ENVIRONMENT, "which is not a folder that can be written")
    assert result.stdout == ""
    assert "1 contract and digests" not in result.stderr


@pytest.mark.parametrize(("fails", "code"), [(False, ExitCode.ENVIRONMENT), (True, 1)])
def test_what_was_found_is_not_lost_when_it_cannot_be_written(
    bundle, tmp_path, monkeypatch, fails, code
):
    if fails:
        break_a_rung(monkeypatch)
    junit = tmp_path / "junit.xml"

    def fail(report):
        raise HostError("could not write the report: no space")

    monkeypatch.setattr(verification, "write_report", fail)

    result = run(bundle, "--reference", "self", "--json", "--junit", junit)

    assert_refused(result, code, "could not write the report: no space")
    assert len(json.loads(result.stdout)["rungs"]) == 16
    assert "16 perplexity" in result.stderr
    assert len(ET.parse(junit).getroot().findall("testcase")) == 16


@pytest.mark.parametrize("name", ["manifest.json", "reports/junit.xml", "./onnx/../junit.xml"])
def test_junit_inside_the_bundle_is_refused(bundle, name):
    before = (bundle / "manifest.json").read_bytes()

    result = run(bundle, "--reference", "self", "--junit", bundle / name)

    assert_refused(result, ExitCode.USAGE, "lies inside the bundle")
    assert (bundle / "manifest.json").read_bytes() == before


def hide(*packages: str) -> str:
    """A program's beginning, in which these packages are not installed."""
    return (
        "from importlib.machinery import PathFinder\n"
        "find_spec = PathFinder.find_spec\n"
        "def find_others(name, path=None, target=None):\n"
        f"    if name.partition('.')[0] not in {packages!r}:\n"
        "        return find_spec(name, path, target)\n"
        "PathFinder.find_spec = find_others\n"
        "from la_export.cli import main\n"
    )


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


def test_self_needs_no_rich(bundle):
    done = run_program(
        hide("rich")
        + f"main(['verify', {str(bundle)!r}, '--reference', 'self', '--quick', '--threads', '1'])"
    )

    assert done.returncode == ExitCode.DONE, done.stderr
    assert done.stdout == "verified: 15 passed, 1 skipped\n"
    assert "   2 logits                     passed " in done.stderr
    assert f"report {bundle}/reports/verify-" in done.stderr


def test_bisect_without_its_package_could_not_be_run(tiny, bundle):
    checkpoint = str(tiny / "checkpoint")
    done = run_program(
        hide("polygraphy") + f"main(['verify', {str(bundle)!r}, '--model', {checkpoint!r}, "
        "'--bisect', '--threads', '1'])"
    )

    assert done.returncode == ExitCode.COULD_NOT_RUN, done.stderr
    assert done.stderr.startswith(
        "error: --bisect needs the package polygraphy, which is not installed; run: "
        "pip install 'lookahead-attention[export,cpu]'"
    )


def test_self_needs_neither_torch_nor_transformers_nor_onnx(bundle):
    program = (
        "from importlib.machinery import PathFinder\n"
        "find_spec = PathFinder.find_spec\n"
        "def find_others(name, path=None, target=None):\n"
        f"    if name.partition('.')[0] not in {TORCH_SIDE!r}:\n"
        "        return find_spec(name, path, target)\n"
        "PathFinder.find_spec = find_others\n"
        "from la_export.cli import main\n"
        f"main(['verify', {str(bundle)!r}, '--reference', 'self', '--quick', '--threads', '1'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == ExitCode.DONE, done.stderr
    assert done.stdout == "verified: 15 passed, 1 skipped\n"
    assert "needs transformers and the checkpoint (--reference torch)" in done.stderr


@pytest.mark.parametrize("missing", ["torch", "transformers", "onnx"])
def test_torch_without_its_packages_could_not_be_run(bundle, missing):
    program = (
        "from importlib.machinery import PathFinder\n"
        "find_spec = PathFinder.find_spec\n"
        "def find_others(name, path=None, target=None):\n"
        f"    return None if name == {missing!r} else find_spec(name, path, target)\n"
        "PathFinder.find_spec = find_others\n"
        "from la_export.cli import main\n"
        f"main(['verify', {str(bundle)!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == ExitCode.COULD_NOT_RUN, done.stderr
    assert done.stderr == (
        f"error: --reference torch needs the package {missing}, which is not installed; run: "
        "pip install 'lookahead-attention[export,cpu]', or use --reference self\n"
    )


def test_a_damaged_bundle_fails_with_the_line_of_its_error(tiny, bundle, tmp_path):
    (bundle / "chat_template.jinja").write_text("other")
    junit = tmp_path / "junit.xml"

    result = run(bundle, "--model", tiny / "checkpoint", "--junit", junit)

    assert_refused(result, ExitCode.FAILED, "is damaged: chat_template.jinja has sha256")
    assert result.stdout == "failed: 1 failed, 15 skipped\n"
    assert not (bundle / "reports").exists()
    assert len(ET.parse(junit).getroot().findall("testcase/failure")) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "fragments"),
    [
        (["BUNDLE"], ExitCode.COULD_NOT_RUN, ["a place on the machine that built it; name the"]),
        (["BUNDLE", "--model", "/no/such"], ExitCode.COULD_NOT_RUN, ["no such file", "--model"]),
        (["/no/such"], ExitCode.USAGE, ["no bundle at /no/such"]),
        (["BUNDLE", "--k", "9"], ExitCode.USAGE, ["--k 9 is out of range"]),
        (["BUNDLE", "--backend", "tpu"], ExitCode.USAGE, ["unknown backend 'tpu'"]),
        (["BUNDLE", "--prompts", "/no/p"], ExitCode.USAGE, ["cannot read the prompts /no/p"]),
        (["BUNDLE", "--junit", "/no/j.xml"], ExitCode.USAGE, ["--junit /no/j.xml cannot be"]),
        (
            ["BUNDLE", "--reference", "self", "--model", "x"],
            ExitCode.USAGE,
            ["--model is for --reference torch"],
        ),
        (
            ["BUNDLE", "--reference", "self", "--bisect"],
            ExitCode.USAGE,
            ["--bisect compares with PyTorch"],
        ),
    ],
)
def test_what_cannot_be_verified_is_one_line_and_an_exit_code(bundle, arguments, code, fragments):
    result = run(*(bundle if argument == "BUNDLE" else argument for argument in arguments))

    assert_refused(result, code, *fragments)
    assert result.stdout == ""
    assert not (bundle / "reports").exists()


@pytest.mark.parametrize(
    ("check", "code", "verdict", "line"),
    [
        (
            lambda ladder: Finding(problems=("prompt cat: token 3",)),
            ExitCode.FAILED,
            "failed: 15 passed, 1 failed\n",
            "   3 epsilon                    FAILED ",
        ),
        (
            lambda ladder: 1 / 0,
            ExitCode.COULD_NOT_RUN,
            "could not be verified: 15 passed, 1 could not run\n",
            "ZeroDivisionError: division by zero",
        ),
    ],
)
def test_one_bad_rung_decides_and_leaves_a_report_without_certificate(
    tiny, bundle, monkeypatch, check, code, verdict, line
):
    changed = list(rungs.RUNGS)
    changed[2] = Rung(number=3, name="epsilon", check=check)
    monkeypatch.setattr(verification, "RUNGS", tuple(changed))

    result = run(bundle, "--model", tiny / "checkpoint")

    assert result.exit_code == code
    assert result.stdout == verdict
    assert line in result.stderr
    assert read_manifest(bundle).certificates == ()
    assert len(list((bundle / "reports").iterdir())) == 1


def test_an_interruption_writes_nothing(tiny, bundle, monkeypatch):
    def interrupt(ladder):
        raise KeyboardInterrupt

    changed = (*rungs.RUNGS[:-1], Rung(number=16, name="perplexity", check=interrupt))
    monkeypatch.setattr(verification, "RUNGS", changed)

    result = run(bundle, "--model", tiny / "checkpoint")

    assert result.exit_code == ExitCode.INTERRUPTED
    assert result.stderr.endswith("interrupted\n")
    assert not (bundle / "reports").exists()
    assert read_manifest(bundle).certificates == ()


def test_bisect_names_the_layer_that_departs(tiny, bundle):
    """Found by the rungs, then named; the fault is a weight of the second layer."""
    import numpy as np
    import onnx
    from onnx import numpy_helper

    from la_runtime.bundle import seal_bundle

    for path in (bundle / "onnx").glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        name = "model.layers.1.post_attention_layernorm.weight"
        (tensor,) = (t for t in model.graph.initializer if t.name == name)
        values = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.roll(values, 1), name))
        onnx.save(model, path)
    seal_bundle(bundle, read_manifest(bundle))

    plain = run(bundle, "--model", tiny / "checkpoint", "--quick")
    assert "note: --bisect names the layer where the logits depart" in plain.stderr
    shutil.rmtree(bundle / "reports")

    result = run(bundle, "--model", tiny / "checkpoint", "--bisect", "--quick")

    assert result.exit_code == ExitCode.FAILED
    assert "bisect: layer 1 mlp is the first to depart from PyTorch, by" in result.stderr
    (report,) = (bundle / "reports").iterdir()
    assert "layer 1 mlp" in json.loads(report.read_text())["departure"]
