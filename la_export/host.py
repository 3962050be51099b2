"""What this machine has left: disk and memory. Reads Linux's own figures."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from la_runtime.errors import HostError

__all__ = ["available_memory_bytes", "free_disk_bytes", "nearest_folder"]

_MEMORY_FACTS: Final = Path("/proc/meminfo")
_CONTAINER: Final = Path("/sys/fs/cgroup")


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the first above it that exists."""
    absolute = path.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.is_dir())


def free_disk_bytes(path: Path) -> int:
    """Bytes that may still be written at a path, whether or not it exists yet.

    Raises:
        HostError: the disk does not answer.
    """
    try:
        return shutil.disk_usage(nearest_folder(path)).free
    except OSError as error:
        raise HostError(
            f"the free space at {path} cannot be read: {error.strerror or error}; check that disk"
        ) from error


def available_memory_bytes(
    *, memory_facts: Path = _MEMORY_FACTS, container: Path = _CONTAINER
) -> int:
    """Memory that a program could still take, within the limit of its container if it has one.

    Args:
        memory_facts: the kernel's table.
        container: the control group's folder.

    Raises:
        HostError: the kernel does not say.
    """
    try:
        lines = memory_facts.read_text(encoding="ascii").splitlines()
        available = next(
            1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, ValueError, IndexError, StopIteration) as error:
        raise HostError(
            f"the free memory cannot be read from {memory_facts}; this works on Linux only"
        ) from error
    return min(available, _left_in_container(container, otherwise=available))


def _left_in_container(container: Path, *, otherwise: int) -> int:
    """What the control group allows beyond what it holds; file caches give way and do not count."""
    try:
        limit = int((container / "memory.max").read_text(encoding="ascii"))
        held = int((container / "memory.current").read_text(encoding="ascii"))
        stat = (container / "memory.stat").read_text(encoding="ascii").split()
    except (OSError, ValueError):  # no such group, or "max": no limit
        return otherwise
    caches = dict(zip(stat[::2], stat[1::2], strict=False)).get("inactive_file", "0")
    return max(0, limit - held + int(caches))
