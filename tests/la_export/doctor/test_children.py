from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from la_export.doctor import children
from la_export.doctor.children import run_probe


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a probe of a program; the real ones are modules of a package."""
    package = tmp_path / "fake_probes"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(children, "_PROBES", "fake_probes")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    def run(program: str, timeout_s: float = 60.0):
        (package / "program.py").write_text(program)
        return run_probe("program", timeout_s=timeout_s)

    return run


def test_the_json_objects_among_what_is_printed_are_the_records(probe) -> None:
    answer = probe("print('a library speaks')\nprint('[1]')\nprint('{\"a\": 1}')")

    assert answer.records == ({"a": 1},)
    assert answer.failure == ""


def test_a_crash_is_named_and_what_was_said_before_it_is_kept(probe) -> None:
    answer = probe("import os\nprint('{\"a\": 1}')\nos.kill(os.getpid(), 11)")

    assert answer.records == ({"a": 1},)
    assert answer.failure == "died of SIGSEGV"


def test_an_exception_is_named_by_its_last_line(probe) -> None:
    answer = probe("raise ImportError('libnvinfer.so.11: cannot open')")

    assert answer.failure == "ended with 1: ImportError: libnvinfer.so.11: cannot open"


def test_a_probe_that_hangs_is_ended(probe) -> None:
    answer = probe("import threading\nthreading.Event().wait()", timeout_s=0.5)

    assert answer.records == ()
    assert answer.failure == "gave no answer within 0.5 s"


def test_a_process_left_behind_with_the_output_open_holds_nobody_up(probe) -> None:
    answer = probe(
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import select; select.select([], [], [], 5)'])\n"
        "print('{\"a\": 1}')"
    )

    assert answer.records == ({"a": 1},)
