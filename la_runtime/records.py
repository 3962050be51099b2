"""What every record of a manifest keeps to: no unknown key, no path out of the bundle."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

__all__ = ["Record", "RelativePath"]


class Record(BaseModel):
    """A frozen part of a manifest; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _check_relative(path: str) -> str:
    """Refuse a path that could leave the bundle."""
    parts = PurePosixPath(path).parts
    is_odd = "\\" in path or "\0" in path
    if not parts or path.startswith("/") or ".." in parts or is_odd or ":" in parts[0]:
        raise ValueError(f"path {path!r} must be relative and stay inside the bundle")
    return path


RelativePath = Annotated[str, AfterValidator(_check_relative)]
