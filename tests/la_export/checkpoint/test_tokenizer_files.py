from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from la_export.checkpoint import Checkpoint, find_model, load_checkpoint
from la_export.checkpoint.tokenizer_files import write_tokenizer
from la_runtime.errors import CheckpointError, UnsupportedModelError
from tests.tiny_models import CHAT_TEMPLATE

TEXTS = ("The cat sat on the mat.", " two  spaces", "naïve café ☕ 猫", "<|im_start|>user\nhi", "")


def _load(folder: Path) -> Checkpoint:
    return load_checkpoint(find_model(str(folder), revision=None, allow_bin=False), context=None)


def test_written_tokenizer_equals_transformers(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_checkpoint()
    write_tokenizer(_load(folder), tmp_path)
    truth = AutoTokenizer.from_pretrained(folder)
    written = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert written.encode(text).ids == truth(text)["input_ids"]


def test_only_known_files_are_written(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_checkpoint()
    (folder / "modeling_custom.py").write_text("raise SystemExit")
    work = tmp_path / "work"
    work.mkdir()
    write_tokenizer(_load(folder), work)
    assert {path.name for path in work.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    assert (work / "chat_template.jinja").read_text() == CHAT_TEMPLATE


@pytest.mark.parametrize(
    "template", ["{{ 1 }}", [{"name": "default", "template": "{{ 1 }}"}]], ids=["plain", "named"]
)
def test_template_inside_the_tokenizer_config_is_extracted(
    make_checkpoint: Callable[..., Path], tmp_path: Path, template: object
) -> None:
    folder = make_checkpoint()
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    write_tokenizer(_load(folder), tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ 1 }}"


def test_end_tokens_are_the_union_of_all_that_name_one(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_checkpoint(eos_token_id=5)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [7, 5]}))
    assert write_tokenizer(_load(folder), tmp_path).eos_token_ids == (2, 5, 7)


def test_missing_tokenizer_is_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_checkpoint()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="no tokenizer that can be read"):
        write_tokenizer(_load(folder), tmp_path)


def test_tokenizer_larger_than_the_table_is_refused(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_checkpoint(vocab_size=300)
    with pytest.raises(UnsupportedModelError, match=r"ids up to 319.* has 300 rows"):
        write_tokenizer(_load(folder), tmp_path)
