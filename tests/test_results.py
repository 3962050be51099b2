from __future__ import annotations

from pathlib import Path

from la_export.bench.readme import load_results
from la_export.bench.tables import fill_tables

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def test_the_readme_shows_the_published_results() -> None:
    text = README.read_text(encoding="utf-8")

    filled = fill_tables(text, load_results(ROOT / "docs" / "results"))

    assert filled == text, "run scripts/readme_tables"


def test_every_published_result_names_a_command_of_this_repository() -> None:
    for name, result in load_results(ROOT / "docs" / "results").items():
        first, *rest = result.command.split()
        is_ours = any((ROOT / word).is_file() for word in (first, *rest))
        assert is_ours or first in {"la-export", "la-runtime"}, name
