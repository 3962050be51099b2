"""Puts every question to every bundle in every way, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from la_export.bench.speed.questions import Question
from la_export.bench.speed.subjects import Subject
from la_export.bench.speed.ways import Answer, Way

__all__ = ["Answers", "ask"]

Answers: TypeAlias = dict[Way, dict[str, Answer]]
"""By way and question."""

_SEED: Final = 0


def ask(
    subjects: Sequence[Subject],
    questions: Sequence[Question],
    *,
    ways: Mapping[str, Sequence[Way]],
    new_tokens: int,
    answers: Mapping[str, Answers],
    goes_on: Callable[[], bool],
    report: Callable[[int, int], None],
) -> None:
    """Ask, question by question; the order of bundles and ways is drawn anew for each.

    Args:
        subjects: the bundles.
        questions: in order.
        ways: by bundle, plain decoding among them.
        new_tokens: most tokens of an answer.
        answers: by bundle, to be filled; what is in it when this is interrupted was measured.
        goes_on: whether there is time for another question; the first is asked in any case.
        report: told how many questions are done, and how many there are.
    """
    rng = np.random.default_rng(_SEED)
    for done, question in enumerate(questions):
        if done and not goes_on():
            return
        for place in rng.permutation(len(subjects)):
            subject = subjects[place]
            subject.engine.warmup()
            for way_place in rng.permutation(len(ways[subject.name])):
                way = ways[subject.name][way_place]
                found = answers[subject.name].setdefault(way, {})
                found[question.name] = _answer(subject, question, way, new_tokens)
        report(done + 1, len(questions))


def _answer(subject: Subject, question: Question, way: Way, new_tokens: int) -> Answer:
    prompt = subject.engine.encode(question.text, chat=True)
    result = subject.engine.generate(prompt, way.params(new_tokens))
    return Answer(
        question=question.name,
        category=question.category,
        token_ids=result.token_ids,
        stats=result.stats,
    )
