from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from la_export.bench.peers import __main__ as command
from la_export.bench.peers import task
from la_export.bench.peers.entries import Field
from la_export.bench.results import read_result
from la_export.bench.speed.questions import Question
from la_runtime.errors import UsageError
from la_runtime.generation import Engine
from tests.la_export.bench.peers.stands import fake_contestant

QUESTIONS = (
    Question(name="1", category="qa", text="What is red?"),
    Question(name="2", category="math", text="What is two and two?"),
)


@pytest.fixture(autouse=True)
def _short_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions that fit into the context of a tiny model."""
    monkeypatch.setattr(task, "load_questions", lambda *_, **__: QUESTIONS)


class _Source:
    """The checkpoint of a bundle, as far as the command looks at it."""

    def __init__(self, bundle: Path) -> None:
        with Engine.open(bundle, threads=1) as engine:
            self._digest = engine.bundle.manifest.model.source_digest

    def digest(self) -> str:
        return self._digest


def run(bundle: Path, *options: str) -> Result:
    return CliRunner().invoke(
        command.main,
        ["--bundle", str(bundle), "--threads", "1", "--new-tokens", "2", *options],
        catch_exceptions=False,
    )


def test_a_race_of_a_bundle_and_a_peer_ends_in_a_result_file(
    documented_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, gone = fake_contestant("peer"), fake_contestant("gone")
    monkeypatch.setattr(command, "find_model", lambda *_, **__: _Source(documented_bundle))
    monkeypatch.setattr(
        command,
        "make_field",
        lambda *_, **__: Field(
            entries=(peer.entry, gone.entry),
            contestants=(peer,),
            absent={gone.name: "it has no wheel"},
        ),
    )
    out = tmp_path / "peers.json"

    shown = run(
        documented_bundle,
        *("--perplexity-tokens", "0", "--environments", str(tmp_path), "--out", str(out)),
        "--json",
    )

    result = read_result(out)
    assert json.loads(shown.stdout) == json.loads(out.read_text())
    assert [row["absent"] for row in result.rows] == [None, None, None, "it has no wheel"]
    assert result.rows[0]["ours_over_this"] == 1.0
    assert result.facts["prompts"] == len(QUESTIONS)
    assert len(result.facts["answers"]) == 3 * len(QUESTIONS)


def test_a_bundle_of_another_model_is_refused(
    documented_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _Source(documented_bundle)
    source._digest = "0" * 64
    monkeypatch.setattr(command, "find_model", lambda *_, **__: source)

    with pytest.raises(UsageError, match="was not built from that; name its source with --model"):
        run(documented_bundle, "--model", "that", "--perplexity-tokens", "0")


def test_an_unknown_peer_is_refused_before_anything_is_done(documented_bundle: Path) -> None:
    with pytest.raises(UsageError, match="there is no peer 'nobody'; expected one of onnx"):
        run(documented_bundle, "--peers", "nobody")
