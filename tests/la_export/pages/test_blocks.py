from __future__ import annotations

import re

import pytest

from la_export.pages.blocks import fill_blocks, make_table, read_meanings
from la_runtime.errors import UsageError


def test_a_block_is_replaced_and_the_prose_around_it_kept() -> None:
    page = "before\n<!-- generated:a -->\nold\n<!-- /generated:a -->\nafter\n"

    filled = fill_blocks(page, {"a": lambda: "new\n"})

    assert filled == "before\n<!-- generated:a -->\nnew\n<!-- /generated:a -->\nafter\n"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (
            "<!-- generated:b -->\n<!-- /generated:b -->\n",
            "nothing generates the block 'b'; expected one of: a",
        ),
        ("<!-- generated:a -->\n", "marker <!-- generated:a --> stands alone; expected pairs"),
        ("<!-- /generated:a -->\n", "marker <!-- /generated:a --> stands alone; expected pairs"),
        (
            "<!-- generated:a -->\n<!-- generated:b -->\n<!-- /generated:b -->\n",
            "nothing generates the block 'b'",
        ),
    ],
)
def test_a_marker_without_its_pair_or_renderer_is_refused(page: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        fill_blocks(page, {"a": lambda: "new"})


def test_a_table_survives_bars_and_line_ends_in_its_cells() -> None:
    assert make_table(("a", "b"), [("x|y", "1\n2")]) == "| a | b |\n| --- | --- |\n| x\\|y | 1 2 |"


def test_meanings_are_read_to_the_end_of_their_entry() -> None:
    docstring = """Kinds.

    ``one``: the first,
    which goes on.
    ``two``: the second.

    Args:
        size: in bytes,
            all of them.

    Raises:
        Nothing.
    """

    assert read_meanings(docstring) == {
        "one": "the first, which goes on",
        "two": "the second",
        "size": "in bytes, all of them",
    }
