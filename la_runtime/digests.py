"""SHA-256 digests of a bundle's files, computed in full or remembered on this machine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "DigestCheck",
    "FileEntry",
    "Sha256",
    "digest_cache_path",
    "hash_file",
    "recall_digest",
]

logger = logging.getLogger(__name__)

_HASH_CHUNK_BYTES: Final = 4 << 20

_SHA256_PATTERN: Final = "^[0-9a-f]{64}$"

Sha256 = Annotated[str, Field(pattern=_SHA256_PATTERN)]


class FileEntry(BaseModel):
    """Digest and size of one file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Sha256
    bytes: int = Field(ge=0)


class DigestCheck(StrEnum):
    """How file digests are checked when a bundle is opened.

    ``full`` hashes every file. ``cached`` trusts a file whose size, modification time and inode
    are those of an earlier full check on this machine, which it remembers in the user's cache
    folder: it finds damage and mix-ups, not somebody who can write there.
    """

    FULL = "full"
    CACHED = "cached"


def hash_file(path: Path) -> FileEntry:
    """SHA-256 and size of a file, read in chunks."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(sha256=digest.hexdigest(), bytes=size)


def digest_cache_path() -> Path:
    """Where `DigestCheck.CACHED` remembers digests."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lookahead-attention" / "digests.json"


def recall_digest(path: Path) -> FileEntry:
    """The file's digest: remembered if its size, time and inode are unchanged, else computed."""
    status = path.stat()
    identity = [status.st_size, status.st_mtime_ns, status.st_ino]
    cache = _read_cache()
    key = str(path.resolve())
    known = cache.get(key)
    if isinstance(known, list) and known[:-1] == identity and _is_sha256(known[-1]):
        return FileEntry(sha256=known[-1], bytes=status.st_size)
    entry = hash_file(path)
    cache[key] = [*identity, entry.sha256]
    _write_cache(cache)
    return entry


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.match(_SHA256_PATTERN, value) is not None


def _read_cache() -> dict[str, Any]:
    try:
        cache = json.loads(digest_cache_path().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return cache if isinstance(cache, dict) else {}


def _write_cache(cache: dict[str, Any]) -> None:
    target = digest_cache_path()
    partial = target.with_suffix(f".{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(cache), encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        logger.warning("digests are not remembered: %s", error)
