"""Text to token ids and back, with the bundle's tokenizer.

Owns loading the tokenizer files; both directions equal the fast tokenizers of transformers. It
does not know chats, models, or how a stream of tokens becomes text (`detokenizer`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from la_runtime.detokenizer import IncrementalDecoder, clean_up_spaces
from la_runtime.errors import BundleError, UsageError

__all__ = ["IncrementalDecoder", "Tokenizer", "read_special_tokens", "read_tokenizer_config"]

TOKENIZER_NAME: Final = "tokenizer.json"
TOKENIZER_CONFIG_NAME: Final = "tokenizer_config.json"

# The roles a configuration may name; each value is a string or a serialized AddedToken.
_SPECIAL_ROLES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """The bundle's `tokenizer_config.json` as parsed, empty when there is none.

    Raises:
        BundleError: it is not a JSON object.
    """
    path = folder / TOKENIZER_CONFIG_NAME
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not valid JSON ({error}); rebuild the bundle") from error
    if not isinstance(config, dict):
        raise BundleError(f"{path} is malformed: expected a JSON object, got {config!r:.60}")
    return config


def read_special_tokens(folder: Path) -> Mapping[str, str]:
    """Text of each special token that the configuration names, by role (``bos_token``, ...).

    Raises:
        BundleError: a role holds neither text nor a token object.
    """
    config = read_tokenizer_config(folder)
    found: dict[str, str] = {}
    for role in _SPECIAL_ROLES:
        if config.get(role) is not None:
            found[role] = _token_text(config[role], role=role, folder=folder)
    return found


def _token_text(value: Any, *, role: str, folder: Path) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise BundleError(
            f"{folder / TOKENIZER_CONFIG_NAME} is malformed: {role} is {value!r:.60}, expected "
            "text or an object with 'content'; rebuild the bundle"
        )
    return text


class Tokenizer:
    """A tokenizer over the `tokenizers` library.

    Args:
        backend: the loaded tokenizer; truncation and padding are switched off.
        special_tokens: text of the special tokens by role.
        cleans_up_spaces: whether decoding removes the spaces before punctuation and English
            contractions, as transformers does for tokenizers other than BPE that ask for it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        cleans_up_spaces: bool,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._special_tokens = dict(special_tokens)
        self._spellings: dict[int, str | None] = {}
        self.cleans_up_spaces = cleans_up_spaces

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load `tokenizer.json` and `tokenizer_config.json` as transformers saves them.

        `tokenizer.json` alone decides what encoding does, added tokens and what is put around a
        text included; transformers ignores ``add_bos_token`` beside such a file, too.

        Raises:
            BundleError: a file is missing or malformed.
        """
        path = folder / TOKENIZER_NAME
        if not path.is_file():
            raise BundleError(f"{folder} has no {TOKENIZER_NAME}; rebuild the bundle")
        backend = _parse_backend(path)
        config = read_tokenizer_config(folder)
        is_bpe = isinstance(backend.model, tokenizers.models.BPE)
        force_for_bpe = config.get(
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False
        )
        return cls(
            backend,
            special_tokens=read_special_tokens(folder),
            cleans_up_spaces=bool(config.get("clean_up_tokenization_spaces", False))
            and (not is_bpe or bool(force_for_bpe)),
        )

    @property
    def bos_token(self) -> str | None:
        """Text of the beginning-of-sequence token, if there is one."""
        return self._special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the end-of-sequence token, if there is one."""
        return self._special_tokens.get("eos_token")

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Text of every named special token by role, as chat templates see them."""
        return self._special_tokens

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Id of one token given by its text, or `None` when it is no token."""
        return self.backend.token_to_id(token)

    def spelling(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it, `None` when the id names none.

        Remembered: a step asks for every token, and the library takes longer than a look-up.
        """
        if token_id not in self._spellings:
            self._spellings[token_id] = self.backend.id_to_token(token_id)
        return self._spellings[token_id]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Args:
            text: any valid Unicode text; special tokens written in it are recognized.
            add_special_tokens: add what the tokenizer puts around a text, such as a
                beginning-of-sequence token. A rendered chat already holds them.

        Raises:
            UsageError: the text holds half a surrogate pair, which is no Unicode text.
        """
        try:
            encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise UsageError(
                f"the text is not valid Unicode: {_surrogate_place(text)}; decode input as UTF-8"
            ) from error
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=True)
        return clean_up_spaces(text) if self.cleans_up_spaces else text


def _surrogate_place(text: str) -> str:
    for place, character in enumerate(text):
        if "\ud800" <= character <= "\udfff":
            return f"character {place} is half a surrogate pair, {character!r}"
    raise AssertionError("the tokenizer refused a text without surrogates")


def _parse_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower for a malformed file
        raise BundleError(f"{path} cannot be read as a tokenizer: {error}") from error
