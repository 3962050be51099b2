"""Text as tokens come, cut at stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from la_runtime.text import GeneratedText
from la_runtime.tokenizer import Tokenizer
from tests.tiny_models import make_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return Tokenizer.load(folder)


def read(tokenizer, token_ids, stop):
    """Text pieces taken after each token, and how many tokens were read."""
    text = GeneratedText(tokenizer, stop)
    pieces: list[str] = []
    is_stopped = False
    for token_id in token_ids:
        is_stopped = text.push(token_id)
        pieces.append(text.take())
        if is_stopped:
            break
    text.finish()
    return [*pieces, text.take()], len(pieces), is_stopped


TEXTS = st.text(alphabet="abc ×好🙂", min_size=1, max_size=30)
STOPS = st.lists(st.text(alphabet="abc ×好🙂", min_size=1, max_size=4), max_size=3).map(tuple)


def known_after(tokenizer, token_ids):
    """The text that is certain after some tokens when nothing is held back for stop strings."""
    text = GeneratedText(tokenizer)
    for token_id in token_ids:
        text.push(token_id)
    return text.take()


@given(text=TEXTS, stop=STOPS)
def test_text_ends_before_the_first_stop_string_and_at_its_token(tokenizer, text, stop):
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    known = [known_after(tokenizer, token_ids[:n]) for n in range(1, len(token_ids) + 1)]
    first = next((n for n, so_far in enumerate(known, 1) if any(s in so_far for s in stop)), None)

    pieces, count, is_stopped = read(tokenizer, token_ids, stop)

    assert is_stopped == (first is not None)
    if first is None:
        assert (count, "".join(pieces)) == (len(token_ids), tokenizer.decode(token_ids))
    else:
        starts = [known[first - 1].find(s) for s in stop if s in known[first - 1]]
        assert (count, "".join(pieces)) == (first, known[first - 1][: min(starts)])


@given(text=TEXTS, stop=STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(tokenizer, text, stop):
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, count, is_stopped = read(tokenizer, token_ids, stop)
    for n in range(1, count if is_stopped else count + 1):
        given_out = "".join(pieces[:n])
        known = known_after(tokenizer, token_ids[:n])
        assert known.startswith(given_out)
        held = known[len(given_out) :]
        assert not held or any(s.startswith(held) for s in stop)
