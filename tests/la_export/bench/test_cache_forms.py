"""What is compared with what across cache forms, and that a wrong cache is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from la_export.bench.cache_forms import (
    PLAINLY,
    FormRuns,
    Way,
    compare_forms,
    decode_form,
    make_ways,
)
from la_export.bench.exactness import EncodedPrompt, encode_prompts
from la_export.bench.prompts import load_prompts
from la_export.options import Precision
from la_export.pipeline import BuildOptions, build
from la_export.verify.decoding import Decoded
from la_export.verify.ladder import Proposals
from la_export.verify.tolerance import tolerance_of
from la_runtime.backends.ort_cache import GrowingScatterCache
from la_runtime.contract import CacheForm, Contract, Dtype
from la_runtime.generation import Engine
from la_runtime.stopping import FinishReason
from tests.tiny_models import build_tiny_bundle

ROOT = Path(__file__).parents[3]
OWN = Way(k=2, proposals=Proposals.OWN)
CONTRACT = Contract(
    num_layers=1, num_kv_heads=1, head_dim=1, hidden_size=1, vocab_size=8, k_max=2, top_c=8
)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> dict[CacheForm, Path]:
    """A tiny bundle in each cache form."""
    return {
        form: build_tiny_bundle(
            tmp_path_factory.mktemp(form), cache_form=form, max_position_embeddings=300
        )
        for form in CacheForm
    }


def make_runs(
    tokens: dict[Way, Sequence[Sequence[int]]],
    *,
    form: CacheForm,
    precision: Dtype = Dtype.FLOAT32,
    margins: Sequence[float] = (1.0, 1.0, 1.0),
    epsilon: float = 1e-5,
) -> FormRuns:
    """Runs of the prompts; in the second pass of a decoding come all tokens but the first."""
    return FormRuns(
        precision=precision,
        cache_form=form,
        tolerance=tolerance_of("fp32"),
        measured_epsilon=epsilon,
        runs={
            way: [
                Decoded(
                    token_ids=list(one),
                    margins=list(margins),
                    block_lengths=[1, len(one) - 1],
                    finish_reason=FinishReason.LENGTH,
                )
                for one in runs
            ]
            for way, runs in tokens.items()
        },
    )


def test_texts_of_one_token_have_no_tokens_per_pass():
    """The first token comes with the prompt's own pass."""
    runs = make_runs({PLAINLY: [(1,)], OWN: [(1,)]}, form=CacheForm.CONCAT)
    decoded = {way: [replace(found[0], block_lengths=[1])] for way, found in runs.runs.items()}

    (row,), _ = compare_forms([replace(runs, runs=decoded)], ["a"])

    assert row["tokens_per_pass"] is None


def test_float32_is_compared_across_forms_and_coarser_arithmetic_with_itself():
    concat = make_runs({PLAINLY: [(1, 2, 3)], OWN: [(1, 2, 3)]}, form=CacheForm.CONCAT)
    scatter = make_runs({PLAINLY: [(1, 2, 3)], OWN: [(1, 2, 4)]}, form=CacheForm.SCATTER)
    half = make_runs(
        {PLAINLY: [(5, 6, 7)], OWN: [(5, 6, 7)]},
        form=CacheForm.SCATTER,
        precision=Dtype.FLOAT16,
    )

    rows, problems = compare_forms([concat, scatter, half], ["a"])

    assert [
        (row["precision"], row["cache_form"], row["k"], row["reference"], row["equal"])
        for row in rows
    ] == [
        ("float32", "concat", 2, "float32 concat, plain", 1),
        ("float32", "scatter", 0, "float32 concat, plain", 1),
        ("float32", "scatter", 2, "float32 concat, plain", 0),
        ("float16", "scatter", 2, "float16 scatter, plain", 1),
    ]
    assert rows[2]["different"] == 1
    assert rows[0]["tokens_per_pass"] == 2.0
    assert problems == [
        "prompt a, float32 scatter, k=2 with own proposals: new token 2 is 4, expected 3 (margin "
        "1, epsilon 1e-05)"
    ]


def test_a_near_tie_is_excused_by_the_larger_of_both_forms_epsilons():
    margins = (1.0, 5e-5, 1.0)
    concat = make_runs({PLAINLY: [(1, 2, 3)]}, form=CacheForm.CONCAT, margins=margins)
    scatter = {PLAINLY: [(1, 5, 3)]}

    for epsilon, excused in ((1e-4, 1), (1e-6, 0)):
        runs = make_runs(scatter, form=CacheForm.SCATTER, epsilon=epsilon)
        rows, problems = compare_forms([concat, runs], ["a"])

        assert (rows[0]["excused"], rows[0]["different"]) == (excused, 1 - excused)
        assert len(problems) == 1 - excused


def decode_both(
    bundles: dict[CacheForm, Path], *, before_scatter: Callable[[], None] = lambda: None
) -> tuple[list[dict[str, object]], list[str]]:
    forms = []
    for form, path in bundles.items():
        if form is CacheForm.SCATTER:
            before_scatter()
        with Engine.open(path, threads=1) as engine:
            prompts = [
                EncodedPrompt(name=text, token_ids=engine.encode(text, chat=True))
                for text in ("The cat", "One, two")
            ]
            forms.append(
                decode_form(engine, prompts, make_ways((2, 4)), new_tokens=12, epsilon_positions=30)
            )
    return compare_forms(forms, [prompt.name for prompt in prompts])


def test_both_forms_of_a_tiny_bundle_give_the_same_tokens(bundles):
    rows, problems = decode_both(bundles)

    assert problems == []
    assert len(rows) == 4 + 5
    assert all(row["equal"] == 2 for row in rows)
    given = [row for row in rows if row["proposals"] == "given"]
    assert all(row["tokens_per_pass"] > 1.5 for row in given), "drafts were accepted and committed"


def test_a_cache_that_is_written_in_the_wrong_place_is_noticed(bundles, monkeypatch):
    bind = GrowingScatterCache.bind

    def bind_one_place_early(self, *arguments):
        lengths = self.lengths
        self.lengths = np.maximum(lengths - 1, 0)
        bind(self, *arguments)
        self.lengths = lengths

    def spoil() -> None:
        monkeypatch.setattr(GrowingScatterCache, "bind", bind_one_place_early)

    _, problems = decode_both(bundles, before_scatter=spoil)

    assert any("float32 scatter" in line for line in problems)
    assert not any("float32 concat, k" in line for line in problems)


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/cache_forms.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_script_publishes_a_row_per_bundle_and_way(bundles, tmp_path):
    out = tmp_path / "cache_forms.json"

    done = run_script(
        *(*map(str, bundles.values()), "--k", "4", "--prompts", "2", "--longest", "150"),
        *("--new-tokens", "6", "--epsilon-positions", "30", "--out", str(out)),
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [(row["cache_form"], row["k"], row["proposals"]) for row in result["rows"]] == [
        ("concat", 4, "own"),
        ("concat", 4, "given"),
        ("scatter", 0, "none"),
        ("scatter", 4, "own"),
        ("scatter", 4, "given"),
    ]
    assert all(row["equal"] == row["prompts"] == 2 for row in result["rows"])
    assert result["facts"]["not_excused"] == []
    assert "--cache-form scatter" in result["facts"]["bundles"][str(bundles[CacheForm.SCATTER])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--longest", "299", "--new-tokens", "2"], r"299 + 2 tokens do not fit into the context"),
        (["--longest", "10", "--new-tokens", "2"], "20 prompts are wanted, 0 have at most 10"),
    ],
)
def test_the_script_refuses_prompts_that_are_too_long_or_too_few(bundles, arguments, message):
    refused = run_script(str(bundles[CacheForm.CONCAT]), *arguments)

    assert refused.returncode == 1
    assert message in refused.stderr


@pytest.mark.slow
def test_smollm2_gives_the_same_tokens_in_both_forms(tmp_path):
    """20 prompts with k of 2, 4 and 8, in fp32 and fp16."""
    forms = []
    for precision, cache_form in product((Precision.FP32, Precision.FP16), CacheForm):
        options = BuildOptions(
            model="smollm2-135m",
            lookahead_lengths=(2, 4, 8),
            precision=precision,
            cache_form=cache_form,
            context=512,
            out=tmp_path / f"{precision}-{cache_form}",
        )
        with Engine.open(build(options).bundle, threads=1) as engine:
            prompts = encode_prompts(engine, load_prompts(), longest=400)[:20]
            forms.append(
                decode_form(
                    engine,
                    prompts,
                    make_ways((2, 4, 8)),
                    new_tokens=16,
                    epsilon_positions=400,
                )
            )

    rows, problems = compare_forms(forms, [prompt.name for prompt in prompts])

    assert problems == []
    assert len(rows) == 6 + 7 + 6 + 6
