"""Kernel timings between builds: what one build measured, the next need not measure again.

A file holds the timings of one TensorRT version, GPU and driver, behind a digest: TensorRT may
crash on damaged timings, so it never gets to see any.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from la_export.plan.api import IBuilderConfig, ITimingCache
from la_runtime.backends.gpu import Gpu

__all__ = ["TimingCacheFile", "default_timing_folder"]

logger = logging.getLogger(__name__)

_MAGIC: Final = b"lookahead-attention timing cache 1\n"
_DIGEST_BYTES: Final = hashlib.sha256().digest_size


def default_timing_folder() -> Path:
    """In the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lookahead-attention" / "timing"


class TimingCacheFile:
    """The timings of one TensorRT version, GPU and driver, in a folder.

    Args:
        folder: holds one file for each of them.
        version: of TensorRT.
        gpu: the timings are of it.
    """

    def __init__(self, folder: Path, *, version: str, gpu: Gpu) -> None:
        key = f"{version}-{gpu.compute_capability}-{gpu.driver or 'unknown'}"
        self.path = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', key)}.cache"

    def read(self) -> bytes:
        """The timings so far; none where there is no file, or one that is damaged."""
        try:
            stored = self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            logger.warning("timing cache %s cannot be read: %s", self.path, error)
            return b""
        header = len(_MAGIC) + _DIGEST_BYTES
        timings = stored[header:]
        if stored[:header] != _MAGIC + hashlib.sha256(timings).digest():
            logger.warning("timing cache %s is damaged and is made anew", self.path)
            return b""
        return timings

    def write(self, timings: bytes) -> None:
        """Replace the file in one step; a folder that cannot be written only costs time."""
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(_MAGIC + hashlib.sha256(timings).digest() + timings)
            os.replace(partial, self.path)
        except OSError as error:
            logger.warning("timings are not remembered: %s", error)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def attach(self, config: IBuilderConfig) -> None:
        """Give a build the timings so far; those that TensorRT refuses are measured again."""
        cache = config.create_timing_cache(self.read())
        if cache is None or not config.set_timing_cache(cache, False):
            logger.warning("TensorRT refuses the timing cache %s; it is made anew", self.path)
            empty = config.create_timing_cache(b"")
            assert empty is not None, "no timings cannot be damaged"
            config.set_timing_cache(empty, False)

    def keep(self, config: IBuilderConfig) -> None:
        """Remember what a build has measured."""
        cache: ITimingCache | None = config.get_timing_cache()
        if cache is not None:
            self.write(bytes(memoryview(cache.serialize()).cast("B")))
