"""Our own driver over a tiny bundle, in a process as in a race."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from la_export.bench.peers.entries import Need, make_bundle_contestants
from la_export.bench.peers.process import PeerProcess
from la_export.bench.peers.task import encode_questions
from la_export.bench.speed.questions import Question
from la_export.perplexity import BackendScorer, Window, perplexity_of
from la_runtime.generation import Engine

NEW_TOKENS = 12
# Both sum up the same numbers, in passes of other widths.
SCORE_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def engine(documented_bundle: Path) -> Iterator[Engine]:
    with Engine.open(documented_bundle, threads=1) as engine:
        yield engine


def test_plain_and_lookahead_processes_answer_as_the_engine_does(
    documented_bundle: Path, engine: Engine, tmp_path: Path
) -> None:
    manifest = engine.bundle.manifest
    (asked,) = encode_questions(engine, [Question(name="1", category="qa", text="What is red?")])
    need = Need(threads=1, context=64, eos_token_ids=manifest.model.eos_token_ids)
    expected = engine.generate("What is red?", chat=True, k=0, max_new_tokens=NEW_TOKENS)

    for contestant in make_bundle_contestants("tiny", documented_bundle, manifest, k=2, need=need):
        with PeerProcess(contestant.job, log=tmp_path / "log") as process:
            answer = process.generate(asked.token_ids, NEW_TOKENS)

        assert answer.token_ids == expected.token_ids, contestant.name


def test_a_process_scores_as_the_bundle_does(
    documented_bundle: Path, engine: Engine, tmp_path: Path
) -> None:
    manifest = engine.bundle.manifest
    need = Need(threads=1, context=64, eos_token_ids=manifest.model.eos_token_ids)
    plain, _ = make_bundle_contestants("tiny", documented_bundle, manifest, k=2, need=need)
    text = engine.encode("One token after the other, each as likely as it is.")
    windows = [Window(token_ids=text, scored_from=1), Window(token_ids=text[:6], scored_from=4)]

    with PeerProcess(plain.job, log=tmp_path / "log") as process:
        found = perplexity_of(process.score, windows)

    scorer = BackendScorer(engine.backend, context=manifest.model.context)
    expected = perplexity_of(scorer, windows)
    assert found.num_tokens == expected.num_tokens
    assert found.mean_nll == pytest.approx(expected.mean_nll, rel=SCORE_TOLERANCE)
