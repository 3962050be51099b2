"""`la-export doctor`: exit codes and what is printed; the judgement has tests of its own."""

from __future__ import annotations

import json
import shutil
import sys

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
