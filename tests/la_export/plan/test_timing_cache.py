from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from la_export.plan.log import make_log
from la_export.plan.namespace import Installation
from la_export.plan.timing_cache import TimingCacheFile, default_timing_folder
from tests.la_export.plan.machines import GPU


def _file(folder: Path, *, version: str = "11.4.0.106") -> TimingCacheFile:
    return TimingCacheFile(folder, version=version, gpu=GPU)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = _file(tmp_path / "new" / "folder")
    assert file.read() == b""

    file.write(b"timings")
    file.write(b"newer timings")

    assert _file(tmp_path / "new" / "folder").read() == b"newer timings"
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


@pytest.mark.parametrize(
    "other",
    [
        {"version": "11.4.0.107"},
        {"gpu": replace(GPU, compute_capability="SM89")},
        {"gpu": replace(GPU, driver="580.65.07")},
        {"gpu": replace(GPU, driver=None)},
    ],
)
def test_timings_are_those_of_one_version_gpu_and_driver(tmp_path: Path, other: dict) -> None:
    _file(tmp_path).write(b"timings")

    assert TimingCacheFile(tmp_path, **{"version": "11.4.0.106", "gpu": GPU, **other}).read() == b""


def test_key_cannot_leave_the_folder(tmp_path: Path) -> None:
    gpu = replace(GPU, driver="../../580")

    path = TimingCacheFile(tmp_path, version="11.4", gpu=gpu).path

    assert path.parent == tmp_path
    assert path.name == "11.4-SM90-.._.._580.cache"


@pytest.mark.parametrize("place", [0, 40, -1])
def test_damaged_timings_are_left_out_with_a_warning(
    tmp_path: Path, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    file = _file(tmp_path)
    file.write(b"timings")
    damaged = bytearray(file.path.read_bytes())
    damaged[place] ^= 1
    file.path.write_bytes(damaged)

    assert file.read() == b""

    assert f"timing cache {file.path} is damaged" in caplog.text


def test_half_a_file_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = _file(tmp_path)
    file.write(b"timings")
    file.path.write_bytes(file.path.read_bytes()[:-3])

    assert file.read() == b""

    assert "is damaged" in caplog.text


def test_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    file = _file(tmp_path / "file")

    file.write(b"timings")

    assert "timings are not remembered" in caplog.text


def test_default_folder_is_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert default_timing_folder() == tmp_path / "lookahead-attention" / "timing"


def test_builder_takes_timings_and_gives_them_back(
    tmp_path: Path, installation: Installation, caplog: pytest.LogCaptureFixture
) -> None:
    """The calls are the genuine ones; TensorRT for RTX has nothing to say in them."""
    log = make_log(installation.trt)
    config = installation.trt.Builder(log).create_builder_config()
    file = _file(tmp_path)

    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("ignore", DeprecationWarning)
        file.attach(config)
        file.keep(config)
        file.attach(config)

    assert file.read() != b""
    assert caplog.text == ""


class _Refusing:
    """A build that refuses timings of before, as TensorRT does with those of another version."""

    def __init__(self) -> None:
        self.attached: list[bytes] = []

    def create_timing_cache(self, serialized_timing_cache: bytes) -> bytes | None:
        return serialized_timing_cache

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        if cache:
            return False
        self.attached.append(cache)
        return True


def test_timings_that_tensorrt_refuses_are_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = _file(tmp_path)
    file.write(b"timings")
    config = _Refusing()

    file.attach(config)

    assert config.attached == [b""]
    assert "refuses the timing cache" in caplog.text
