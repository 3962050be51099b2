from __future__ import annotations

import json
from pathlib import Path

import pytest

from la_export.bench.speed.questions import Question, hash_questions, load_questions
from la_runtime.errors import UsageError


def _everything(_: str) -> bool:
    return True


def _write_benchmark(path: Path) -> Path:
    lines = [
        {"question_id": number, "category": category, "turns": [f"{category} {number}", "and?"]}
        for number, category in enumerate(["qa", "qa", "qa", "rag", "rag", "coding"], 1)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_the_benchmark_gives_two_questions_of_each_category_by_turns() -> None:
    found = load_questions(None, per_category=None, fits=_everything)

    categories = [question.category for question in found]
    assert len(set(categories)) == 13
    assert categories == [*categories[:13], *categories[:13]]


def test_categories_of_a_file_take_turns_and_keep_its_order(tmp_path: Path) -> None:
    path = _write_benchmark(tmp_path / "some.jsonl")

    found = load_questions(path, per_category=None, fits=_everything)

    texts = [question.text for question in found]
    assert texts == ["qa 1", "rag 4", "coding 6", "qa 2", "rag 5", "qa 3"]
    assert found[2].category == "coding"


def test_too_few_questions_of_a_category_are_refused(tmp_path: Path) -> None:
    path = _write_benchmark(tmp_path / "some.jsonl")

    with pytest.raises(UsageError, match="category 'coding' has 1 prompts that fit"):
        load_questions(path, per_category=2, fits=_everything)


def test_questions_that_do_not_fit_are_passed_over(tmp_path: Path) -> None:
    path = _write_benchmark(tmp_path / "some.jsonl")

    found = load_questions(path, per_category=1, fits=lambda text: text != "qa 1")

    assert [question.text for question in found] == ["qa 2", "rag 4", "coding 6"]


def test_lines_of_a_text_file_are_one_category_named_after_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("one\ntwo\nthree\n")

    found = load_questions(path, per_category=2, fits=_everything)

    assert found == (
        Question(name="mine-1", category="mine", text="one"),
        Question(name="mine-2", category="mine", text="two"),
    )


def test_a_file_of_which_nothing_fits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("one\n")

    with pytest.raises(UsageError, match=r"no prompt of .*mine\.txt fits into the context"):
        load_questions(path, per_category=None, fits=lambda _: False)


def test_the_digest_depends_on_texts_and_their_order() -> None:
    one, other = (Question(name=text, category="qa", text=text) for text in ("a", "b"))

    digests = {hash_questions(some) for some in ([one, other], [other, one], [one], [other])}

    assert len(digests) == 4
