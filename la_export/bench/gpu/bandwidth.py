"""Measures a memory's bandwidth by copying within it.

    python -m la_export.bench.gpu.bandwidth cuda

On a GPU through cuda-bindings if they are there, else through PyTorch; on the CPU through NumPy.
A copy reads and writes every byte, which counts twice.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from typing import Final

import click
import numpy as np

from la_runtime.errors import ExitCode

__all__ = ["best_bandwidth", "has_cuda_bindings", "make_numpy_copy"]

_BYTES: Final = 1 << 30
_COPIES: Final = 20


def best_bandwidth(copy: Callable[[], None], size_bytes: int, *, copies: int) -> float:
    """Bytes a second of the fastest of some copies.

    Args:
        copy: copies once, and returns when it is done.
        size_bytes: that a copy reads, and writes again.
        copies: how many.
    """
    copy()
    times = []
    for _ in range(copies):
        began = time.perf_counter()
        copy()
        times.append(time.perf_counter() - began)
    return 2 * size_bytes / min(times)


def make_numpy_copy(size_bytes: int) -> Callable[[], None]:
    """A copy in host memory, by one thread."""
    source, target = (np.ones(size_bytes, np.uint8) for _ in range(2))

    def copy() -> None:
        np.copyto(target, source)

    return copy


def _make_cuda_copy(size_bytes: int) -> Callable[[], None]:
    """A copy in device memory, through NVIDIA's own bindings."""
    device = importlib.import_module("la_runtime.backends.cuda").CudaDevice()
    kinds = importlib.import_module("cuda.bindings.runtime").cudaMemcpyKind
    source, target = (device.allocate(size_bytes, "measuring its bandwidth") for _ in range(2))

    def copy() -> None:
        device.call(
            "cudaMemcpyAsync",
            target.address,
            source.address,
            size_bytes,
            kinds.cudaMemcpyDeviceToDevice,
            device.stream,
        )
        device.synchronize()

    return copy


def _make_torch_copy(size_bytes: int) -> Callable[[], None]:
    try:
        torch = importlib.import_module("torch")
        has_gpu = torch.cuda.is_available()
    except ModuleNotFoundError:
        has_gpu = False
    if not has_gpu:
        click.echo("error: neither cuda-bindings nor a PyTorch that finds a GPU is here", err=True)
        sys.exit(ExitCode.ENVIRONMENT)
    source, target = (torch.ones(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return copy


def has_cuda_bindings() -> bool:
    """Whether cuda-bindings is installed; other packages, too, put theirs under `cuda`."""
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


@click.command()
@click.argument("device", type=click.Choice(["cuda", "cpu"]))
@click.option("--size", type=click.IntRange(min=1), default=_BYTES, show_default=True)
@click.option("--copies", type=click.IntRange(min=1), default=_COPIES, show_default=True)
def _main(device: str, size: int, copies: int) -> None:
    """Print the bandwidth of DEVICE's memory in bytes a second, as one JSON object."""
    makers = {"numpy": make_numpy_copy, "cuda-bindings": _make_cuda_copy, "torch": _make_torch_copy}
    through = "numpy"
    if device == "cuda":
        through = "cuda-bindings" if has_cuda_bindings() else "torch"
    found = best_bandwidth(makers[through](size), size, copies=copies)
    click.echo(json.dumps({"bytes_per_s": found, "through": through, "copied_bytes": size}))


if __name__ == "__main__":
    _main()
