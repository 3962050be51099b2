from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from la_export.bench.speed.record import SpeedRecord
from la_export.cli import main
from la_runtime.errors import ExitCode
from tests.la_export.bench.report.records import (
    make_answers,
    make_bundle,
    make_empty_record,
    make_record,
    make_run,
)

SLOWER = make_record(
    make_bundle(decoding=(make_run(0), make_run(2, answers=(make_answers(tokens_per_pass=1.0),))))
)


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.fixture
def save(tmp_path: Path) -> Callable[[SpeedRecord], Path]:
    """Writes a result where nothing else is."""

    def write(record: SpeedRecord) -> Path:
        folder = tmp_path / f"result-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "result.json").write_text(record.model_dump_json(), encoding="utf-8")
        return folder / "result.json"

    return write


def test_stored_result_is_shown_with_the_papers_figures_beside_it(
    save: Callable[[SpeedRecord], Path],
) -> None:
    result = _run("--from", save(make_record()))

    assert result.exit_code == ExitCode.DONE, result.output
    assert "k=2 root-only" in result.stdout
    assert "the paper's" in result.stdout
    assert result.stdout.count("LLaMA-7B") == 2
    assert "section 4.2" in result.stdout


def test_json_is_the_record_alone_and_the_comparison_goes_to_stderr(
    save: Callable[[SpeedRecord], Path],
) -> None:
    record = make_record()

    result = _run("--from", save(record), "--compare", save(record), "--json")

    assert result.exit_code == ExitCode.DONE, result.output
    assert SpeedRecord.model_validate(json.loads(result.stdout)) == record
    assert "Compared with the older run" in result.stderr


def test_regression_is_shown_and_is_exit_code_1(save: Callable[[SpeedRecord], Path]) -> None:
    old, new = save(make_record()), save(SLOWER)

    worse = _run("--from", new, "--compare", old)
    tolerated = _run("--from", new, "--compare", old, "--tolerance", "50")
    better = _run("--from", old, "--compare", new)

    assert worse.exit_code == ExitCode.FAILED
    assert "k=2 root-only: tokens per pass" in worse.stdout
    assert "regressed" in worse.stdout
    assert tolerated.exit_code == better.exit_code == ExitCode.DONE
    assert "improved" in better.stdout


def test_report_is_written_even_if_figures_regressed(
    save: Callable[[SpeedRecord], Path], tmp_path: Path
) -> None:
    bare = SLOWER.bundles[0].model_copy(update={"growth": (), "step_times": ()})
    new = SLOWER.model_copy(update={"bundles": (bare,), "peers": ()})
    page = tmp_path / "speed.html"

    result = _run("--from", save(new), "--compare", save(make_record()), "--report", page)

    assert result.exit_code == ExitCode.FAILED
    assert "Compared with the older run" in page.read_text(encoding="utf-8")
    assert (tmp_path / "speed-speedup.svg").exists()


def test_without_the_drawing_package_everything_but_the_report_works(
    save: Callable[[SpeedRecord], Path], tmp_path: Path
) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from la_export.cli import main\n"
        "main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "bench", "--from", str(save(make_empty_record()))]

    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    refused = subprocess.run(
        [*command, "--report", str(tmp_path / "x.html")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert shown.returncode == ExitCode.DONE, shown.stderr
    assert refused.returncode == ExitCode.ENVIRONMENT
    assert refused.stderr == (
        "error: the package matplotlib, which draws reports, is not installed; run: "
        "pip install 'lookahead-attention[report]'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "either BUNDLES to measure or --from"),
        (["bundle", "--from", "RESULT"], "either BUNDLES to measure or --from"),
        (["bundle", "--compare", "none.json"], "none.json is no result of 'la-export bench'"),
        (["bundle", "--report", "none/page.html"], "--report none/page.html cannot be written"),
        (["bundle", "--report", "."], "--report . cannot be written"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_measured(
    arguments: list[str], fragment: str, save: Callable[[SpeedRecord], Path]
) -> None:
    path = str(save(make_record()))

    result = _run(*(path if argument == "RESULT" else argument for argument in arguments))

    assert result.exit_code == ExitCode.USAGE
    assert fragment in result.stderr
    assert result.stdout == ""
