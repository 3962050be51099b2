"""The questions that a run decodes: those that ship with the package, or a file's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from la_export.bench.prompts import (
    SPEC_BENCH_PATH,
    BenchPrompt,
    load_prompts,
)
from la_export.verify.prompts import read_prompts
from la_runtime.errors import UsageError

__all__ = ["Question", "hash_questions", "load_questions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is put to every bundle and peer, as the first message of a chat.

    Args:
        name: unique among the questions of a run.
        category: what its figures are reported under.
        text: the message.
    """

    name: str
    category: str
    text: str


def load_questions(
    path: Path | None, *, per_category: int | None, fits: Callable[[str], bool]
) -> tuple[Question, ...]:
    """Questions in the order in which they are put: the categories take turns.

    Args:
        path: a file as `la-export verify --prompts` takes it, or one with the benchmark's
            categories; None for the benchmark's own.
        per_category: how many of each; None for all of a file, and 2 of the benchmark.
        fits: whether a text leaves room for its answer; those that do not are passed over.

    Raises:
        UsageError: the file cannot be read, or too few fit.
    """
    if path is None:
        questions = _pick(load_prompts(SPEC_BENCH_PATH), per_category or 2, fits)
    elif _has_categories(path):
        questions = _pick(load_prompts(path), per_category, fits)
    else:
        texts = [prompt.text for prompt in read_prompts(path)]
        found = [
            Question(name=f"{path.stem}-{number}", category=path.stem, text=text)
            for number, text in enumerate(texts, 1)
            if fits(text)
        ]
        questions = found[:per_category]
    if not questions:
        raise UsageError(
            f"no prompt of {path} fits into the context with its answer; give shorter ones or "
            "fewer --new-tokens"
        )
    return _take_turns(questions)


def hash_questions(questions: Iterable[Question]) -> str:
    """SHA-256 of the texts, in order."""
    texts = [question.text for question in questions]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _has_categories(path: Path) -> bool:
    """Whether a file's first line is a question of the benchmark's format."""
    try:
        with path.open(encoding="utf-8") as lines:
            record = json.loads(lines.readline())
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and "category" in record


def _pick(
    prompts: Sequence[BenchPrompt], per_category: int | None, fits: Callable[[str], bool]
) -> list[Question]:
    by_category: dict[str, list[Question]] = {prompt.category: [] for prompt in prompts}
    for prompt in prompts:
        found = by_category[prompt.category]
        if len(found) != per_category and fits(prompt.turns[0]):
            name = str(prompt.question_id)
            found.append(Question(name=name, category=prompt.category, text=prompt.turns[0]))
    for category, found in by_category.items():
        if per_category is not None and len(found) < per_category:
            raise UsageError(
                f"category {category!r} has {len(found)} prompts that fit into the context with "
                f"their answers, {per_category} are wanted; ask for fewer --per-category"
            )
    return [question for found in by_category.values() for question in found]


def _take_turns(questions: Sequence[Question]) -> tuple[Question, ...]:
    """One of each category, then the next of each: what is cut short has seen them all."""
    categories: dict[str, list[Question]] = {}
    for question in questions:
        categories.setdefault(question.category, []).append(question)
    turns = chain.from_iterable(zip_longest(*categories.values()))
    return tuple(question for question in turns if question is not None)
