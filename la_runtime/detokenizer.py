"""A stream of tokens to text, piece by piece, without ever showing part of a character.

Owns how each kind of tokenizer joins its tokens, as far as it decides which text later tokens can
no longer change. It does not know where tokens come from.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Protocol

import tokenizers

from la_runtime.errors import BundleError

__all__ = ["Detokenizable", "IncrementalDecoder", "clean_up_spaces"]

_REMEMBERED_TOKENS: Final = 2**14
_FALLBACK_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Decoders that join token texts from left to right, so that all but the newest token is settled.
_LEFT_TO_RIGHT_DECODERS: Final = frozenset(
    {"BPEDecoder", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
)

# What `clean_up_spaces` replaces, in this order.
_SPACE_CLEANUPS: Final = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
_CLEANED_CHARACTERS: Final = frozenset("".join(old for old, _ in _SPACE_CLEANUPS))


def clean_up_spaces(text: str) -> str:
    """Remove the spaces before punctuation and English contractions.

    Source: huggingface/transformers, `PreTrainedTokenizerBase.clean_up_tokenization`.
    """
    for old, new in _SPACE_CLEANUPS:
        text = text.replace(old, new)
    return text


class Detokenizable(Protocol):
    """What decoding needs of a tokenizer."""

    @property
    def backend(self) -> tokenizers.Tokenizer: ...

    @property
    def cleans_up_spaces(self) -> bool:
        """Whether `clean_up_spaces` is part of decoding."""
        ...

    def spelling(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it, `None` when the id names none."""
        ...


