"""A model's tokenizer, chat template and generation defaults as the files of a bundle."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from la_export.checkpoint.checkpoint import Checkpoint
from la_export.checkpoint.configuration import check_token_ids
from la_runtime.chat import ChatTemplate
from la_runtime.errors import BundleError, CheckpointError, UnsupportedModelError, UsageError
from la_runtime.tokenizer import IncrementalDecoder
from la_runtime.tokenizer import Tokenizer as RuntimeTokenizer

__all__ = ["TokenizerFiles", "read_tokenizer"]

_TOKENIZER: Final = "tokenizer.json"
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_CHAT_TEMPLATE: Final = "chat_template.jinja"
_GENERATION_CONFIG: Final = "generation_config.json"
_ANSWER: Final = "Certainly"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The tokenizer's files, ready to be written, and what they say.

    Args:
        contents: bytes of each file by its name.
        vocab_size: one more than the largest id the tokenizer gives out.
        eos_token_ids: union of what configuration, generation defaults and tokenizer call
            the end, and of the special token that ends an answer in the chat template, ascending.
    """

    contents: Mapping[str, bytes]
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def write(self, folder: Path) -> None:
        """Write the files into a folder."""
        for name, content in self.contents.items():
            (folder / name).write_bytes(content)


def read_tokenizer(checkpoint: Checkpoint) -> TokenizerFiles:
    """Take the tokenizer's files as they are, or convert when there is no `tokenizer.json`.

    Args:
        checkpoint: the model.

    Raises:
        CheckpointError: the model has no tokenizer that the runtime can use.
        UnsupportedModelError: the tokenizer gives out ids beyond the embedding table.
    """
    source = checkpoint.source
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if source.gguf_name is None and (source.folder / _TOKENIZER).is_file():
            _copy(source.folder, folder)
        else:
            _convert(checkpoint, folder)
        if source.gguf_name is None:
            _copy_when_there(source.folder, folder, _GENERATION_CONFIG)
        _extract_chat_template(folder)
        tokenizer = _open(folder)
        _check_runtime(folder)
        files = TokenizerFiles(
            contents={path.name: path.read_bytes() for path in sorted(folder.iterdir())},
            vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
            eos_token_ids=_collect_eos(checkpoint, folder, tokenizer),
        )
    _check_vocabulary(files, checkpoint)
    return files


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
    except ModuleNotFoundError:
        raise
    except Exception as error:
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
        if not all(isinstance(entry, dict) for entry in template):
            raise CheckpointError(
                f"chat_template in {_TOKENIZER_CONFIG} is {template!r:.80}, expected text or a "
                "list of objects with 'name' and 'template'"
            )
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    if isinstance(template, str):
        (folder / _CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def _open(folder: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
    except Exception as error:
        raise CheckpointError(f"{_TOKENIZER} cannot be read ({error})") from error
    if tokenizer.get_vocab_size(with_added_tokens=True) == 0:
        raise CheckpointError(f"{_TOKENIZER} has no tokens; copy the tokenizer again")
    return tokenizer


def _check_runtime(folder: Path) -> None:
    """The runtime must be able to load the files and to stream text with them."""
    try:
        IncrementalDecoder(RuntimeTokenizer.load(folder))
    except BundleError as error:
        reason = str(error).replace(f"{folder}/", "").removesuffix("; rebuild the bundle")
        raise CheckpointError(f"the runtime cannot use this tokenizer: {reason}") from error


def _collect_eos(checkpoint: Checkpoint, folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    defaults = _read_fields(folder / _GENERATION_CONFIG).get("eos_token_id")
    found = {
        *check_token_ids(checkpoint.config.eos_token_id, "eos_token_id of config.json"),
        *check_token_ids(defaults, f"eos_token_id of {_GENERATION_CONFIG}"),
    }
    token = _read_fields(folder / _TOKENIZER_CONFIG).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        token_id = tokenizer.token_to_id(token)
        found.update(() if token_id is None else (token_id,))
    return tuple(sorted(found | _find_turn_end(folder, tokenizer)))


def _find_turn_end(folder: Path, tokenizer: Tokenizer) -> set[int]:
    """The special token that the chat template puts behind an answer, if it does.

    Chat models say it, and some configurations do not name it. A template that cannot render this
    chat says nothing about it.
    """
    if not (folder / _CHAT_TEMPLATE).is_file():
        return set()
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = ChatTemplate.load(folder).render(chat, add_generation_prompt=False)
    except (BundleError, UsageError):
        return set()
    behind = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
    first = tokenizer.encode(behind, add_special_tokens=False).ids[:1]
    special = {
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    return special.intersection(first)


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


def _check_vocabulary(files: TokenizerFiles, checkpoint: Checkpoint) -> None:
    """Ids from the table's size on mean lookahead tokens, so text must never reach them."""
    if files.vocab_size > checkpoint.config.vocab_size:
        raise UnsupportedModelError(
            f"the tokenizer gives out ids up to {files.vocab_size - 1}, but the embedding table "
            f"of {checkpoint.source.origin} has {checkpoint.config.vocab_size} rows; "
            "use a tokenizer that belongs to the model"
        )
