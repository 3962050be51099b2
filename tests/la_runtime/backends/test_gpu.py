"""The driver is asked in its own words, and each thing that may be missing has its own line."""

# ruff: noqa: N802 (the functions of the libraries have their own names)

from __future__ import annotations

import re
import subprocess
import sys
from ctypes import CDLL
from pathlib import Path

import pytest

from la_runtime.backends.gpu import Gpu, read_gpu
from la_runtime.errors import HostError

NO_DEVICE = 100
INVALID_DEVICE = 101
NOT_SUPPORTED = 803
ERROR_NAMES = {INVALID_DEVICE: b"CUDA_ERROR_INVALID_DEVICE", NOT_SUPPORTED: b"CUDA_ERROR_OLD"}


class Libcuda:
    """libcuda with one H200, as its header declares it; `failing` maps a function to its code."""

    def __init__(self, failing: dict[str, int] | None = None, count: int = 1) -> None:
        self.failing = failing or {}
        self.count = count
        self.is_started = False

    def result(self, function: str) -> int:
        assert self.is_started or function in ("cuInit", "cuDriverGetVersion")
        return self.failing.get(function, 0)

    def cuInit(self, flags):
        assert flags == 0
        self.is_started = True
        return self.result("cuInit")

    def cuDeviceGetCount(self, count):
        count._obj.value = self.count
        return self.result("cuDeviceGetCount")

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal.value + 40  # a handle is not the ordinal
        return 0 if ordinal.value < self.count else INVALID_DEVICE

    def cuDeviceGetName(self, text, size, device):
        assert device.value == 40
        text.value = b"NVIDIA H200"[: size - 1]
        return self.result("cuDeviceGetName")

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert device.value == 40
        value._obj.value = {75: 9, 76: 0}[attribute.value]
        return self.result("cuDeviceGetAttribute")

    def cuDeviceTotalMem_v2(self, size, device):
        assert device.value == 40
        size._obj.value = 150_000_000_000
        return self.result("cuDeviceTotalMem_v2")

    def cuDriverGetVersion(self, version):
        version._obj.value = 13000
        return self.result("cuDriverGetVersion")

    def cuGetErrorName(self, code, name):
        name._obj.value = ERROR_NAMES.get(code.value)
        return 0 if code.value in ERROR_NAMES else 1


class Libnvml:
    def __init__(self, init: int = 0, version: int = 0) -> None:
        self.init = init
        self.version = version
        self.is_shut_down = False

    def nvmlInit_v2(self):
        return self.init

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"580.65.06"[: size - 1]
        return self.version

    def nvmlShutdown(self):
        self.is_shut_down = True
        return 0


def loader(**libraries):
    """Opens `cuda` and `nvml`; a library that is not given is not there."""

    def load(name: str):
        library = libraries.get({"libcuda.so.1": "cuda", "libnvidia-ml.so.1": "nvml"}[name])
        if library is None:
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        return library

    return load


def test_a_gpu_is_read_from_the_driver():
    nvml = Libnvml()

    assert read_gpu(load_library=loader(cuda=Libcuda(), nvml=nvml)) == Gpu(
        name="NVIDIA H200",
        compute_capability="SM90",
        driver="580.65.06",
        cuda="13.0",
        total_memory_bytes=150_000_000_000,
    )
    assert nvml.is_shut_down


@pytest.mark.parametrize("nvml", [None, Libnvml(init=12), Libnvml(version=3)])
def test_a_driver_version_that_cannot_be_read_is_none(nvml):
    assert read_gpu(load_library=loader(cuda=Libcuda(), nvml=nvml)).driver is None


def test_a_machine_without_a_driver_is_told_so():
    with pytest.raises(HostError, match=r"no NVIDIA driver: libcuda.so.1: .*docker run --gpus"):
        read_gpu(load_library=loader())


@pytest.mark.parametrize("library", [Libcuda({"cuInit": NO_DEVICE}), Libcuda(count=0)])
def test_a_driver_without_a_gpu_is_told_so(library):
    with pytest.raises(HostError, match=r"no NVIDIA GPU 0: the driver shows 0; .*VISIBLE_DEVICES"):
        read_gpu(load_library=loader(cuda=library))


def test_a_gpu_behind_the_last_one_is_refused():
    with pytest.raises(HostError, match="no NVIDIA GPU 1: the driver shows 1;"):
        read_gpu(1, load_library=loader(cuda=Libcuda()))


@pytest.mark.parametrize(
    "function",
    [
        "cuInit",
        "cuDeviceGetCount",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
        "cuDeviceTotalMem_v2",
        "cuDriverGetVersion",
    ],
)
@pytest.mark.parametrize(("code", "name"), [(NOT_SUPPORTED, "CUDA_ERROR_OLD"), (777, "error 777")])
def test_an_error_of_the_driver_is_named(function, code, name):
    expected = f"the NVIDIA driver does not work: {function} says {name}; update the driver"

    with pytest.raises(HostError, match=re.escape(expected)):
        read_gpu(load_library=loader(cuda=Libcuda({function: code})))


def test_asking_loads_neither_tensorrt_nor_the_cuda_runtime():
    program = (
        "import sys\n"
        "from la_runtime.backends.gpu import read_gpu\n"
        "from la_runtime.errors import HostError\n"
        "try:\n"
        "    read_gpu()\n"
        "except HostError:\n"
        "    pass\n"
        "print([m for m in sys.modules if m.startswith(('cuda', 'tensorrt'))])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )

    assert found.stdout.strip() == "[]"


def test_the_default_opens_real_libraries():
    assert read_gpu.__kwdefaults__ == {"load_library": CDLL}
