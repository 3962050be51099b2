"""Result files: how a measurement is written down, and read again.

Owns the format under `docs/results/`: one JSON object a file, with the command that wrote it, when
and where it ran, the rows, and how a table shows them. It does not know what was measured.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from la_runtime.certificate import processor_name
from la_runtime.errors import UsageError

__all__ = ["Cell", "Column", "Machine", "Result", "read_result", "write_result"]

Cell: TypeAlias = str | int | float | bool | None

_PACKAGES: Final = (
    "lookahead-attention",
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxscript",
    "tokenizers",
    "torch",
    "transformers",
)
_NO_FACTS: Final[Mapping[str, Any]] = MappingProxyType({})


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Column(_Record):
    """One column of the table: the rows' key, its title, and digits after the point of floats."""

    key: str
    title: str
    digits: int = 2


class Machine(_Record):
    """Where it ran."""

    cpu: str
    cores: int


class Result(_Record):
    """One measurement as published.

    Args:
        command: the shell command that writes this file again.
        utc: when it ran.
        machine: where it ran.
        versions: of Python and of the packages that matter.
        columns: what a table shows, in order; rows may hold more.
        rows: the figures, one flat object each.
        facts: what holds for all rows, such as settings, bounds and totals.
    """

    command: str
    utc: str
    machine: Machine
    versions: dict[str, str]
    columns: tuple[Column, ...]
    rows: tuple[dict[str, Cell], ...]
    facts: dict[str, Any] = {}


def write_result(
    path: Path,
    *,
    command: str,
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Cell]],
    facts: Mapping[str, Any] = _NO_FACTS,
) -> Result:
    """Write a measurement, with this machine and these versions.

    A script that measures ends in it::

        write_result(
            Path("docs/results/lossless.json"),
            command="scripts/measure_lossless",
            columns=[Column(key="k", title="k"), Column(key="equal", title="Equal tokens")],
            rows=[{"k": 2, "equal": 3072}, {"k": 4, "equal": 3072}],
            facts={"prompts": 48, "new_tokens": 64},
        )

    `scripts/readme_tables` then fills the README's block between `<!-- table:lossless -->` and
    `<!-- /table:lossless -->`.

    Args:
        path: the file; its stem is the table's name.
        command: the shell command that writes it again.
        columns: what the table shows.
        rows: flat objects with a value for each column.
        facts: JSON values that hold for all rows.

    Returns:
        What was written.

    Raises:
        UsageError: a row lacks a column.
    """
    for row in rows:
        if missing := [column.key for column in columns if column.key not in row]:
            raise UsageError(f"a row of {path.name} lacks the column {missing[0]!r}: {dict(row)}")
    result = Result(
        command=command,
        utc=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine=Machine(cpu=processor_name(), cores=len(os.sched_getaffinity(0))),
        versions=_versions(),
        columns=tuple(columns),
        rows=tuple(dict(row) for row in rows),
        facts=dict(facts),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    text = json.dumps(result.model_dump(mode="json"), indent=1, ensure_ascii=False)
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)
    return result


def read_result(path: Path) -> Result:
    """Read a result file.

    Raises:
        UsageError: it cannot be read or is not in the format that `write_result` writes.
    """
    try:
        return Result.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UsageError(f"{path} is no result file: {error}") from error


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
