from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STALE = "# Page\n\n<!-- generated:exit-codes -->\nold\n<!-- /generated:exit-codes -->\n"


def _run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "la_export.pages", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "docs" / "page.md"
    path.parent.mkdir()
    path.write_text(STALE, encoding="utf-8")
    return path


def test_a_stale_page_is_reported_and_left_alone_with_check(page: Path) -> None:
    done = _run(page.parent.parent, "--check")

    assert done.returncode == 1
    assert f"docs/{page.name} is stale: run scripts/docs" in done.stderr
    assert page.read_text(encoding="utf-8") == STALE


def test_a_page_that_was_made_anew_is_not_stale(page: Path) -> None:
    made = _run(page.parent.parent)
    checked = _run(page.parent.parent, "--check")

    assert made.returncode == checked.returncode == 0, made.stderr + checked.stderr
    assert "| 130 | ended by Ctrl-C |" in page.read_text(encoding="utf-8")
    assert list(page.parent.iterdir()) == [page]


def test_a_wrong_marker_is_reported_with_its_page(page: Path) -> None:
    page.write_text("<!-- generated:exit-codes -->\n", encoding="utf-8")

    done = _run(page.parent.parent)

    assert done.returncode == 1
    assert "docs/page.md: marker <!-- generated:exit-codes --> stands alone" in done.stderr
