"""`la-export estimate`: what is printed, what is warned of, and what it needs."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from la_export.cli import main
from la_runtime.errors import ExitCode
from tests.tiny_models import make_tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A folder with a configuration and nothing else."""
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("estimate") / "tiny")
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    return str(folder)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["estimate", *arguments])


def test_it_is_one_json_object_with_every_target_and_length(model: str) -> None:
    result = run("--model", model, "--k", "0", "--k", "4", "--precision", "fp16", "--json")

    assert result.exit_code == ExitCode.DONE, result.output
    record = json.loads(result.stdout)
    assert [target["target"] for target in record["targets"]] == [
        "ort-cpu",
        "ort-cuda",
        "trt, a plan per k",
        "trt, one shared plan",
    ]
    assert [step["k"] for step in record["targets"][0]["steps"]] == [0, 4]
    assert record["targets"][1]["steps"][1]["rows"] == {"root-only": 9, "full": 25}
    assert (record["precision"], record["context"], record["max_batch"]) == ("fp16", 256, 4)


def test_the_tables_hold_the_same_figures(model: str) -> None:
    result = run("--model", model, "--max-batch", "2", "--cache-form", "scatter")

    assert result.exit_code == ExitCode.DONE, result.output
    assert "trt/trt/k4.plan" in result.stdout
    assert "9 / 25" in result.stdout
    assert "cache form scatter, context 256, batch up to 2" in result.stdout


def test_a_gpu_that_is_too_small_is_warned_of_on_stderr(model: str) -> None:
    result = run("--model", model, "--device-memory", "0.0001", "--json")

    assert result.exit_code == ExitCode.DONE
    warnings = json.loads(result.stdout)["warnings"]
    assert any("of device memory, and there are 0.0 GB" in line for line in warnings)
    assert [f"warning: {line}" for line in warnings] == result.stderr.splitlines()


def test_the_disk_that_is_looked_at_is_where_the_bundle_would_be_built(
    model: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measure(path) -> SimpleNamespace:
        asked.append(str(path))
        return SimpleNamespace(free=1000)

    monkeypatch.setattr(shutil, "disk_usage", measure)

    result = run("--model", model, "--out", str(tmp_path / "bundle"), "--json")

    assert asked == [str(tmp_path)]
    assert any("of disk, and there are 0.0 GB" in line for line in result.stderr.splitlines())


def test_a_model_that_cannot_be_exported_is_refused_as_a_build_would(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')

    result = run("--model", str(tmp_path))

    assert result.exit_code == ExitCode.FAILED
    assert "model type 'gpt2'" in result.stderr
