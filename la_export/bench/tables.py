"""Tables of the README, made from result files so that no figure is typed by hand.

Pure functions of texts and results; the script `readme_tables` brings the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from la_export.bench.results import Cell, Column, Result
from la_runtime.errors import UsageError

__all__ = ["fill_tables", "render_table"]

_MARKER: Final = re.compile(r"<!-- (?P<end>/?)table:(?P<name>[\w-]+) -->")


def render_table(result: Result) -> str:
    """A Markdown table of a result's columns, and a line that says what wrote it and where."""
    header = [column.title for column in result.columns]
    lines = [header, ["---" if _is_text(result, c) else "---:" for c in result.columns]]
    lines += [[_show(row[c.key], digits=c.digits) for c in result.columns] for row in result.rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    source = f"`{result.command}`, {result.utc[:10]}, {result.machine.cpu}"
    return f"{table}\n\n<sub>{source}, {result.machine.cores} cores</sub>"


def _is_text(result: Result, column: Column) -> bool:
    return any(isinstance(row[column.key], str) for row in result.rows)


def _show(cell: Cell, *, digits: int) -> str:
    match cell:
        case None:
            return "–"
        case bool():
            return "yes" if cell else "no"
        case int():
            return f"{cell:,}"
        case float():
            return f"{cell:,.{digits}f}"
        case _:
            return cell.replace("|", r"\|").replace("\n", " ")


def fill_tables(text: str, results: Mapping[str, Result]) -> str:
    """The text with every block between table markers replaced by its table.

    Args:
        text: Markdown with pairs of `<!-- table:NAME -->` and `<!-- /table:NAME -->`.
        results: by name.

    Raises:
        UsageError: a marker is not closed or closes nothing, or names no result.
    """
    parts: list[str] = []
    done = 0
    open_name: str | None = None
    for marker in _MARKER.finditer(text):
        name, is_end = marker["name"], bool(marker["end"])
        if is_end and open_name == name:
            parts.append(f"\n{render_table(_find(results, name))}\n{marker[0]}")
            open_name = None
        elif not is_end and open_name is None:
            parts.append(text[done : marker.end()])
            open_name = name
        else:
            raise UsageError(
                f"table marker {marker[0]} stands alone; expected pairs of <!-- table:NAME --> "
                "and <!-- /table:NAME -->, one after the other"
            )
        done = marker.end()
    if open_name is not None:
        raise UsageError(f"table {open_name!r} is not closed by <!-- /table:{open_name} -->")
    return "".join([*parts, text[done:]])


def _find(results: Mapping[str, Result], name: str) -> Result:
    if name not in results:
        known = ", ".join(sorted(results)) or "none"
        raise UsageError(f"no result file for table {name!r} in docs/results; there are: {known}")
    return results[name]
