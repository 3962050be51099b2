"""A machine with a GPU and TensorRT, both fake, for whatever opens the backend `trt` by name."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from la_runtime.backends import gpu as gpu_module
from la_runtime.backends import trt as trt_module
from la_runtime.backends import trt_engine
from la_runtime.backends.gpu import Gpu
from tests.la_runtime.backends.numpy_device import NumpyDevice
from tests.tensorrt_api.engine import make_tensorrt

__all__ = ["H200", "make_host"]

H200 = Gpu(
    name="NVIDIA H200",
    compute_capability="SM90",
    driver="580.65.06",
    cuda="13.0",
    total_memory_bytes=139 << 30,
)


def make_host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The machine; `gpu`, `device` and `modules` may be changed."""
    host = SimpleNamespace(gpu=H200, device=NumpyDevice())
    host.modules = {"tensorrt": make_tensorrt(host.device).module}

    really_import = importlib.import_module

    def import_module(name: str, package: str | None = None) -> object:
        if not name.startswith("tensorrt"):
            return really_import(name, package)
        if name not in host.modules:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return host.modules[name]

    for module in (trt_module, gpu_module):
        monkeypatch.setattr(module, "read_gpu", lambda: host.gpu)
    monkeypatch.setattr(trt_module, "CudaDevice", lambda: host.device)
    monkeypatch.setattr(trt_engine.importlib, "import_module", import_module)
    return host
