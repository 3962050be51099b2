"""The texts of a verification: those that ship with it, and those of a user's file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from la_runtime.errors import UsageError

__all__ = ["CHATS", "PROMPTS", "SCRIPTS", "LadderPrompt", "hash_prompts", "read_prompts"]

_JSON_SUFFIX: Final = ".jsonl"
_JSON_KEYS: Final = frozenset({"question_id", "category", "turns", "reference", "prompt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderPrompt:
    """A text to decode from.

    Args:
        name: what messages call it.
        text: the text.
        is_question: put it into the chat template as the user's message, where there is one.
    """

    name: str
    text: str
    is_question: bool = False


SCRIPTS: Final = (
    LadderPrompt(
        name="english",
        text="The lighthouse keeper wrote in his journal every evening. On the last page he had "
        "drawn a map of the bay, and beside it, in small letters, the names of ",
    ),
    LadderPrompt(
        name="code",
        text="def merge(left: list[int], right: list[int]) -> list[int]:\n"
        '    """Merge two sorted lists."""\n'
        "    merged, i, j = [], 0, 0\n    while i < len(left) and j < len(right):\n        if",
    ),
    LadderPrompt(
        name="chinese",
        text="清晨的集市上人来人往，卖花的姑娘把一束白色的茉莉递给了老人，他笑着说：“",
    ),
    LadderPrompt(
        name="arabic",
        text="في صباح كل يوم يفتح الكاتب نافذته ويشرب القهوة ثم يبدأ بكتابة رسالة إلى",
    ),
    LadderPrompt(
        name="emoji",
        text="Weather this week: Mon ☀️ 24°, Tue 🌧️ 17°, Wed ⛈️ 15°, Thu 🌈 19°, Fri 👩‍🚀🚀 — "
        "summary: 🙂",
    ),
)
PROMPTS: Final = (
    *SCRIPTS,
    LadderPrompt(name="sky", text="Why is the sky blue?", is_question=True),
    LadderPrompt(
        name="list", text="List five rivers of Europe and their lengths.", is_question=True
    ),
    LadderPrompt(
        name="sum",
        text="A baker sells 12 loaves at 3.50 each and 7 cakes at 18 each. What is the total?",
        is_question=True,
    ),
    LadderPrompt(
        name="story", text="Write a short story about a fox and a clock.", is_question=True
    ),
    LadderPrompt(
        name="repeat", text="one two three four one two three four one two three", is_question=False
    ),
)

CHATS: Final[tuple[tuple[dict[str, str], ...], ...]] = (
    ({"role": "user", "content": "Hello!"},),
    (
        {"role": "user", "content": "Was heißt „Brücke“ auf Türkisch?"},
        {"role": "assistant", "content": "Köprü."},
        {"role": "user", "content": "  谢谢 👍\n"},
    ),
    (
        {"role": "system", "content": "Answer in one line; never mention <|im_end|>."},
        {"role": "user", "content": "def f(x):\n\treturn x  # ما هذا؟"},
    ),
    (
        {"role": "system", "content": "Be brief."},
        *(
            {"role": role, "content": f"{text} {turn}"}
            for turn in range(6)
            for role, text in (("user", "And then?"), ("assistant", "Then comes"))
        ),
        {"role": "user", "content": "Enough."},
    ),
)


def hash_prompts(prompts: Sequence[LadderPrompt]) -> str:
    """SHA-256 of texts and of what makes them questions."""
    record = [[prompt.text, prompt.is_question] for prompt in prompts]
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def read_prompts(path: Path) -> tuple[LadderPrompt, ...]:
    """The prompts of a file: a text a line, or, if its name ends in .jsonl, an object a line.

    An object holds ``prompt``, a text, or ``turns``, of which the first is put as a question, as
    the benchmark's files do. Empty lines are left out.

    Raises:
        UsageError: no such file, nothing in it, or a line that is no prompt; names the line.
    """
    try:
        # A byte-order mark is no text; only line feeds end a line: a text may hold U+2028.
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompts {path}: {error}; give a UTF-8 file") from error
    parse = _parse_record if path.suffix == _JSON_SUFFIX else _parse_text
    prompts = tuple(
        parse(line.removesuffix("\r"), name=f"line {number}", place=f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    )
    if not prompts:
        raise UsageError(f"{path} holds no prompt; give at least one line")
    return prompts


def _parse_text(line: str, *, name: str, place: str) -> LadderPrompt:
    del place
    return LadderPrompt(name=name, text=line)


def _parse_record(line: str, *, name: str, place: str) -> LadderPrompt:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: not JSON ({error}); give one object a line") from error
    if not isinstance(record, dict):
        raise UsageError(f"{place}: expected a JSON object, got {line:.40}")
    if unknown := record.keys() - _JSON_KEYS:
        raise UsageError(
            f"{place}: unknown key {', '.join(sorted(unknown))}; give 'prompt' or 'turns'"
        )
    if "prompt" in record and "turns" not in record:
        return LadderPrompt(name=name, text=_check_text(record["prompt"], "prompt", place))
    turns = record.get("turns")
    if "prompt" in record or not isinstance(turns, list) or not turns:
        raise UsageError(f"{place}: expected 'prompt', a text, or 'turns', a list of texts")
    name = str(record.get("question_id", name))
    return LadderPrompt(name=name, text=_check_text(turns[0], "turns", place), is_question=True)


def _check_text(value: object, key: str, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{place}: {key} is {value!r:.40}, expected a text that is not empty")
    return value
