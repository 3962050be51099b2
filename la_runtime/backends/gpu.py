"""What NVIDIA GPU is here, asked of the driver alone.

TensorRT crashes the process when it is created without a driver; so this is asked first, through
the driver's own library, and nothing of TensorRT or of the CUDA runtime is loaded for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_size_t, create_string_buffer
from dataclasses import dataclass
from typing import Final

from la_runtime.errors import HostError

__all__ = ["Gpu", "read_gpu"]

_DRIVER_LIBRARY: Final = "libcuda.so.1"
_MANAGEMENT_LIBRARY: Final = "libnvidia-ml.so.1"
_SUCCESS: Final = 0
_NO_DEVICE: Final = 100
_MAJOR_ATTRIBUTE: Final = 75
_MINOR_ATTRIBUTE: Final = 76
_TEXT_BYTES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """An NVIDIA GPU and the driver it runs under.

    Args:
        name: as the driver gives it, such as ``NVIDIA H200``.
        compute_capability: such as ``SM90``.
        driver: version of the driver, such as ``580.65.06``; None where it cannot be read.
        cuda: the newest CUDA the driver runs, such as ``13.0``.
        total_memory_bytes: of the device.
    """

    name: str
    compute_capability: str
    driver: str | None
    cuda: str
    total_memory_bytes: int


def read_gpu(index: int = 0, *, load_library: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> Gpu:
    """Ask the driver about a GPU.

    Args:
        index: which of the visible GPUs, from 0.
        load_library: opens a shared library by name.

    Raises:
        HostError: there is no driver, it does not start, or there is no such GPU.
    """
    try:
        library = load_library(_DRIVER_LIBRARY)
    except OSError as error:
        raise HostError(
            f"no NVIDIA driver: {error}; install the driver, so that 'nvidia-smi' works, or run "
            "the container with its GPUs ('docker run --gpus all')"
        ) from error
    driver = _Driver(library)
    count = driver.start()
    if index >= count:
        raise HostError(
            f"no NVIDIA GPU {index}: the driver shows {count}; check 'nvidia-smi' and the "
            "environment variable CUDA_VISIBLE_DEVICES"
        )
    major, minor = divmod(driver.cuda_version(), 1000)
    return Gpu(
        name=driver.name(index),
        compute_capability=driver.compute_capability(index),
        driver=_read_driver_version(load_library),
        cuda=f"{major}.{minor // 10}",
        total_memory_bytes=driver.total_memory_bytes(index),
    )


class _Driver:
    """The few functions of libcuda that need no context."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def start(self) -> int:
        """Initialize the driver; how many GPUs it shows."""
        code = self._library.cuInit(0)
        if code == _NO_DEVICE:
            return 0
        self._check("cuInit", code)
        count = c_int()
        self._check("cuDeviceGetCount", self._library.cuDeviceGetCount(byref(count)))
        return count.value

    def cuda_version(self) -> int:
        """1000 times the major version plus 10 times the minor one."""
        version = c_int()
        self._check("cuDriverGetVersion", self._library.cuDriverGetVersion(byref(version)))
        return version.value

    def name(self, index: int) -> str:
        text = create_string_buffer(_TEXT_BYTES)
        code = self._library.cuDeviceGetName(text, _TEXT_BYTES, self._device(index))
        self._check("cuDeviceGetName", code)
        return text.value.decode("utf-8", "replace")

    def compute_capability(self, index: int) -> str:
        major = self._attribute(index, _MAJOR_ATTRIBUTE)
        return f"SM{major}{self._attribute(index, _MINOR_ATTRIBUTE)}"

    def total_memory_bytes(self, index: int) -> int:
        size = c_size_t()
        code = self._library.cuDeviceTotalMem_v2(byref(size), self._device(index))
        self._check("cuDeviceTotalMem_v2", code)
        return size.value

    def _device(self, index: int) -> c_int:
        device = c_int()
        self._check("cuDeviceGet", self._library.cuDeviceGet(byref(device), c_int(index)))
        return device

    def _attribute(self, index: int, attribute: int) -> int:
        value = c_int()
        code = self._library.cuDeviceGetAttribute(
            byref(value), c_int(attribute), self._device(index)
        )
        self._check("cuDeviceGetAttribute", code)
        return value.value

    def _check(self, function: str, code: int) -> None:
        if code != _SUCCESS:
            raise HostError(
                f"the NVIDIA driver does not work: {function} says {self._error_name(code)}; "
                "update the driver (CUDA 13 needs 580 or newer), or restart the machine after an "
                "update"
            )

    def _error_name(self, code: int) -> str:
        name = c_char_p()
        known = self._library.cuGetErrorName(c_int(code), byref(name)) == _SUCCESS
        return name.value.decode() if known and name.value is not None else f"error {code}"


def _read_driver_version(load_library: Callable[[str], ctypes.CDLL]) -> str | None:
    try:
        library = load_library(_MANAGEMENT_LIBRARY)
    except OSError:
        return None
    if library.nvmlInit_v2() != _SUCCESS:
        return None
    try:
        text = create_string_buffer(_TEXT_BYTES)
        code = library.nvmlSystemGetDriverVersion(text, _TEXT_BYTES)
        return text.value.decode() if code == _SUCCESS else None
    finally:
        library.nvmlShutdown()
