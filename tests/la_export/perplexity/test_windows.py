from __future__ import annotations

import pytest
from pydantic import ValidationError

from la_export.perplexity.windows import Window, count_scored, cut_windows, limit_windows

TEXT = list(range(100, 123))


def test_windows_of_a_text_hold_each_token_once_and_score_all_but_the_first() -> None:
    windows = list(cut_windows(TEXT, size=8))

    assert [token for window in windows for token in window.token_ids] == TEXT
    assert [len(window.token_ids) for window in windows] == [8, 8, 7]
    assert count_scored(windows) == len(TEXT) - 3


def test_a_prefix_begins_every_window_and_does_not_count() -> None:
    windows = list(cut_windows(TEXT, size=8, prefix=[1, 2]))

    assert all(window.token_ids[:2] == (1, 2) for window in windows)
    scored = [token for window in windows for token in window.token_ids[window.scored_from :]]
    assert scored == TEXT


def test_a_last_token_that_stands_alone_is_no_window() -> None:
    assert [len(window.token_ids) for window in cut_windows(TEXT[:9], size=8)] == [8]
    assert [len(w.token_ids) for w in cut_windows(TEXT[:8], size=8, prefix=[1])] == [8, 2]


@pytest.mark.parametrize("wanted", [0, 1, 6, 7, 8, 19, 20])
def test_limited_windows_score_exactly_what_is_wanted_and_are_the_first(wanted: int) -> None:
    windows = list(cut_windows(TEXT, size=8))

    kept = limit_windows(windows, wanted)

    assert count_scored(kept) == wanted
    for window, whole in zip(kept, windows, strict=False):
        assert window.token_ids == whole.token_ids[: len(window.token_ids)]


def test_fewer_tokens_than_wanted_are_all_kept() -> None:
    windows = tuple(cut_windows(TEXT, size=8))

    assert limit_windows(windows, 1000) == windows


@pytest.mark.parametrize("fields", [{"scored_from": 3}, {"scored_from": 0}, {"token_ids": (-1, 2)}])
def test_a_window_that_scores_nothing_or_its_first_token_is_refused(fields: dict) -> None:
    with pytest.raises(ValidationError):
        Window(**{"token_ids": (1, 2, 3), "scored_from": 1, **fields})
