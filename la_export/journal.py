"""What of a build is done, kept in its working folder: a build that was killed goes on from there.

    .journal/build.json      the build it belongs to, and each finished stage with what it gave
    .journal/trace.onnx      the traced graph

A journal of another model, other options or other versions is none. It is gone before a bundle is
sealed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import onnx_ir as ir
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from la_export.graph.step_graph import StepGraph, WeightSource
from la_export.stages import Stage
from la_runtime.contract import Contract

__all__ = ["Journal", "is_journal_of", "make_key"]

_FOLDER: Final = ".journal"
_FILE: Final = "build.json"
_GRAPH_FILE: Final = "trace.onnx"
_SOURCES: Final = TypeAdapter(dict[str, WeightSource])

T = TypeVar("T")


def make_key(facts: dict[str, Any]) -> str:
    """SHA-256 of everything that decides what a build writes."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class _Record(BaseModel):
    """The journal's file."""

    model_config = ConfigDict(extra="forbid")

    key: str
    done: dict[Stage, Any] = Field(default_factory=dict)
    files: dict[str, int] = Field(default_factory=dict)


class Journal:
    """The journal of one working folder.

    Args:
        work: the working folder.
        key: of the build.

    Attributes:
        folder: where it is.
    """

    def __init__(self, work: Path, key: str) -> None:
        self._work = work
        self.folder = work / _FOLDER
        found = _read_whole(work, key)
        self._record = _Record(key=key) if found is None else found
        # What a stage had begun, and what checks had put aside.
        for name in _list_files(work).keys() - self._record.files.keys():
            (work / name).unlink()

    @property
    def done(self) -> tuple[Stage, ...]:
        """Stages that a build before this one has finished, in order."""
        return tuple(stage for stage in Stage if stage in self._record.done)

    def once(self, stage: Stage, kind: TypeAdapter[T], run: Callable[[], T]) -> T:
        """What a stage gives: run, unless it is finished."""
        if not self.is_done(stage):
            self.write(stage, run(), kind)
        return self.recall(stage, kind)

    def is_done(self, stage: Stage) -> bool:
        """Whether a stage is finished."""
        return stage in self.done

    def recall(self, stage: Stage, kind: TypeAdapter[T]) -> T:
        """What a finished stage gave."""
        return kind.validate_python(self._record.done[stage])

    def write(self, stage: Stage, given: Any = None, kind: TypeAdapter[Any] | None = None) -> None:
        """Note that a stage is finished and what it gave; what it wrote is on the disk by then."""
        _flush(self._work)
        self._record.done[stage] = None if kind is None else kind.dump_python(given, mode="json")
        self.folder.mkdir(exist_ok=True)
        self._record.files = _list_files(self._work)
        partial = self.folder / f"{_FILE}.partial"
        partial.write_text(self._record.model_dump_json(), encoding="utf-8")
        os.replace(partial, self.folder / _FILE)

    def write_trace(self, step_graph: StepGraph) -> None:
        """Keep a traced graph."""
        self.folder.mkdir(exist_ok=True)
        ir.save(step_graph.model, self.folder / _GRAPH_FILE)
        self.write(Stage.TRACE, step_graph.weights, _SOURCES)

    def read_trace(self, contract: Contract) -> StepGraph:
        """The graph that was kept."""
        return StepGraph(
            model=ir.load(self.folder / _GRAPH_FILE),
            contract=contract,
            weights=self.recall(Stage.TRACE, _SOURCES),
        )

    def remove(self) -> None:
        """Nothing of it belongs into a bundle, nor a folder that a killed check has left."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for folder in sorted((p for p in self._work.rglob("*") if p.is_dir()), reverse=True):
            with suppress(OSError):
                folder.rmdir()


def is_journal_of(work: Path, *, key: str) -> bool:
    """Whether a working folder holds a journal of this build, and every file that it names."""
    return _read_whole(work, key) is not None


def _read_whole(work: Path, key: str) -> _Record | None:
    try:
        record = _Record.model_validate_json((work / _FOLDER / _FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    is_whole = record.files.items() <= _list_files(work).items()
    return record if record.key == key and is_whole else None


def _list_files(work: Path) -> dict[str, int]:
    """Bytes of all but the journal's own file, by relative path."""
    return {
        path.relative_to(work).as_posix(): path.stat().st_size
        for path in work.rglob("*")
        if path.is_file() and path != work / _FOLDER / _FILE
    }


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
