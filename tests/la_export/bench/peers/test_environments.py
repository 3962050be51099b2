from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from la_export.bench.peers import environments
from la_export.bench.peers.environments import (
    Environment,
    ensure_environment,
    find_cpu_flags,
    llama_cmake_flags,
    run_logged,
)
from la_runtime.errors import HostError

Commands: TypeAlias = list[tuple[list[str], dict[str, str]]]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Commands that would have been run, without their paths."""
    seen: Commands = []

    def record(
        command: Sequence[Any], log: Path, *, variables: Mapping[str, str] | None = None
    ) -> None:
        seen.append(([str(word).rpartition("/")[2] for word in command], dict(variables or {})))
        if command[1:3] == ["-m", "venv"]:
            command[3].mkdir(parents=True)

    monkeypatch.setattr(environments, "run_logged", record)
    return seen


def test_flags_are_those_of_the_first_processor(tmp_path: Path) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\nflags\t\t: fma avx2\n\nprocessor\t: 1\nflags\t\t: fma\n")

    assert find_cpu_flags(facts) == {"fma", "avx2"}


def test_a_machine_without_flags_has_none(tmp_path: Path) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\n")

    assert find_cpu_flags(facts) == frozenset()


def test_llama_is_compiled_for_what_the_processor_has_and_detects_nothing() -> None:
    flags = llama_cmake_flags(frozenset({"avx2", "avx512f", "avx512_vnni"})).split()

    assert "-DGGML_NATIVE=OFF" in flags
    assert {"-DGGML_AVX2=ON", "-DGGML_AVX512=ON", "-DGGML_AVX512_VNNI=ON"} <= set(flags)
    assert {"-DGGML_AMX_INT8=OFF", "-DGGML_AVX512_BF16=OFF"} <= set(flags)


def test_an_environment_is_made_once(tmp_path: Path, commands: Commands) -> None:
    environment = Environment(name="peer", requirements=("peer==1",))

    ensure_environment(environment, tmp_path)
    ensure_environment(environment, tmp_path)

    assert [words[1:3] for words, _ in commands] == [["-m", "venv"], ["-m", "pip"]]
    assert commands[1][0][-3:] == ["--only-binary", ":all:", "peer==1"]


def test_an_environment_is_made_anew_when_its_requirements_change(
    tmp_path: Path, commands: Commands
) -> None:
    ensure_environment(Environment(name="peer", requirements=("peer==1",)), tmp_path)
    newer = Environment(name="peer", requirements=("peer==2",))
    (newer.folder(tmp_path) / "left behind").touch()

    assert not newer.is_ready(tmp_path)
    ensure_environment(newer, tmp_path)

    assert newer.is_ready(tmp_path)
    assert not (newer.folder(tmp_path) / "left behind").exists()


def test_what_is_compiled_here_is_compiled_with_the_flags_and_not_taken_from_a_cache(
    tmp_path: Path, commands: Commands
) -> None:
    environment = Environment(
        name="peer",
        requirements=("peer==1", "other==2"),
        compiled=("peer",),
        removed=("ballast",),
        variables={"CMAKE_ARGS": "-DX=ON"},
    )

    ensure_environment(environment, tmp_path)

    install, variables = commands[1]
    assert install[5:] == [
        "--only-binary",
        ":all:",
        "--no-binary",
        "peer",
        "--no-cache-dir",
        "peer==1",
        "other==2",
    ]
    assert variables == {"CMAKE_ARGS": "-DX=ON"}
    assert commands[2][0][4:] == ["uninstall", "--yes", "ballast"]


def test_an_installation_that_failed_leaves_no_ready_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(command: Sequence[str | Path], log: Path) -> None:
        command = [sys.executable, "-c", "import sys; sys.exit('no matching wheel')"]
        run_logged(command, log)

    monkeypatch.setattr(environments, "run_logged", refuse)
    environment = Environment(name="peer", requirements=("peer==1",))

    with pytest.raises(HostError, match=r"failed: no matching wheel; see logs/install-peer\.log"):
        ensure_environment(environment, tmp_path)

    assert not environment.is_ready(tmp_path)
