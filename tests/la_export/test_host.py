from __future__ import annotations

from pathlib import Path

import pytest

from la_export.host import available_memory_bytes, free_disk_bytes, nearest_folder
from la_runtime.errors import HostError


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  200 kB\nMemAvailable:    100 kB\n")
    return path


def group(folder: Path, limit: str, held: int, caches: int) -> Path:
    folder.mkdir()
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{held}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {caches}\n")
    return folder


def test_without_a_container_the_kernel_decides(kernel: Path, tmp_path: Path) -> None:
    found = available_memory_bytes(memory_facts=kernel, container=tmp_path / "none")

    assert found == 100 * 1024


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 102_400), ("50000", 50_000 - 40_000 + 3_000), ("10", 0)]
)
def test_a_container_gives_what_its_limit_leaves(
    kernel: Path, tmp_path: Path, limit: str, expected: int
) -> None:
    container = group(tmp_path / "group", limit, held=40_000, caches=3_000)

    assert available_memory_bytes(memory_facts=kernel, container=container) == expected


def test_a_machine_without_the_kernels_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="the free memory cannot be read from"):
        available_memory_bytes(memory_facts=tmp_path / "none")


def test_the_disk_of_a_folder_that_is_not_there_yet_is_that_of_the_one_above(
    tmp_path: Path,
) -> None:
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
    assert free_disk_bytes(tmp_path / "a" / "b") > 0


def test_a_disk_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("shutil.disk_usage", refuse)

    with pytest.raises(HostError, match=r"the free space at .* cannot be read: Input/output error"):
        free_disk_bytes(tmp_path)