class IncrementalDecoder:
    """Text of one stream of tokens, each piece given out once no later token can change it.

    All pieces together equal `Tokenizer.decode` of all tokens, however they were grouped; only a
    character whose last bytes never came is dropped. A piece never holds part of a character. The
    cost of a token does not grow with the number of tokens before it.

    Args:
        tokenizer: whose tokens these are; it is only read.

    Raises:
        BundleError: the tokenizer joins tokens in a way that cannot be streamed.
    """

    def __init__(self, tokenizer: Detokenizable) -> None:
        backend = tokenizer.backend
        self._spelling = tokenizer.spelling
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._joiner = _make_joiner(backend)
        self._spaces: _SpaceFilter = (
            _SpaceCleaner() if tokenizer.cleans_up_spaces else _SpaceKeeper()
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """Take tokens; returns the text that has become certain, often empty.

        Special tokens and ids that name no token are not shown.
        """
        text = ""
        for token_id in token_ids:
            if token_id not in self._special_ids:
                token = self._spelling(token_id)
                if token is not None:
                    text += self._joiner.push(token_id, token)
        return self._spaces.push(text)

    def peek(self) -> str:
        """What `flush` would give now; the stream goes on."""
        return self._spaces.peek(self._joiner.peek())

    def flush(self) -> str:
        """End the stream; returns the text that was held back."""
        return self._spaces.push(self._joiner.flush()) + self._spaces.flush()


class _Joiner(Protocol):
    """Joins tokens to text as one kind of tokenizer does."""

    def push(self, token_id: int, token: str) -> str:
        """Take a token as the vocabulary spells it; the text that no later token changes."""
        ...

    def peek(self) -> str:
        """The held back text, without an incomplete character at its end."""
        ...

    def flush(self) -> str:
        """The same, and forget it."""
        ...


def _make_joiner(backend: tokenizers.Tokenizer) -> _Joiner:
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return _ByteLevelJoiner()
    if not _is_left_to_right(steps):
        raise BundleError(
            f"the tokenizer decodes with {', '.join(kinds)}, which cannot be streamed; expected "
            f"ByteLevel, or steps among {', '.join(sorted(_LEFT_TO_RIGHT_DECODERS))}"
        )
    return _WindowJoiner(backend, has_byte_tokens="ByteFallback" in kinds)


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The tokenizer's decoder as JSON objects, a sequence laid flat; empty when it has none."""
    if backend.decoder is None:
        return []
    pending: list[dict[str, Any]] = [json.loads(backend.decoder.__getstate__())]
    steps: list[dict[str, Any]] = []
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = [*step["decoders"], *pending]
        else:
            steps.append(step)
    return steps


def _is_left_to_right(steps: Sequence[dict[str, Any]]) -> bool:
    kinds = [step["type"] for step in steps]
    behind_fuse = steps[kinds.index("Fuse") :] if "Fuse" in kinds else []
    return (
        _LEFT_TO_RIGHT_DECODERS.issuperset(kinds)
        and all(step["type"] in {"Fuse", "Strip"} for step in behind_fuse)
        and not any(step["type"] == "Strip" and step["stop"] for step in behind_fuse)
    )


class _ByteLevelJoiner:
    """Tokens spelled in an alphabet of 256 letters, one a byte; their bytes are joined as UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int, token: str) -> str:
        return self._utf8.decode(_byte_level_bytes(token))

    def peek(self) -> str:
        return ""

    def flush(self) -> str:
        return ""


@lru_cache(maxsize=_REMEMBERED_TOKENS)
def _byte_level_bytes(text: str) -> bytes:
    """Bytes a byte-level token stands for; an added token outside the alphabet is plain text."""
    try:
        return bytes(map(_BYTE_OF_LETTER.__getitem__, text))
    except KeyError:
        return text.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Letter of each byte: printable Latin-1 is itself, the others are U+0100 onwards in order.

    Source: openai/gpt-2, `src/encoder.py`, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF_LETTER: Final = _byte_level_alphabet()


class _WindowJoiner:
    """Tokens that are text, joined by the tokenizer's own decoder over the last few of them.

    The last text token stays in the window as context: what the decoder does at the start of a
    text (dropping a space) then never happens to a later token. Byte tokens (`<0x0A>`) wait for
    the run's end, since one bad byte turns its whole run into replacement characters.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, has_byte_tokens: bool) -> None:
        self._backend = backend
        self._has_byte_tokens = has_byte_tokens
        self._context: list[int] = []
        self._run_ids: list[int] = []
        self._run_bytes = bytearray()

    def push(self, token_id: int, token: str) -> str:
        byte = _FALLBACK_BYTE.fullmatch(token) if self._has_byte_tokens else None
        if byte is not None:
            self._run_ids.append(token_id)
            self._run_bytes += bytes.fromhex(byte[1])
            return ""
        text = self._text_behind_context([*self._run_ids, token_id])
        self._context = [token_id]
        self._clear_run()
        return text

    def peek(self) -> str:
        if not self._run_ids:
            return ""
        complete = len(self._run_bytes) - _count_incomplete_bytes(self._run_bytes)
        return self._text_behind_context(self._run_ids[:complete])

    def flush(self) -> str:
        text = self.peek()
        self._clear_run()
        return text

    def _clear_run(self) -> None:
        self._run_ids.clear()
        self._run_bytes.clear()

    def _text_behind_context(self, token_ids: list[int]) -> str:
        before = self._decode(self._context)
        whole = self._decode(self._context + token_ids)
        assert whole.startswith(before), "a token changed the text before it"
        return whole[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text


def _count_incomplete_bytes(run: bytes | bytearray) -> int:
    """Bytes at the end that begin a UTF-8 character and do not finish it."""
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    utf8.decode(bytes(run))
    return len(utf8.getstate()[0])


class _SpaceFilter(Protocol):
    """What becomes of the spaces between joined tokens."""

    def push(self, text: str) -> str: ...

    def peek(self, text: str) -> str:
        """What is held back and this text, as it would end here."""
        ...

    def flush(self) -> str: ...


class _SpaceKeeper:
    """Leaves spaces as they are."""

    def push(self, text: str) -> str:
        return text

    def peek(self, text: str) -> str:
        return text

    def flush(self) -> str:
        return ""


class _SpaceCleaner:
    """`clean_up_spaces` on a stream.

    Every replacement happens inside a run of characters that occur in the replaced patterns, so a
    text may be cut behind any other character.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        self._held += text
        place = len(self._held)
        while place and self._held[place - 1] in _CLEANED_CHARACTERS:
            place -= 1
        settled, self._held = self._held[:place], self._held[place:]
        return clean_up_spaces(settled)

    def peek(self, text: str) -> str:
        return clean_up_spaces(self._held + text)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return clean_up_spaces(held)
