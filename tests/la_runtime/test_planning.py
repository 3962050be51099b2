"""Planned requests of an engine: who is planned, by which times, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from la_runtime import Engine, SamplingParams
from la_runtime.backends import read_processor
from la_runtime.bundle import Bundle, open_bundle
from la_runtime.errors import UsageError
from la_runtime.generation import _find_costs
from la_runtime.source_names import SourceName
from la_runtime.step_costs import ASSUMED_COSTS, StepCosts
from la_runtime.step_times import StepTime, StepTimes
from tests.la_runtime.toy_engine import open_toy_engine

PROMPT = "the cat sat on the mat and the cat sat on"
NUM_TOKENS = 40
# Rows for nothing: every draft and every slot pays.
FREE_ROWS = StepCosts([(1, 1.0), (32, 1.0001)])


@pytest.fixture(scope="module")
def planning(tiny_bundle):
    """An engine that was opened without k."""
    with Engine.open(tiny_bundle, threads=1) as engine:
        engine._decoder.costs = FREE_ROWS
        yield engine


def names(result):
    return {source.source for source in result.stats.sources}


def test_a_request_without_k_has_drafts_of_every_source(planning):
    plain = planning.generate(PROMPT, k=0, max_new_tokens=NUM_TOKENS)

    planned = planning.generate(PROMPT, max_new_tokens=NUM_TOKENS)

    assert planned.token_ids == plain.token_ids
    assert names(planned) == set(SourceName)
    assert planned.stats.rows > plain.stats.rows


@pytest.mark.parametrize(
    "options", [{"k": 2}, {"layout": "full"}, {"k": 0}, {"select": "threshold", "tau": 0.5, "k": 2}]
)
def test_a_request_that_says_how_is_not_planned(planning, options):
    result = planning.generate(PROMPT, max_new_tokens=NUM_TOKENS, **options)

    assert names(result) <= {SourceName.LOOKAHEAD}
    k = result.stats.k
    most = {"threshold": 2 * k + 1}.get(options.get("select"), (1 + k) ** 2)
    assert result.stats.rows - result.stats.prefill_rows <= most * result.stats.passes


def test_an_engine_opened_with_k_plans_for_those_alone_who_ask(tiny_bundle):
    with Engine.open(tiny_bundle, threads=1, k=2) as engine:
        usual = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS)
        asked = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, sources=["suffix"], drafts=3)

    assert names(usual) == {SourceName.LOOKAHEAD}
    assert names(asked) <= {SourceName.SUFFIX}
    assert asked.token_ids == usual.token_ids


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sources_change_no_token_alone_or_in_batches(planning, batch, temperature):
    """On the lean graph a row has the same bits in any pass, so nothing is excused."""
    prompts = [PROMPT, "One.", "二 🙂 def f(x): return x"][:batch]
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=NUM_TOKENS, k=0)
    plain = planning.generate(prompts, params)

    for sources in [["suffix"], ["recycled"], ["lookahead"], list(SourceName)]:
        for drafts in (None, 1, 9):
            wish = replace(params, k=4, sources=sources, drafts=drafts)
            found = planning.generate(prompts, wish)
            assert [f.token_ids for f in found] == [p.token_ids for p in plain], (sources, drafts)


def test_a_fixed_width_bounds_the_rows_of_a_plan(tiny_bundle):
    with Engine.open(tiny_bundle, threads=1, fixed_width=9) as engine:
        engine._decoder.costs = FREE_ROWS
        result = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS)

    decode_passes = result.stats.passes - result.stats.prefill_passes
    assert 0 < result.stats.rows - result.stats.prefill_rows <= 9 * decode_passes


def test_calibrating_measures_passes_and_changes_no_token(tiny_bundle):
    with Engine.open(tiny_bundle, threads=1) as engine:
        before = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS)
        engine.calibrate()
        costs = engine._decoder.costs
        after = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS)

    assert costs is not ASSUMED_COSTS
    assert 0 < costs(1) <= costs(2) <= costs(32)
    assert after.token_ids == before.token_ids


def test_given_costs_shape_passes_and_change_no_token(tiny_bundle):
    rows, texts = [], []
    for dearest in (1.01, 100.0):
        with Engine.open(tiny_bundle, threads=1) as engine:
            engine.use_costs(StepCosts([(1, 1.0), (32, dearest)]))
            result = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS)
        rows.append(result.stats.rows)
        texts.append(result.token_ids)

    assert rows[0] > rows[1]
    assert texts[0] == texts[1]


def test_a_busy_engine_is_not_calibrated(tiny_bundle):
    with open_toy_engine(tiny_bundle) as engine:
        engine.backend.close_gate()
        with engine.stream(PROMPT, max_new_tokens=2):
            with pytest.raises(UsageError, match="calibrate measures passes alone, and 1 requests"):
                engine.calibrate()
            engine.backend.gate.set()


def times(ms, *, processor, threads):
    return StepTimes(
        utc="2026-01-01T00:00:00Z",
        backend="ort-cpu",
        backend_version="1",
        processor=processor,
        threads=threads,
        past=256,
        times=tuple(
            StepTime(rows=rows, median_ms=ms * rows, low_ms=1, high_ms=1, samples=3)
            for rows in (1, 2)
        ),
    )


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ([], None),
        ([("other", 1, 5.0)], 5.0),
        ([("other", 2, 5.0), ("this", 8, 7.0)], 7.0),
        ([("this", 8, 7.0), ("this", 3, 9.0)], 9.0),
        ([("this", 3, 9.0), ("this", 2, 4.0), ("other", 2, 5.0)], 4.0),
    ],
)
def test_plans_follow_the_times_of_the_nearest_place(tiny_bundle, recorded, expected):
    """This processor before others, then the number of threads nearest to 2."""
    processor = read_processor("ort-cpu")
    bundle = open_bundle(tiny_bundle)
    entries = tuple(
        times(ms, processor=processor if who == "this" else who, threads=threads)
        for who, threads, ms in recorded
    )
    manifest = bundle.manifest.model_copy(update={"step_times": entries})

    costs = _find_costs(Bundle(bundle.root, manifest), "ort-cpu", 2, ())

    assert costs(1) == (ASSUMED_COSTS(1) if expected is None else expected)


def test_slots_cost_what_was_measured_and_rows_of_tokens_do_not(tiny_bundle):
    bundle = open_bundle(tiny_bundle)
    measured = times(5.0, processor="any", threads=2)
    points = (*measured.times, measured.times[0].model_copy(update={"rows": 3, "median_ms": 17.0}))
    measured = measured.model_copy(update={"times": points, "slots_ms": 2.0})
    manifest = bundle.manifest.model_copy(update={"step_times": (measured,)})

    costs = _find_costs(Bundle(bundle.root, manifest), "ort-cpu", 2, ())

    assert costs(3) - costs(2) == pytest.approx(15.0 - 10.0)
    assert costs(3, has_slots=True) - costs(3) == pytest.approx(2.0)


def last_cache(engine, prompt, **options):
    """What the cache holds before the last pass."""
    with engine.prefill(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True, **options) as state:
        found = None
        while state.finish_reason is None:
            found = state._decoding.cache.read(0)
            state.step()
    return found


def test_the_cache_is_that_of_plain_decoding_bit_for_bit(planning):
    """Accepted rows of trees are moved into their places, and hold what a plain pass writes."""
    prompt = planning.encode(PROMPT)

    plain = last_cache(planning, prompt, k=0)
    planned = last_cache(planning, prompt, k=4, sources=list(SourceName), drafts=12)

    length = planned.shape[2]
    assert len(prompt) < length <= plain.shape[2]
    np.testing.assert_array_equal(planned, plain[:, :, :length])
