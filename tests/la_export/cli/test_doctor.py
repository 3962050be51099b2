"""`la-export doctor`: exit codes and what is printed; the judgement has tests of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from la_export.cli import main
from la_export.cli.diagnosis import format_diagnosis
from la_export.doctor.diagnosis import Diagnosis, Finding, Section, Verdict
from la_runtime.errors import ExitCode

FIX = "pip install x"


def finding(section: Section, name: str, verdict: Verdict, fix: str = "") -> Finding:
    return Finding(section=section, name=name, verdict=verdict, found=f"about {name}", fix=fix)


def test_this_machine_runs_at_least_the_cpu_backend() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])

    assert result.exit_code == ExitCode.DONE, result.output
    record = json.loads(result.stdout)
    assert "ort-cpu" in record["backends"]
    assert record["exit_code"] == 0
    assert {finding["section"] for finding in record["findings"]} >= {
        section.value for section in Section if section is not Section.PARSERS
    }


def test_a_machine_on_which_every_probe_crashes_gets_a_whole_table_and_exit_code_4(
    monkeypatch,
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))

    result = CliRunner().invoke(main, ["doctor"])

    assert result.exit_code == ExitCode.ENVIRONMENT
    assert result.stdout.splitlines()[-1] == "backends that run a bundle here: none"
    assert "cannot be imported: ended with 1" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("broken", [("numpy", "torch"), ("pydantic", "rich", "onnxruntime")])
def test_packages_that_cannot_be_imported_are_named_and_stop_nobody(tmp_path, broken) -> None:
    """Modules that fail stand in front of the real ones, for doctor and for its probes."""
    for name in broken:
        (tmp_path / f"{name}.py").write_text("raise ImportError('planted')\n")
    command = [sys.executable, "-m", "la_export.cli", "doctor", "--json"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == ExitCode.ENVIRONMENT, done.stderr
    findings = json.loads(done.stdout)["findings"]
    found = {f["name"]: f for f in findings if f["section"] == "packages"}
    for name in broken:
        assert found[name]["verdict"] == "broken"
        assert found[name]["found"].endswith("ImportError: planted")


def test_each_fix_is_told_once_below_its_first_finding() -> None:
    diagnosis = Diagnosis(
        findings=(
            finding(Section.PACKAGES, "one", Verdict.MISSING, FIX),
            finding(Section.RUNNING, "ort-cpu", Verdict.MISSING, FIX),
            finding(Section.PYTHON, "python", Verdict.OK),
        )
    )

    assert format_diagnosis(diagnosis).splitlines() == [
        "Python",
        "  ok          python   about python",
        "packages",
        "  missing     one      about one",
        "                       fix: pip install x",
        "running",
        "  missing     ort-cpu  about ort-cpu",
        "backends that run a bundle here: none",
    ]
