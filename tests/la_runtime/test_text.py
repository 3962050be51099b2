"""Text as tokens come, cut at stop strings."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

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
    """The text after some tokens when nothing is held back for stop strings."""
    text = GeneratedText(tokenizer)
    for token_id in token_ids:
        text.push(token_id)
    text.finish()
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


def test_a_stop_string_of_byte_tokens_stops_with_its_last_byte(tmp_path):
    """Their text is certain only behind the run, but it would be there if the text ended."""
    path = make_byte_fallback_tokenizer()
    path.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer.load(tmp_path)
    newline = tokenizer.token_id("<0x0A>")
    letter = tokenizer.token_id("a")
    smile = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]

    pieces, count, is_stopped = read(tokenizer, [letter, newline, newline, letter], ("\n",))
    assert (count, is_stopped, "".join(pieces)) == (2, True, "a")
    pieces, count, is_stopped = read(tokenizer, [letter, *smile, letter], ("🙂",))
    assert (count, is_stopped, "".join(pieces)) == (5, True, "a")
    pieces, count, is_stopped = read(tokenizer, [letter, *smile[:3], letter], ("🙂", "\ufffd"))
    assert (count, is_stopped) == (5, True), "broken bytes are shown once they cannot be completed"


def make_byte_fallback_tokenizer():
    """Words, and a token for every byte, as the tokenizers of Llama 2 have them."""
    vocabulary = {"<unk>": 0, "a": 1, "b": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer
