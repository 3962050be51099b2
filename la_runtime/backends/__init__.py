"""Backends. Opening one imports its library; importing this package imports none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from la_runtime.errors import UsageError

if TYPE_CHECKING:
    from la_runtime.backends.base import Backend
    from la_runtime.bundle import Bundle

__all__ = ["BACKENDS", "check_backend", "open_backend", "read_processor"]

# `ort-cpu` and `ort-cuda` run the ONNX graph, the others a plan.
BACKENDS = ("ort-cpu", "ort-cuda", "trt", "trt-rtx")


def open_backend(name: str, bundle: Bundle, *, threads: int, k: int | None = None) -> Backend:
    """Open a bundle's graph on a backend.

    Args:
        name: one of `BACKENDS`.
        bundle: an opened bundle.
        threads: CPU threads for one pass; 0 lets the library choose.
        k: lookahead length whose plan is opened where there is one per k; the largest built by
            default.

    Raises:
        UsageError: no such backend.
        BundleError: the bundle has nothing that this backend can run here.
        HostError: its library, or the device it needs, is missing.
    """
    check_backend(name)
    match name:
        case "ort-cpu":
            from la_runtime.backends.ort import OrtBackend

            return OrtBackend.open(bundle, threads=threads)
        case "ort-cuda":
            from la_runtime.backends.ort_cuda import OrtCudaBackend

            return OrtCudaBackend.open(bundle, threads=threads)
        case _:
            from la_runtime.backends.trt import TrtBackend
            from la_runtime.plans import PlanTarget

            return TrtBackend.open(bundle, target=PlanTarget(name), k=k)


def check_backend(name: str) -> None:
    """Refuse a name that is not in `BACKENDS`.

    Raises:
        UsageError: no such backend.
    """
    if name not in BACKENDS:
        raise UsageError(f"unknown backend {name!r}; expected one of: {', '.join(BACKENDS)}")


def read_processor(name: str) -> str:
    """What a backend runs on: this machine's processor, or its GPU.

    Raises:
        UsageError: no such backend.
        HostError: the backend needs a GPU and none can be used.
    """
    check_backend(name)
    if name == "ort-cpu":
        from la_runtime.certificate import processor_name

        return processor_name()
    from la_runtime.backends.gpu import read_gpu

    gpu = read_gpu()
    return f"{gpu.name} ({gpu.compute_capability})"
