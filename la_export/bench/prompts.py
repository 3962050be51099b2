"""The benchmark's questions, and how a measurement picks some of them.

Owns reading the data file that ships with the package. It does not know models or templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from la_runtime.errors import UsageError

__all__ = ["GROUPS", "SPEC_BENCH_PATH", "BenchPrompt", "load_prompts", "pick_prompts"]

SPEC_BENCH_PATH: Final = Path(__file__).parent / "data" / "spec_bench.jsonl"

# What a measurement reports, and the categories of the data file each group is made of. The
# eight categories of MT-Bench have few questions each and ask for free writing.
GROUPS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "writing": (
            "writing",
            "roleplay",
            "reasoning",
            "math",
            "coding",
            "extraction",
            "stem",
            "humanities",
        ),
        "qa": ("qa",),
        "translation": ("translation",),
        "math": ("math_reasoning",),
        "summarization": ("summarization",),
        "rag": ("rag",),
    }
)
_KNOWN_CATEGORIES: Final = frozenset(name for names in GROUPS.values() for name in names)
_REQUIRED_KEYS: Final = frozenset({"question_id", "category", "turns"})
_OPTIONAL_KEYS: Final = frozenset({"reference"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """One question.

    Args:
        question_id: its number in the benchmark.
        category: one of the benchmark's categories.
        turns: the user's messages, in order; measurements use the first.
    """

    question_id: int
    category: str
    turns: tuple[str, ...]

    @property
    def group(self) -> str:
        """The group of `GROUPS` it belongs to."""
        return next(group for group, categories in GROUPS.items() if self.category in categories)


def load_prompts(path: Path = SPEC_BENCH_PATH) -> tuple[BenchPrompt, ...]:
    """Every question of a data file, in the file's order.

    Raises:
        UsageError: no such file, or a line that is no question; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompts {path}: {error}") from error
    return tuple(
        _parse_prompt(line, place=f"{path}, line {number}") for number, line in enumerate(lines, 1)
    )


def _parse_prompt(line: str, *, place: str) -> BenchPrompt:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise UsageError(f"{place}: expected a JSON object, got {line:.40}")
    if missing := _REQUIRED_KEYS - record.keys():
        raise UsageError(f"{place}: missing {', '.join(sorted(missing))}")
    if unknown := record.keys() - _REQUIRED_KEYS - _OPTIONAL_KEYS:
        raise UsageError(f"{place}: unknown key {', '.join(sorted(unknown))}")
    question_id, category, turns = record["question_id"], record["category"], record["turns"]
    if type(question_id) is not int:
        raise UsageError(f"{place}: question_id is {question_id!r:.40}, expected an integer")
    if category not in _KNOWN_CATEGORIES:
        raise UsageError(
            f"{place}: category is {category!r:.40}, expected one of "
            f"{', '.join(sorted(_KNOWN_CATEGORIES))}"
        )
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise UsageError(f"{place}: turns is {turns!r:.40}, expected a list of messages")
    return BenchPrompt(question_id=question_id, category=category, turns=tuple(turns))


def pick_prompts(
    prompts: Sequence[BenchPrompt], *, per_group: int, groups: Sequence[str] = tuple(GROUPS)
) -> tuple[BenchPrompt, ...]:
    """The first questions of each group, taking its categories in turn.

    Filter by length before picking: a group with too few questions is an error.

    Args:
        prompts: the questions to pick from.
        per_group: how many of each group.
        groups: keys of `GROUPS`, in the order wanted.

    Raises:
        UsageError: an unknown group, a count below 1, or a group with too few questions.
    """
    if per_group < 1:
        raise UsageError(f"per_group must be at least 1, got {per_group}")
    return tuple(
        prompt for group in groups for prompt in _pick_group(prompts, group, count=per_group)
    )


def _pick_group(
    prompts: Sequence[BenchPrompt], group: str, *, count: int
) -> tuple[BenchPrompt, ...]:
    if group not in GROUPS:
        raise UsageError(f"unknown prompt group {group!r}; expected one of {', '.join(GROUPS)}")
    categories = GROUPS[group]
    ranked: list[tuple[int, int, BenchPrompt]] = []
    for order, category in enumerate(categories):
        members = [prompt for prompt in prompts if prompt.category == category]
        ranked += [(rank, order, prompt) for rank, prompt in enumerate(members)]
    if len(ranked) < count:
        raise UsageError(f"group {group!r} has {len(ranked)} prompts, {count} are wanted")
    ranked.sort(key=lambda entry: entry[:2])
    return tuple(prompt for _, _, prompt in ranked[:count])
