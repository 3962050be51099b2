from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from la_export.bench.peers.process import PeerProcess
from la_export.perplexity import Window, perplexity_of
from la_runtime.errors import NotRunError
from tests.la_export.bench.peers.stands import EOS, fake_job


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "peer.log"


def test_a_peer_says_what_it_is(log: Path) -> None:
    with PeerProcess(fake_job(), log=log) as process:
        assert (process.version, process.build) == ("1.2", "made of paper")


def test_an_answer_has_as_many_tokens_as_were_asked_for(log: Path) -> None:
    with PeerProcess(fake_job(), log=log) as process:
        answer = process.generate([3, 4], 5)

    assert answer.token_ids == (5, 6, 7, 8, 9)
    assert answer.first_tokens == 1
    assert 0 < answer.ttft_s < answer.ttft_s + answer.decode_s <= answer.total_s
    assert 0 < answer.pss_bytes <= answer.peak_rss_bytes


def test_an_answer_ends_with_its_end_token(log: Path) -> None:
    with PeerProcess(fake_job(), log=log) as process:
        assert process.generate([EOS - 3], 8).token_ids == (EOS - 2, EOS - 1, EOS)


def test_tokens_that_come_together_are_first_tokens_together(log: Path) -> None:
    with PeerProcess(fake_job(at_once=3), log=log) as process:
        assert process.generate([0], 7).first_tokens == 3


def test_what_a_peer_emits_beyond_the_limit_does_not_count(log: Path) -> None:
    with PeerProcess(fake_job(at_once=3), log=log) as process:
        assert process.generate([0], 7).token_ids == (1, 2, 3, 4, 5, 6, 7)


def test_perplexity_is_that_of_the_logits(log: Path) -> None:
    window = Window(token_ids=(1, 2, 3, 9, 10), scored_from=2)

    with PeerProcess(fake_job(), log=log) as process:
        found = perplexity_of(process.score, [window])

    # Of 62 parts the next number has 31, any other one.
    expected = (2 * math.log(2) + math.log(62)) / 3
    assert found.num_tokens == 3
    assert found.mean_nll == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refuses": True}, r"fake_driver failed: will be loaded; see logs/peer\.log"),
        ({"fails_at": 1}, r"fake_driver failed: RuntimeError: out of paper; see "),
        ({"dies": True}, "fake_driver ended: killed by SIGABRT; see "),
        ({"length": 0}, "fake_driver gave no token for a prompt; see "),
    ],
)
def test_a_peer_that_fails_says_why_in_one_line(
    log: Path, options: dict[str, Any], message: str
) -> None:
    with (
        pytest.raises(NotRunError, match=message),
        PeerProcess(fake_job(**options), log=log) as peer,
    ):
        peer.generate([0], 4)


def test_a_peer_that_does_not_answer_is_ended(log: Path) -> None:
    with PeerProcess(fake_job(hangs=True), log=log) as process:
        process._time_limit_s = 0.01
        with pytest.raises(NotRunError, match=r"fake_driver ended: no answer within 0\.01 s"):
            process.generate([0], 4)


def test_what_is_no_answer_is_refused(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PeerProcess(fake_job(), log=log) as process:
        monkeypatch.setattr("json.loads", lambda _: {"weather": "fine"})
        with pytest.raises(NotRunError, match="fake_driver said what is no answer"):
            process.generate([0], 4)


def test_what_libraries_print_is_in_the_log(log: Path) -> None:
    with PeerProcess(fake_job(), log=log) as process:
        process.generate([0], 4)

    assert "a library that writes to standard output" in log.read_text()


def test_a_closed_peer_is_gone(log: Path) -> None:
    with PeerProcess(fake_job(), log=log) as process:
        pass

    assert process._process.returncode is not None
