"""Random requests over the toy backend: whatever is asked for, speculation changes nothing.

The default run checks 2,000 cases, `-m slow` 10,000. The message of a failure holds the case, and
`make_case` makes it again from its index. Planted faults show that each kind of failure is seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

import la_runtime.selection
from la_runtime.backends.fake import FakeBackend
from la_runtime.choosing import Chooser
from la_runtime.selection import ChosenRowScores
from la_runtime.stopping import Ending, FinishReason
from la_runtime.text import GeneratedText
from la_runtime.tokenizer import Tokenizer
from tests.la_runtime.cases import Coverage, SlowDecoder, check_case, make_case
from tests.tiny_models import make_tiny_tokenizer

NUM_CASES = 2_000
NUM_SLOW_CASES = 10_000
# A planted fault that this many cases do not notice would not be noticed.
CASES_FOR_A_FAULT = 150


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> SlowDecoder:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return SlowDecoder(Tokenizer.load(folder))


def check(slow: SlowDecoder, indices: Iterable[int]) -> Coverage:
    coverage = Coverage()
    for index in indices:
        case, truths = make_case(index, slow)
        check_case(case, truths, slow.tokenizer, coverage)
    return coverage


@pytest.mark.parametrize(
    "num_cases",
    [
        pytest.param(NUM_CASES, id="some"),
        pytest.param(NUM_SLOW_CASES, id="many", marks=pytest.mark.slow),
    ],
)
def test_any_request_gives_what_plain_decoding_gives(slow, num_cases):
    """Tokens, text, finish reason, log-probabilities, margins; and the cases are no easy ones."""
    counts = check(slow, range(num_cases)).counts

    assert counts["passes with accepted drafts"] > counts["passes behind the first"] / 5
    assert (
        counts["passes with two accepted drafts or more"] > counts["passes behind the first"] / 10
    )
    for what, share in {
        "finish length": 0.3,
        "finish stop": 0.2,
        "finish eos": 0.05,
        "finish context": 0.05,
        "stop on an accepted draft": 0.05,
        "eos on an accepted draft": 0.02,
        "stopped by a string": 0.1,
        "stopped by a string on an accepted draft": 0.03,
        "text with characters of several bytes": 0.1,
        "sampled": 0.5,
        "processed": 0.5,
        "log-probabilities": 0.4,
        "choices made again": 0.2,
    }.items():
        assert counts[what] > share * counts["requests"], what
    assert counts["ragged batches"] > num_cases / 3


def test_a_token_s_bytes_are_those_that_the_tokenizer_decodes(slow):
    """The truth joins bytes itself; on whole texts that must be what the library does."""
    for text in ("né — 日本 🙂 ok.", "The cat sat\non the mat.", "ɐ ߿ ࠀ  𐀀 􏿿"):
        token_ids = slow.tokenizer.encode(text, add_special_tokens=False)
        assert slow.spell([0, *token_ids, 2]) == slow.tokenizer.decode(token_ids) == text
    assert slow.spell(slow.tokenizer.encode("ab🙂", add_special_tokens=False)[:-1]) == "ab"


def noise_depends_on_the_place_in_the_batch(monkeypatch):
    original = Chooser.__init__

    def planted(self, params, **rest):
        original(self, replace(params, seed=params.seed + rest["request"]), **rest)

    monkeypatch.setattr(Chooser, "__init__", planted)


def history_lacks_the_drafts(monkeypatch):
    original = ChosenRowScores.choose
    monkeypatch.setattr(
        ChosenRowScores, "choose", lambda self, row, after: original(self, row, after[:-1])
    )


def logprobs_come_from_another_row(monkeypatch):
    original = ChosenRowScores.choose

    def planted(self, row, after):
        choice = original(self, row, after)
        other = original(self, self._first_row, after)
        return replace(choice, logprob=other.logprob, top_logprobs=other.top_logprobs)

    monkeypatch.setattr(ChosenRowScores, "choose", planted)


def _plant_ending(monkeypatch, plant):
    """Replace what an ending says of each token by `plant(ending, what it said)`."""
    original = Ending.hear
    monkeypatch.setattr(Ending, "hear", lambda self, token: plant(self, original(self, token)))


def an_end_is_noticed_one_token_late(monkeypatch):
    noticed = {}

    def planted(ending, reason):
        if ending in noticed or ending.room == 0:
            return noticed.get(ending, reason)
        if reason is not None:
            noticed[ending] = reason
        return None

    _plant_ending(monkeypatch, planted)


def an_end_token_is_overlooked(monkeypatch):
    def planted(ending, reason):
        return None if reason is FinishReason.EOS and ending.room else reason

    _plant_ending(monkeypatch, planted)


def one_token_too_many_is_emitted(monkeypatch):
    original = Ending.__init__

    def planted(self, *, max_new_tokens, **rest):
        original(self, max_new_tokens=max_new_tokens + 1, **rest)

    monkeypatch.setattr(Ending, "__init__", planted)


def the_context_ends_as_if_it_were_the_limit(monkeypatch):
    def planted(ending, reason):
        return FinishReason.LENGTH if reason is FinishReason.CONTEXT else reason

    _plant_ending(monkeypatch, planted)


def the_first_draft_is_always_accepted(monkeypatch):
    original = la_runtime.selection.accept_exact

    def planted(drafts, choose):
        def choose_leniently(node):
            token_id = choose(node)
            is_first = node == 0 and token_id is not None and drafts.token_ids
            return drafts.token_ids[0] if is_first else token_id

        return original(drafts, choose_leniently)

    monkeypatch.setattr(la_runtime.selection, "accept_exact", planted)


def a_rejected_row_is_cached(monkeypatch):
    """Of several accepted rows, the one behind the last is cached in its place."""
    original = FakeBackend.commit

    def planted(self, state, rows):
        block_len = state.block.shape[2]
        shifted = [
            (*accepted[:-1], min(accepted[-1] + 1, block_len - 1))
            if len(accepted) > 1
            else accepted
            for accepted in rows
        ]
        original(self, state, shifted)

    monkeypatch.setattr(FakeBackend, "commit", planted)


def stop_strings_across_pieces_are_missed(monkeypatch):
    monkeypatch.setattr(GeneratedText, "_num_held_back", lambda self: 0)


def the_beginning_of_a_stop_string_is_shown(monkeypatch):
    """It is found where it is complete, but only what follows its first letter is held back."""
    original = GeneratedText._append

    def planted(self, text):
        original(self, text)
        if self._is_stopped and self._certain:
            self._certain.append(self._stop[0][0])

    monkeypatch.setattr(GeneratedText, "_append", planted)


def the_last_stop_string_counts(monkeypatch):
    original = GeneratedText._append

    def planted(self, text):
        self._stop = self._stop[-1:]
        original(self, text)

    monkeypatch.setattr(GeneratedText, "_append", planted)


@pytest.mark.parametrize(
    ("plant", "noticed"),
    [
        (noise_depends_on_the_place_in_the_batch, "token_ids of request"),
        (history_lacks_the_drafts, "(token_ids|margins) of request"),
        (logprobs_come_from_another_row, "logprobs of request"),
        (an_end_is_noticed_one_token_late, "token_ids of request"),
        (an_end_token_is_overlooked, "token_ids of request"),
        (one_token_too_many_is_emitted, "token_ids of request"),
        (the_context_ends_as_if_it_were_the_limit, "finish_reason of request"),
        (the_first_draft_is_always_accepted, "token_ids of request"),
        (a_rejected_row_is_cached, "token_ids of request"),
        (stop_strings_across_pieces_are_missed, "token_ids of request"),
        (the_beginning_of_a_stop_string_is_shown, "text of request"),
        (the_last_stop_string_counts, "(token_ids|text) of request"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_planted_fault_is_noticed(slow, monkeypatch, plant, noticed):
    plant(monkeypatch)

    with pytest.raises(AssertionError, match=noticed):
        check(slow, range(CASES_FOR_A_FAULT))
