"""Code blocks and tables of Markdown pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["CodeBlock", "find_code_blocks", "split_row"]

_NOT_RUN: Final = re.compile(r"<!-- not run: (?P<reason>.+) -->")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBlock:
    """A fenced block.

    Args:
        path: its page.
        line: of its first line of code, from 1.
        language: behind the opening fence, "" if none.
        code: its lines.
        not_run: why it must not be run, from a comment right above it; "" if it may be.
    """

    path: Path
    line: int
    language: str
    code: str
    not_run: str


def find_code_blocks(path: Path) -> Iterator[CodeBlock]:
    """The fenced blocks of a page, in order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    begin: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if begin is None:
            begin = number
            continue
        above = next((text for text in reversed(lines[:begin]) if text), "")
        marked = _NOT_RUN.fullmatch(above)
        yield CodeBlock(
            path=path,
            line=begin + 2,
            language=lines[begin].removeprefix("```").strip(),
            code="\n".join(lines[begin + 1 : number]) + "\n",
            not_run=marked["reason"] if marked else "",
        )
        begin = None
    assert begin is None, f"{path}: the block that begins in line {begin} is not closed"


def split_row(line: str) -> list[str]:
    """The cells of a table's row."""
    cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return [cell.strip().replace(r"\|", "|") for cell in cells]
