"""`la-export bench`: what it prints, what it writes, and what stays of an interrupted run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from la_export.bench.speed import processes
from la_export.bench.speed import run as speed_run
from la_export.bench.speed.record import (
    OVERALL,
    MachineRates,
    MemoryFigures,
    Section,
    Selection,
    SpeedRecord,
    read_record,
)
from la_export.cli import bench, main
from la_export.pipeline import BuildReport
from la_runtime.bundle import read_manifest
from la_runtime.errors import ExitCode
from la_runtime.layout import Layout
from la_runtime.source_names import SourceName

RATES = MachineRates(
    bandwidth_bytes_per_s=1e10,
    gemm_rows=32,
    float_operations_per_s=1e11,
    integer_operations_per_s=4e11,
    samples=1,
)
MEMORY = MemoryFigures(
    open_s=0.5, pss_bytes=5_000_000, peak_rss_bytes=6_000_000, shared_pss_bytes=(3_000_000,) * 2
)


@pytest.fixture
def bundle(report_of: Callable[..., BuildReport], tmp_path: Path) -> Path:
    return Path(shutil.copytree(report_of(("llama", False)).bundle, tmp_path / "tiny"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "mine.txt"
    path.write_text("The cat sat on the mat.\nOne, two, three.\n")
    return path


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_STEP_ROUNDS", "_GROWTH_ROUNDS", "_RESERVED_ROUNDS", "_PREFILL_ROUNDS"):
        monkeypatch.setattr(speed_run, name, 1)
    monkeypatch.setattr(speed_run, "_LEAST_ROUNDS", 1)
    monkeypatch.setattr(speed_run, "measure_rates", lambda threads: RATES)
    monkeypatch.setattr(processes, "measure_memory", lambda folder, *, threads: MEMORY)


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments), "--threads", "1"])


def _decode(bundle: Path, prompts: Path, *more: object) -> Result:
    given = ("--prompts", prompts, "--new-tokens", 12, "--only", "decoding", *more)
    return _run(bundle, *given)


def test_names_of_parts_layouts_and_selections_are_those_of_the_enums() -> None:
    assert set(bench.SECTIONS) == set(Section)
    assert set(bench.LAYOUTS) == set(Layout)
    assert set(bench.SELECTIONS) == set(Selection) - {Selection.PLAIN}


def test_a_whole_run_is_one_complete_record_on_stdout_and_in_the_file(
    bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "result.json"

    result = _run(bundle, "--prompts", prompts, "--new-tokens", 8, "--json", "--out", out)

    assert result.exit_code == ExitCode.DONE, result.output
    record = SpeedRecord.model_validate(json.loads(result.stdout))
    assert read_record(out) == record
    assert record.complete
    (run,) = record.bundles
    assert (record.rates, run.memory) == (RATES, MEMORY)
    assert all((run.step_times, run.growth, run.reserved, run.prefill, run.outside, run.decoding))
    assert [found.rows for found in run.transient if found.k == 4] == [8, 24]
    assert not list(tmp_path.glob(".*.partial"))


def test_exact_decoding_gives_the_answers_of_plain_decoding(bundle: Path, prompts: Path) -> None:
    result = _decode(bundle, prompts, "--json", "--no-store")

    (run,) = SpeedRecord.model_validate(json.loads(result.stdout)).bundles
    assert [way.name for way in run.decoding] == [
        "plain",
        "planned, all sources",
        *(f"k={k} {layout}" for k in (2, 4) for layout in ("root-only", "full")),
    ]
    for way in run.decoding:
        assert [figures.category for figures in way.answers] == ["mine", OVERALL]
        assert (way.overall.equal, way.overall.samples) == (2, 2)
    assert run.decoding[1].sources == tuple(SourceName)
    plain = run.decoding[0].overall
    assert plain.tokens_per_pass == plain.rows_per_pass == 1.0


def test_sources_choose_the_planned_ways(bundle: Path, prompts: Path) -> None:
    chosen = ("--selection", "planned", "--sources", "suffix", "--sources", "recycled,suffix")
    result = _decode(bundle, prompts, *chosen, "--json", "--no-store")

    (run,) = SpeedRecord.model_validate(json.loads(result.stdout)).bundles
    assert [way.name for way in run.decoding] == [
        "plain",
        "planned, suffix",
        "planned, suffix + recycled",
    ]
    for way in run.decoding:
        assert (way.overall.equal, way.overall.samples) == (2, 2)


def test_k_layout_and_selection_choose_the_ways(bundle: Path, prompts: Path) -> None:
    chosen = ("--k", "4", "--layout", "full", "--selection", "threshold,exact", "--tau", 0.25)

    result = _decode(bundle, prompts, *chosen, "--json")

    (run,) = SpeedRecord.model_validate(json.loads(result.stdout)).bundles
    assert [way.name for way in run.decoding] == ["plain", "k=4 full", "k=4 threshold 0.25"]


def test_step_times_are_stored_in_the_manifest_unless_told_otherwise(bundle: Path) -> None:
    before = (bundle / "manifest.json").read_bytes()

    assert _run(bundle, "--only", "step-times", "--no-store").exit_code == ExitCode.DONE
    assert (bundle / "manifest.json").read_bytes() == before

    assert _run(bundle, "--only", "step-times").exit_code == ExitCode.DONE
    (stored,) = read_manifest(bundle).step_times
    assert (stored.threads, stored.past) == (1, 128)
    assert stored.times[0].rows == 1
    assert stored.times[-1].rows == 64


def test_the_tables_show_what_was_asked_for_and_progress_goes_to_stderr(
    bundle: Path, prompts: Path
) -> None:
    result = _decode(bundle, prompts)

    assert "decoding, all answers" in result.stdout
    assert "decoding, answers that do not loop" in result.stdout
    assert "2 of 2" in result.stdout
    assert "L(T)" not in result.stdout
    assert "decoding, prompts: 2" in result.stderr


def test_two_bundles_are_measured_in_one_run_over_the_faster_plain_decoding(
    bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(bundle, tmp_path / "other"))

    result = _decode(bundle, prompts, other, "--json")

    one, two = SpeedRecord.model_validate(json.loads(result.stdout)).bundles
    assert (one.name, two.name) == ("tiny", "other")
    assert one.plain_bundle == two.plain_bundle
    slower = two if one.plain_bundle == "tiny" else one
    assert slower.decoding[0].overall.speedup.value <= 1


def test_what_was_measured_before_ctrl_c_is_written_as_incomplete(
    bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(speed_run, "ask", interrupt)
    out = tmp_path / "result.json"
    before = (bundle / "manifest.json").read_bytes()

    parts = "step-times,decoding"
    result = _run(bundle, "--prompts", prompts, "--only", parts, "--out", out, "--new-tokens", 8)

    assert result.exit_code == ExitCode.INTERRUPTED
    record = read_record(out)
    assert not record.complete
    assert record.bundles[0].step_times
    assert record.bundles[0].decoding == ()
    assert "the run ended early" in result.stdout
    assert (bundle / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--k", "3"), "no bundle was built for k = 3; they have 2, 4"),
        (("--out", "/nowhere/result.json"), "--out /nowhere/result.json cannot be written"),
        (("--k", "two"), "'two' is no lookahead length"),
        (("--only", "speed"), "'speed' is none of step-times"),
        (("--prompts", "/nowhere.txt"), "/nowhere.txt"),
    ],
)
def test_impossible_wishes_are_refused(
    bundle: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = _run(bundle, "--only", "decoding", *arguments)

    assert result.exit_code == ExitCode.USAGE
    assert message in result.stderr


def test_two_folders_of_one_name_are_refused(bundle: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(bundle, tmp_path / "more" / "tiny"))

    result = _run(bundle, other, "--only", "step-times")

    assert result.exit_code == ExitCode.USAGE
    assert "two bundles are called 'tiny'" in result.stderr
