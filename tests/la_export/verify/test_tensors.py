"""Rung 17: two backends over one bundle, one of them wrong in a single tensor."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from la_export.cli import main
from la_export.options import Precision
from la_export.pipeline import BuildOptions, build
from la_export.verify import verification
from la_export.verify.findings import Finding, Status
from la_export.verify.ladder import QUICK, Ladder
from la_export.verify.probes import BorrowedBackend
from la_export.verify.rungs import RUNGS, skip_tensors
from la_export.verify.rungs.tensors import TENSORS, check_tensors
from la_export.verify.tolerance import tolerance_of
from la_runtime.backends import open_backend
from la_runtime.backends.base import Backend
from la_runtime.bundle import open_bundle, read_manifest, seal_bundle
from la_runtime.contract import CacheForm
from la_runtime.errors import ExitCode

FEW = replace(QUICK, prompts=2, new_tokens=6)
NUM_TENSORS = 2 * (6 + 4)  # of each prompt: scores of two kinds of passes, K/V of two layers


def climb_on(backend: Backend, folder: Path) -> Finding:
    return check_tensors(Ladder(open_bundle(folder), backend, source=None, settings=FEW, threads=1))


def with_weight_changed(source: Path, folder: Path, weight: str) -> Path:
    """A copy of a bundle in which one weight's numbers are off by a tenth."""
    copied = Path(shutil.copytree(source, folder))
    for path in (copied / "onnx").glob("*.onnx"):
        model = onnx.load(path)
        (found,) = (entry for entry in model.graph.initializer if entry.name == weight)
        values = numpy_helper.to_array(found) * np.float32(1.1)
        found.CopyFrom(numpy_helper.from_array(values.astype(values.dtype), weight))
        onnx.save(model, path)
    seal_bundle(copied, read_manifest(copied))
    return copied


def test_a_backend_that_computes_the_same_graph_passes(tiny) -> None:
    bundle = tiny / "bundle"
    with closing(open_backend("ort-cpu", open_bundle(bundle), threads=1)) as backend:
        finding = climb_on(backend, bundle)

    assert finding.status is Status.PASSED, finding.explanation
    assert finding.figures[0].value == NUM_TENSORS
    assert finding.figures[1].value == 0.0


@pytest.mark.parametrize(
    ("projection", "tensor"), [("v_proj", "past_key_values.1.value"), ("k_proj", "1.key")]
)
def test_a_layer_that_writes_wrong_keys_or_values_is_named(
    tiny, tmp_path, projection: str, tensor: str
) -> None:
    weight = f"model.layers.1.self_attn.{projection}.weight.transposed"
    wrong = with_weight_changed(tiny / "bundle", tmp_path / "wrong", weight)
    with closing(open_backend("ort-cpu", open_bundle(wrong), threads=1)) as backend:
        finding = climb_on(backend, tiny / "bundle")

    assert finding.status is Status.FAILED
    kinds = {problem.split(" departs")[0].split(", ")[1] for problem in finding.problems}
    assert any(kind.endswith(tensor) for kind in kinds)
    in_cache = {kind for kind in kinds if kind.startswith("past_key_values")}
    assert len(in_cache) == 1, "the layer before it and its other half are right"


def test_a_commit_that_takes_a_wrong_row_shows_in_the_cache_and_in_no_score(tiny) -> None:
    class Careless(BorrowedBackend):
        """Takes neighbours, whatever path was accepted."""

        def commit(self, state, rows):
            super().commit(state, [range(len(accepted)) for accepted in rows])

    bundle = tiny / "bundle"
    with closing(open_backend("ort-cpu", open_bundle(bundle), threads=1)) as backend:
        finding = climb_on(Careless(backend), bundle)

    assert finding.status is Status.FAILED
    assert all(", past_key_values." in problem for problem in finding.problems)


