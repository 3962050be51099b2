from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from la_export.bench.peers import entries
from la_export.bench.peers.contest import Settings, Standing, hold_contest
from la_export.bench.peers.entries import (
    Field,
    Need,
    check_k,
    check_names,
    make_bundle_contestants,
    make_field,
)
from la_export.bench.peers.environments import Environment
from la_export.bench.peers.programs import PeerWeights, Program, Way
from la_export.bench.peers.race import Contestant, Texts
from la_export.bench.peers.task import Task
from la_export.bench.speed.record import PeerMode
from la_export.perplexity import Window
from la_runtime.errors import HostError, NotRunError, UsageError
from tests.la_export.bench.peers.stands import fake_contestant, prompt

NEED = Need(threads=2, context=64, eos_token_ids=(2,))


def program(name: str) -> Program:
    return Program(
        name=name,
        environment=Environment(name=name, requirements=(f"{name}==1",)),
        driver="fake_driver.py",
        weights=(PeerWeights(precision="int8"), PeerWeights(precision="int4")),
        ways=(
            Way(mode=PeerMode.PLAIN, name="plain"),
            Way(mode=PeerMode.BEST, name="copying", options={"size": 2}),
        ),
    )


def test_every_precision_and_way_of_a_peer_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "ensure_environment", lambda *_: None)

    field = make_field(
        [program("one")],
        cache=tmp_path,
        need=NEED,
        make_weights=lambda one, weights: Path(weights.precision),
        report=lambda _: None,
    )

    found = [(c.entry.precision, c.entry.mode_name, str(c.job.model)) for c in field.contestants]
    assert found == [
        ("int8", "plain", "int8"),
        ("int8", "copying", "int8"),
        ("int4", "plain", "int4"),
        ("int4", "copying", "int4"),
    ]
    assert field.contestants[1].job.options == {"size": 2}
    assert field.contestants[0].job.python == tmp_path / "one" / "bin" / "python"
    assert not field.absent


def test_a_peer_that_cannot_be_installed_is_absent_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(environment: Environment, cache: Path) -> None:
        if environment.name == "bad":
            raise HostError("pip failed: no wheel")

    monkeypatch.setattr(entries, "ensure_environment", install)
    lines: list[str] = []

    field = make_field(
        [program("bad"), program("good")],
        cache=tmp_path,
        need=NEED,
        make_weights=lambda *_: tmp_path,
        report=lines.append,
    )

    assert {entry.peer for entry in field.entries} == {"bad", "good"}
    assert {contestant.entry.peer for contestant in field.contestants} == {"good"}
    assert field.absent["bad, int8, plain"] == "pip failed: no wheel"
    assert len(field.absent) == 4
    assert "bad int8 is absent: pip failed: no wheel" in lines


def test_weights_that_cannot_be_made_leave_the_other_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "ensure_environment", lambda *_: None)

    def convert(one: Program, weights: PeerWeights) -> Path:
        if weights.precision == "int4":
            raise NotRunError("it wants a GGUF file")
        return tmp_path

    field = make_field(
        [program("one")], cache=tmp_path, need=NEED, make_weights=convert, report=lambda _: None
    )

    assert [c.entry.precision for c in field.contestants] == ["int8", "int8"]
    assert set(field.absent) == {"one, int4, plain", "one, int4, copying"}


def test_a_bundle_takes_part_plain_and_planned() -> None:
    manifest: Any = SimpleNamespace(precision="int8", lookahead_lengths=(2, 4))

    _, best = make_bundle_contestants("small", Path("engines"), manifest, k=None, need=NEED)

    assert (best.entry.mode, best.entry.mode_name) == (PeerMode.BEST, "planned")
    assert best.job.options == {}


def test_a_bundle_takes_part_plain_and_with_lookaheads() -> None:
    manifest: Any = SimpleNamespace(precision="int8", lookahead_lengths=(2, 4))

    plain, best = make_bundle_contestants("small", Path("engines"), manifest, k=4, need=NEED)

    assert (plain.entry.mode, plain.job.options) == (PeerMode.PLAIN, {"k": 0})
    assert (best.entry.mode, best.job.options) == (PeerMode.BEST, {"k": 4})
    assert plain.name == "Lookahead Attention (small), int8, plain"


def test_a_k_that_was_not_built_is_refused() -> None:
    manifest: Any = SimpleNamespace(lookahead_lengths=(2, 4))

    check_k(Path("small"), manifest, 2)
    with pytest.raises(UsageError, match="small was not built for k = 3; choose --k of 2, 4"):
        check_k(Path("small"), manifest, 3)


def test_only_the_peers_that_were_named_take_part() -> None:
    one, two = program("one"), program("two")

    assert check_names([], [one, two]) == (one, two)
    assert check_names(["two", "two"], [one, two]) == (two,)
    with pytest.raises(UsageError, match="there is no peer 'three'; expected one of one, two"):
        check_names(["three"], [one, two])


def hold(contestants: list[Contestant], tmp_path: Path) -> Standing:
    asked = prompt(1)
    task = Task(
        bundles=(),
        prompts=(asked,),
        prompts_sha256="",
        texts=Texts(own=(Window(token_ids=(1, 2), scored_from=1),), pages=()),
        need=NEED,
    )
    field = Field(
        entries=tuple(one.entry for one in contestants),
        contestants=tuple(contestants),
        absent={},
    )
    settings = Settings(rounds=1, new_tokens=3, minutes=None, logs=tmp_path)
    return hold_contest(field, task, settings, lambda _: None)


def test_both_modes_have_the_perplexity_of_their_weights(tmp_path: Path) -> None:
    plain, best = fake_contestant("one"), fake_contestant("one", PeerMode.BEST)

    standing = hold([plain, best], tmp_path)

    assert standing.alone[best.name].perplexity_own == pytest.approx(2.0, rel=1e-6)
    assert len(standing.laps[best.name]) == 1


def test_who_fails_alone_is_absent_from_the_race(tmp_path: Path) -> None:
    good, bad = fake_contestant("good"), fake_contestant("bad", refuses=True)

    standing = hold([bad, good], tmp_path)

    assert "will be loaded" in standing.absent[bad.name]
    assert standing.laps[bad.name] == ()
    assert len(standing.laps[good.name]) == 1


def test_a_contest_of_nobody_is_refused_with_the_reasons(tmp_path: Path) -> None:
    bad = fake_contestant("bad", refuses=True)

    with pytest.raises(NotRunError, match="no program could take part: fake_driver failed: will"):
        hold([bad], tmp_path)
