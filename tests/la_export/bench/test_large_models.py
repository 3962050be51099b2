"""The script that builds and decodes models of full size, on one that is small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from la_export.bench import large_models
from la_export.bench.gpu.shapes import LLAMA_7B

TINY = replace(
    LLAMA_7B,
    name="tiny",
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    hidden_size=64,
    intermediate_size=128,
    vocab_size=512,
    context=512,
)


def run(*arguments: str) -> None:
    result = CliRunner().invoke(large_models.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_rows_are_measured_and_those_of_earlier_runs_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_models, "SHAPES", {"tiny": TINY})
    out = tmp_path / "large_models.json"
    places = ("--work", str(tmp_path), "--out", str(out))
    run(*places, "--build", "tiny:int8")
    run(*places, "--build", "tiny@2:int4", "--decode", "tiny@2:int4")

    rows = json.loads(out.read_text())["rows"]
    four, eight = sorted(rows, key=lambda row: row["precision"])
    assert (four["model"], eight["model"]) == ("tiny@2", "tiny")
    assert four["answers_equal"] is True
    assert four["l17"] > 0
    assert eight["l17"] is None
    for row in rows:
        assert 0 < row["build_minutes"] < 10
        assert row["disk_gb"] > 0
        assert row["check integer_products"] <= 3.6e-7
        assert row["largest_difference"] < 0.25
