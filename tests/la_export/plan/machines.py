"""Machines with a GPU and without one, as far as who asks for it can tell."""

from __future__ import annotations

from typing import Final

from la_runtime.backends.gpu import Gpu
from la_runtime.errors import HostError

__all__ = ["GPU", "find_gpu", "find_no_gpu", "never_ask"]

GPU: Final = Gpu(
    name="NVIDIA Test",
    compute_capability="SM90",
    driver="580.65.06",
    cuda="13.0",
    total_memory_bytes=1 << 30,
)


def find_gpu() -> Gpu:
    return GPU


def find_no_gpu() -> Gpu:
    raise HostError("no NVIDIA driver: it is not there")


def never_ask() -> Gpu:
    raise AssertionError("it needs no GPU")
