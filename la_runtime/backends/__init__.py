"""Backends. Opening one imports its library; importing this package imports none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from la_runtime.errors import UsageError

if TYPE_CHECKING:
    from la_runtime.backends.base import Backend
    from la_runtime.bundle import Bundle

__all__ = ["BACKENDS", "check_backend", "open_backend"]

BACKENDS = ("ort-cpu",)


def open_backend(name: str, bundle: Bundle, *, threads: int) -> Backend:
    """Open a bundle's graph on a backend.

    Args:
        name: one of `BACKENDS`.
        bundle: an opened bundle.
        threads: threads for one pass; 0 lets the library choose.

    Raises:
        UsageError: no such backend.
        HostError: its library is not installed.
    """
    check_backend(name)
    from la_runtime.backends.ort import OrtBackend

    return OrtBackend.open(bundle, threads=threads)


def check_backend(name: str) -> None:
    """Refuse a name that is not in `BACKENDS`.

    Raises:
        UsageError: no such backend.
    """
    if name not in BACKENDS:
        raise UsageError(f"unknown backend {name!r}; expected one of: {', '.join(BACKENDS)}")
