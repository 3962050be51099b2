"""Every error message of the two packages, read from their source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from la_runtime import errors
from la_runtime.errors import LookaheadError

__all__ = ["VARIES", "Message", "error_classes", "find_messages"]

VARIES = "…"
"""Stands for whatever a message fills in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One place that makes an error: its class, its text with `VARIES`, and where it is.

    `text` is empty where the message is not written out at that place.
    """

    kind: str
    text: str
    place: str


def error_classes() -> dict[str, type[LookaheadError]]:
    """The classes of `la_runtime.errors`, by name, as the module defines them."""
    members = inspect.getmembers(errors, inspect.isclass)
    return {name: kind for name, kind in members if issubclass(kind, LookaheadError)}


def find_messages(root: Path) -> Iterator[Message]:
    """Messages of every error made in `root`/la_runtime and `root`/la_export."""
    for package in ("la_runtime", "la_export"):
        for path in sorted((root / package).rglob("*.py")):
            yield from _messages_of(path, shown=path.relative_to(root))


def _messages_of(path: Path, *, shown: Path) -> Iterator[Message]:
    kinds = error_classes()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in kinds:
            for text in _texts_of(node.args[0]) if node.args else [""]:
                place = f"{shown}:{node.lineno}"
                yield Message(kind=name, text=" ".join(text.split()), place=place)


def _texts_of(argument: ast.expr) -> list[str]:
    """The fixed text of a message, with `VARIES` for what it fills in; one a branch."""
    match argument:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            texts = [part.value if isinstance(part, ast.Constant) else VARIES for part in parts]
            return ["".join(map(str, texts))]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [
                (start or VARIES) + (end or VARIES)
                for start in _texts_of(left)
                for end in _texts_of(right)
            ]
        case ast.IfExp(body=body, orelse=orelse):
            return [*_texts_of(body), *_texts_of(orelse)]
        case _:
            return [""]
