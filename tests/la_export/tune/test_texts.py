"""Where a text goes round in circles it is cut; nowhere else."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from la_export.tune.texts import OwnText, cut_loop

PROMPT = (90, 91, 90, 91, 90, 91, 90, 91, 90, 91, 90, 91)


def text_of(answer):
    return OwnText(token_ids=(*PROMPT, *answer), answered_from=len(PROMPT))


def test_an_answer_is_cut_where_a_run_of_four_stands_for_the_third_time():
    circle = (1, 2, 3, 4, 5)
    cut = cut_loop(text_of((7, 8, *circle * 4)))
    assert cut.token_ids == (*PROMPT, 7, 8, *circle * 2)
    assert cut.answered_from == len(PROMPT)


def test_an_answer_that_says_a_thing_twice_is_left_whole():
    text = text_of((1, 2, 3, 4, 9, 1, 2, 3, 4, 8))
    assert cut_loop(text) is text


def test_circles_of_the_prompt_are_its_own():
    text = text_of((1, 2, 3))
    assert cut_loop(text) is text


@given(answer=st.lists(st.integers(0, 2), max_size=60))
def test_what_is_left_is_the_longest_beginning_without_a_third_time(answer):
    def most_often(tokens):
        runs = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        return max((runs.count(run) for run in runs), default=0)

    kept = cut_loop(text_of(answer)).token_ids[len(PROMPT) :]

    assert list(kept) == answer[: len(kept)]
    assert most_often(kept) < 3
    # The run that would be the third begins where the rest was cut off.
    ends = itertools.takewhile(lambda n: most_often(answer[:n]) < 3, range(len(answer) + 1))
    longest = max(ends)
    assert len(kept) == (len(answer) if longest == len(answer) else longest - 3)
