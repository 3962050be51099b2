"""The prompts that ship, and those of a file."""

from __future__ import annotations

import json
import re

import pytest

from la_export.bench.prompts import SPEC_BENCH_PATH
from la_export.verify.prompts import PROMPTS, SCRIPTS, LadderPrompt, read_prompts
from la_runtime.errors import UsageError


def test_the_shipped_prompts_are_of_five_scripts_and_have_names_of_their_own():
    assert [prompt.name for prompt in SCRIPTS] == ["english", "code", "chinese", "arabic", "emoji"]
    assert len({prompt.name for prompt in PROMPTS}) == len(PROMPTS)


def test_each_line_of_a_text_file_is_a_prompt(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('Hello.\n\n{"prompt": "as it is"}\n  日本語\n', "utf-8")

    assert read_prompts(path) == (
        LadderPrompt(name="line 1", text="Hello."),
        LadderPrompt(name="line 3", text='{"prompt": "as it is"}'),
        LadderPrompt(name="line 4", text="  日本語"),
    )


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_only_line_feeds_end_a_line_and_a_byte_order_mark_is_no_text(tmp_path, name):
    texts = ["one\u2028two\x0bthree\x85four", "five"]
    is_json = name.endswith("l")
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path = tmp_path / name
    path.write_bytes("\r\n".join(lines if is_json else texts).encode("utf-8-sig"))

    assert [prompt.text for prompt in read_prompts(path)] == texts


def test_an_object_holds_a_prompt_or_the_turns_of_a_question(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Once"}\n{"question_id": 81, "turns": ["Why?", "And then?"]}\n')

    assert read_prompts(path) == (
        LadderPrompt(name="line 1", text="Once"),
        LadderPrompt(name="81", text="Why?", is_question=True),
    )


def test_the_benchmarks_own_file_can_be_read():
    assert all(prompt.is_question for prompt in read_prompts(SPEC_BENCH_PATH))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "line 1: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ('{"prompt": "a"}\n[1]', "line 2: expected a JSON object, got [1]"),
        ('{"promt": "a"}', "line 1: unknown key promt; give 'prompt' or 'turns'"),
        ('{"turns": []}', "line 1: expected 'prompt', a text, or 'turns', a list of texts"),
        ('{"turns": ["a"], "prompt": "b"}', "line 1: expected 'prompt', a text, or 'turns'"),
        ('{"prompt": 3}', "line 1: prompt is 3, expected a text that is not empty"),
        ('{"turns": [""]}', "line 1: turns is '', expected a text that is not empty"),
        ("\n \n", "holds no prompt; give at least one line"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)

    with pytest.raises(UsageError, match=re.escape(message)):
        read_prompts(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes("Brücke".encode("latin-1"))

    for name in ("none.txt", "latin.txt", "."):
        with pytest.raises(UsageError, match=r"cannot read the prompts .*; give a UTF-8 file"):
            read_prompts(tmp_path / name)