def test_a_score_that_is_not_a_number_departs(tiny) -> None:
    class Broken(BorrowedBackend):
        def forward(self, state, inputs):
            scores = super().forward(state, inputs)
            if inputs.logits_rows.shape[1] > 4:
                scores.logits()[0, 0, 0] = np.nan
            return scores

    bundle = tiny / "bundle"
    with closing(open_backend("ort-cpu", open_bundle(bundle), threads=1)) as backend:
        ladder = Ladder(open_bundle(bundle), backend, source=None, settings=FEW, threads=1)
        assert ladder.plain_runs, "decoded before the fault"
        ladder.backend = Broken(backend)
        finding = check_tensors(ladder)

    assert any("logits of reading departs" in problem for problem in finding.problems)


@pytest.mark.parametrize("cache_form", CacheForm)
def test_halves_are_compared_within_their_own_bound(tiny, tmp_path, cache_form) -> None:
    options = BuildOptions(
        model=str(tiny / "checkpoint"),
        lookahead_lengths=(2,),
        precision=Precision.FP16,
        cache_form=cache_form,
        out=tmp_path / "bundle",
    )
    bundle = build(options).bundle
    with closing(open_backend("ort-cpu", open_bundle(bundle), threads=1)) as backend:
        finding = climb_on(backend, bundle)

    assert finding.status is Status.PASSED, finding.explanation
    assert finding.figures[1].bound == tolerance_of(read_manifest(bundle).precision).logits


def test_a_bundle_that_the_cpu_cannot_compute_is_compared_with_its_float32_twin(
    tiny, tmp_path, monkeypatch
) -> None:
    options = BuildOptions(
        model=str(tiny / "checkpoint"),
        lookahead_lengths=(2,),
        precision=Precision.BF16,
        out=tmp_path / "bundle",
    )
    bundle = open_bundle(build(options).bundle)
    with closing(open_backend("ort-cpu", open_bundle(tiny / "bundle"), threads=1)) as backend:
        # Float32 weights: as far from the twin's rounded ones as bfloat16 rounds.
        ladder = Ladder(bundle, backend, source=None, settings=FEW, threads=1)
        finding = check_tensors(ladder)

    assert finding.figures[0].value == NUM_TENSORS
    assert 1e-4 < finding.figures[1].value < 0.1
    assert not list((bundle.root / "onnx").glob(".twin*"))


def test_it_stands_behind_the_others() -> None:
    assert TENSORS.number == len(RUNGS) + 1 == skip_tensors("no polygraphy").number
    assert TENSORS.name == skip_tensors("no polygraphy").name


def test_without_its_packages_it_is_skipped_with_the_pip_line() -> None:
    finding = skip_tensors("No module named 'polygraphy'").check(None)  # type: ignore[arg-type]

    assert finding.status is Status.SKIPPED
    assert "No module named 'polygraphy'" in finding.explanation
    assert "lookahead-attention[export,cpu]" in finding.explanation


def test_the_command_climbs_it_on_every_backend_but_the_one_it_compares_with(
    tiny, tmp_path, monkeypatch
) -> None:
    bundle = shutil.copytree(tiny / "bundle", tmp_path / "bundle")
    monkeypatch.setattr(verification, "RUNGS", RUNGS[2:3])
    monkeypatch.setattr(
        verification,
        "open_backend",
        lambda name, opened, *, threads, k: open_backend("ort-cpu", opened, threads=threads),
    )
    monkeypatch.setattr(verification, "read_processor", lambda name: "a GPU")
    names = {}
    for backend in ("ort-cpu", "trt"):
        options = ["--backend", backend, "--reference", "self", "--quick", "--json", "-q"]

        result = CliRunner().invoke(main, ["verify", str(bundle), *options, "--threads", "1"])

        assert result.exit_code == ExitCode.DONE, result.output
        names[backend] = [rung["name"] for rung in json.loads(result.stdout)["rungs"]]
    assert names == {"ort-cpu": ["epsilon"], "trt": ["epsilon", "tensors"]}
