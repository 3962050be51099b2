from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from la_export.checkpoint import Checkpoint, find_model, load_checkpoint
from la_export.checkpoint.tokenizer_files import TokenizerFiles, read_tokenizer
from la_runtime.errors import CheckpointError, UnsupportedModelError
from tests.tiny_models import CHAT_TEMPLATE

TEXTS = ("The cat sat on the mat.", " two  spaces", "naïve café ☕ 猫", "<|im_start|>user\nhi", "")


def _load(folder: Path) -> Checkpoint:
    return load_checkpoint(find_model(str(folder), revision=None, allow_bin=False), context=None)


def _write(checkpoint: Path, folder: Path) -> TokenizerFiles:
    files = read_tokenizer(_load(checkpoint))
    files.write(folder)
    return files


def _edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_written_tokenizer_equals_transformers(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_checkpoint()
    _write(folder, tmp_path)
    truth = AutoTokenizer.from_pretrained(folder)
    written = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert written.encode(text).ids == truth(text)["input_ids"]


def test_only_known_files_are_written(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_checkpoint()
    (folder / "modeling_custom.py").write_text("raise SystemExit")
    work = tmp_path / "work"
    work.mkdir()
    _write(folder, work)
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
    _edit_json(folder / "tokenizer_config.json", chat_template=template)
    _write(folder, tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ 1 }}"


def test_end_tokens_are_the_union_of_all_that_name_one(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_checkpoint(eos_token_id=5)
    _edit_json(folder / "generation_config.json", eos_token_id=[7, 5])
    assert _write(folder, tmp_path).eos_token_ids == (2, 5, 7)


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        ("<|im_start|>\n", (1, 2)),
        (" <|im_start|>", (1, 2)),
        ("\n", (2,)),
        ("</s>", (2,)),
        ("{{ raise_exception('no answers') }}", (2,)),
        ("{{ 1 + }}", (2,)),
    ],
    ids=["token", "space", "newline", "no token", "refuses", "faulty"],
)
def test_the_token_that_ends_an_answer_in_the_template_is_an_end_token(
    make_checkpoint: Callable[..., Path], tmp_path: Path, behind: str, expected: tuple[int, ...]
) -> None:
    folder = make_checkpoint()
    template = "{% for message in messages %}{{ message['content'] }}" + behind + "{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    assert _write(folder, tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("value", ["2", [2, None, 7], 2.0, {}, True])
def test_end_tokens_that_are_no_ids_are_refused(
    make_checkpoint: Callable[..., Path], value: object
) -> None:
    folder = make_checkpoint()
    _edit_json(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(CheckpointError, match=r"eos_token_id of generation_config\.json is "):
        read_tokenizer(_load(folder))


@pytest.mark.parametrize("entries", [["x"], [None], [{"name": "default"}, 5]])
def test_named_templates_that_are_no_objects_are_refused(
    make_checkpoint: Callable[..., Path], entries: list[object]
) -> None:
    folder = make_checkpoint()
    (folder / "chat_template.jinja").unlink()
    _edit_json(folder / "tokenizer_config.json", chat_template=entries)
    with pytest.raises(CheckpointError, match="chat_template in tokenizer_config"):
        read_tokenizer(_load(folder))


def test_tokenizer_without_tokens_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has no tokens"):
        read_tokenizer(_load(folder))


def test_tokenizer_that_cannot_be_streamed_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    _edit_json(
        folder / "tokenizer.json",
        decoder={"type": "CTC", "pad_token": "x", "word_delimiter_token": "|", "cleanup": True},
    )
    with pytest.raises(CheckpointError, match="decodes with CTC, which cannot be streamed"):
        read_tokenizer(_load(folder))


def test_special_token_that_is_no_text_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    _edit_json(folder / "tokenizer_config.json", pad_token=5)
    with pytest.raises(CheckpointError, match=r"use this tokenizer: tokenizer_config.*pad_token"):
        read_tokenizer(_load(folder))


def test_missing_tokenizer_is_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_checkpoint()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="no tokenizer that can be read"):
        _write(folder, tmp_path)


def test_tokenizer_larger_than_the_table_is_refused(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_checkpoint(vocab_size=300)
    with pytest.raises(UnsupportedModelError, match=r"ids up to 319.* has 300 rows"):
        _write(folder, tmp_path)
