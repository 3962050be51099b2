"""Puts a model's tokenizer, chat template and generation defaults into a bundle."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from la_export.checkpoint.checkpoint import Checkpoint
from la_runtime.errors import CheckpointError, UnsupportedModelError

__all__ = ["TokenizerFacts", "write_tokenizer"]

_TOKENIZER: Final = "tokenizer.json"
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_CHAT_TEMPLATE: Final = "chat_template.jinja"
_GENERATION_CONFIG: Final = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What the written files say.

    Args:
        vocab_size: one more than the largest id the tokenizer gives out.
        eos_token_ids: union of what configuration, generation defaults and tokenizer call
            the end, ascending.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> TokenizerFacts:
    """Copy the tokenizer's files as they are, or convert when there is no `tokenizer.json`.

    Args:
        checkpoint: the model.
        folder: receives the files and no others.

    Raises:
        CheckpointError: the model has no tokenizer that can be used.
        UnsupportedModelError: the tokenizer gives out ids beyond the embedding table.
    """
    source = checkpoint.source
    if source.gguf_name is None and (source.folder / _TOKENIZER).is_file():
        _copy(source.folder, folder)
    else:
        _convert(checkpoint, folder)
    if source.gguf_name is None:
        _copy_when_there(source.folder, folder, _GENERATION_CONFIG)
    _extract_chat_template(folder)
    tokenizer = _open(folder)
    facts = TokenizerFacts(
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        eos_token_ids=_collect_eos(checkpoint, folder, tokenizer),
    )
    _check_vocabulary(facts, checkpoint)
    return facts


def _copy(source: Path, folder: Path) -> None:
    for name in (_TOKENIZER, _TOKENIZER_CONFIG, _CHAT_TEMPLATE):
        _copy_when_there(source, folder, name)


def _copy_when_there(source: Path, folder: Path, name: str) -> None:
    if (source / name).is_file():
        shutil.copyfile(source / name, folder / name)


def _convert(checkpoint: Checkpoint, folder: Path) -> None:
    source = checkpoint.source
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.folder,
            gguf_file=source.gguf_name,
            trust_remote_code=False,
            local_files_only=True,
        )
    except (ValueError, OSError, ImportError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{source.origin} has no tokenizer that can be read ({error}); "
            "expected a tokenizer.json beside the weights"
        ) from error
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        if not (Path(scratch) / _TOKENIZER).is_file():
            raise CheckpointError(
                f"{source.origin} has a tokenizer without a fast form; expected a tokenizer.json"
            )
        _copy(Path(scratch), folder)


def _extract_chat_template(folder: Path) -> None:
    """Older folders keep the template inside the tokenizer's configuration."""
    if (folder / _CHAT_TEMPLATE).is_file():
        return
    template = _read_fields(folder / _TOKENIZER_CONFIG).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    if isinstance(template, str):
        (folder / _CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def _open(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(folder / _TOKENIZER))
    except Exception as error:
        raise CheckpointError(f"{_TOKENIZER} cannot be read ({error})") from error


def _collect_eos(checkpoint: Checkpoint, folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    found = set(_as_ids(checkpoint.config.eos_token_id))
    found.update(_as_ids(_read_fields(folder / _GENERATION_CONFIG).get("eos_token_id")))
    token = _read_fields(folder / _TOKENIZER_CONFIG).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        token_id = tokenizer.token_to_id(token)
        found.update(() if token_id is None else (token_id,))
    return tuple(sorted(found))


def _as_ids(value: object) -> Iterable[int]:
    if isinstance(value, int):
        return (value,)
    return tuple(value) if isinstance(value, list) else ()


def _read_fields(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not valid JSON ({error})") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path.name} is not a JSON object")
    return fields


def _check_vocabulary(facts: TokenizerFacts, checkpoint: Checkpoint) -> None:
    """Ids from the table's size on mean lookahead tokens, so text must never reach them."""
    if facts.vocab_size > checkpoint.config.vocab_size:
        raise UnsupportedModelError(
            f"the tokenizer gives out ids up to {facts.vocab_size - 1}, but the embedding table "
            f"of {checkpoint.source.origin} has {checkpoint.config.vocab_size} rows; "
            "use a tokenizer that belongs to the model"
        )
