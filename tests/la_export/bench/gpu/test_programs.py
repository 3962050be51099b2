"""The programs that a check starts, run on the CPU."""

from __future__ import annotations

import importlib
import sys

import pytest
from click.testing import CliRunner

from la_export.bench.gpu.bandwidth import best_bandwidth, has_cuda_bindings
from la_export.bench.gpu.children import run_child
from la_export.bench.gpu.steps import StepError
from la_export.bench.prompts import load_prompts, pick_prompts
from la_runtime.bundle import read_manifest
from la_runtime.errors import ExitCode
from la_runtime.generation import Engine
from tests.tiny_models import build_tiny_bundle

TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return build_tiny_bundle(tmp_path_factory.mktemp("timed"), lookahead_lengths=(0, 2))


def program(name: str, *arguments: str) -> dict:
    command = [sys.executable, "-m", f"la_export.bench.gpu.{name}", *arguments]
    return run_child(command, timeout_s=TIMEOUT_S)


def test_decoding_is_timed_plainly_and_with_lookaheads_and_gives_the_same_tokens(bundle) -> None:
    options = ["--backend", "ort-cpu", "--k", "2", "--tokens", "6", "--past", "9", "--rounds", "1"]

    found = program("decode", str(bundle), *options, "--prompts", "2", "--threads", "1")

    plain, ahead = found["decoding"]
    assert (plain["k"], plain["tokens_per_pass"]) == (0, 1.0)
    assert ahead["k"] == 2
    assert ahead["tokens_per_pass"] >= 1.0
    assert ahead["same_tokens_as_plain"] is True
    assert [(s["k"], s["layout"], s["rows"]) for s in found["steps"]] == [
        (0, "root-only", 1),
        (2, "root-only", 5),
        (2, "full", 9),
    ]
    assert all(0 < s["best_ms"] <= s["median_ms"] for s in found["steps"])
    manifest = read_manifest(bundle)
    weights = manifest.files["onnx/model.onnx.data"].bytes
    per_token = 2 * 2 * 2 * 16 * 4
    if not manifest.model.tied_embeddings:
        weights -= manifest.contract.vocab_size * manifest.contract.hidden_size * 4
    assert found["read_bytes"] == weights + 9 * per_token
    assert ahead["past"] > 6 // 2, "prompts and half of what was decoded"
    assert ahead["read_bytes"] == weights + ahead["past"] * per_token


def test_tokens_per_pass_are_those_of_the_engine(bundle) -> None:
    options = ["--backend", "ort-cpu", "--k", "2", "--tokens", "8", "--past", "4", "--rounds", "1"]

    found = program("decode", str(bundle), *options, "--prompts", "1", "--threads", "1")

    rate = {entry["k"]: entry["tokens_per_pass"] for entry in found["decoding"]}
    with Engine.open(bundle, threads=1) as engine:
        text = pick_prompts(load_prompts(), per_group=1)[0].turns[0]
        prompt = engine.encode(text)[: 256 - 8 - 1]
        stats = engine.generate(prompt, k=2, max_new_tokens=8, ignore_eos=True).stats
    assert rate[2] == pytest.approx(stats.tokens_per_pass)


def test_the_bandwidth_of_memory_counts_what_is_read_and_what_is_written(monkeypatch) -> None:
    ticks = iter([0.0, 2.0, 2.0, 3.0])
    monkeypatch.setattr("la_export.bench.gpu.bandwidth.time.perf_counter", lambda: next(ticks))

    assert best_bandwidth(lambda: None, 500, copies=2) == 1000.0


def test_something_else_under_the_name_of_cuda_is_no_cuda_bindings(monkeypatch) -> None:
    def find(name: str):
        raise ModuleNotFoundError(f"No module named {name.partition('.')[0]!r}")

    monkeypatch.setattr("la_export.bench.gpu.bandwidth.importlib.util.find_spec", find)
    assert not has_cuda_bindings()
    monkeypatch.setattr("la_export.bench.gpu.bandwidth.importlib.util.find_spec", lambda _: None)
    assert not has_cuda_bindings()


@pytest.mark.parametrize("module", ["gpu.bandwidth", "torch_steps"])
def test_without_a_gpu_a_program_says_so_and_has_not_failed(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("la_export.bench.gpu.bandwidth.has_cuda_bindings", lambda: False)
    device = ["cuda"] if module == "gpu.bandwidth" else ["--device", "cuda"]
    program = importlib.import_module(f"la_export.bench.{module}")

    result = CliRunner().invoke(program._main, device)

    assert result.exit_code == ExitCode.ENVIRONMENT
    assert result.stderr.startswith("error: ")


def test_the_bandwidth_program_prints_what_it_measured() -> None:
    found = program("bandwidth", "cpu", "--size", "1000000", "--copies", "2")

    assert found["through"] == "numpy"
    assert found["bytes_per_s"] > 0


def test_a_backend_that_cannot_be_opened_says_why(bundle) -> None:
    with pytest.raises(StepError, match="unknown backend 'nothing'"):
        program("decode", str(bundle), "--backend", "nothing", "--k", "2")
