"""Generated blocks of a Markdown page, and the parts they are made of.

A block stands between `<!-- generated:NAME -->` and `<!-- /generated:NAME -->`; the prose around
it is written by hand. Pure functions of texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from la_runtime.errors import UsageError

__all__ = ["fill_blocks", "make_table", "read_meanings"]

_BLOCK: Final = re.compile(
    r"<!-- generated:(?P<name>[\w-]+) -->\n.*?<!-- /generated:(?P=name) -->", re.DOTALL
)
_MARKER: Final = re.compile(r"<!-- /?generated:[\w-]+ -->")
_MEANING: Final = re.compile(r"(?:``(?P<value>[^`]+)``|(?P<argument>\w+)): (?P<text>.+)")


def fill_blocks(text: str, renderers: Mapping[str, Callable[[], str]]) -> str:
    """The text with every generated block made anew.

    Args:
        text: a page.
        renderers: what makes a block, by its name.

    Raises:
        UsageError: a marker is not one of a pair, or names no renderer.
    """
    filled: set[str] = set()

    def fill(block: re.Match[str]) -> str:
        name = block["name"]
        if name not in renderers:
            known = ", ".join(sorted(renderers))
            raise UsageError(f"nothing generates the block {name!r}; expected one of: {known}")
        begin, end = f"<!-- generated:{name} -->", f"<!-- /generated:{name} -->"
        filled.update((begin, end))
        return f"{begin}\n{renderers[name]().strip()}\n{end}"

    result = _BLOCK.sub(fill, text)
    for marker in _MARKER.findall(result):
        if marker not in filled:
            raise UsageError(
                f"marker {marker} stands alone; expected pairs of <!-- generated:NAME --> and "
                "<!-- /generated:NAME -->"
            )
    return result


def make_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; bars and line ends in cells are made harmless."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_escape(cell) for cell in cells)} |" for cells in lines)


def _escape(cell: str) -> str:
    return " ".join(cell.split()).replace("|", r"\|")


def read_meanings(docstring: str | None) -> dict[str, str]:
    """What a docstring says of values (``value``: text) or arguments (name: text).

    An entry goes on until the next one, an empty line or a line that ends in a colon.
    """
    meanings: dict[str, str] = {}
    current: str | None = None
    for line in (docstring or "").splitlines():
        stripped = line.strip()
        if found := _MEANING.fullmatch(stripped):
            current = found["value"] or found["argument"]
            meanings[current] = found["text"]
        elif not stripped or stripped.endswith(":"):
            current = None
        elif current is not None:
            meanings[current] += f" {stripped}"
    return {name: text.removesuffix(".") for name, text in meanings.items()}
