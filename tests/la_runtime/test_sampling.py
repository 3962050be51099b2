"""Parameters of a request, and what is refused."""

from __future__ import annotations

import pytest

from la_runtime.errors import ExitCode, UsageError
from la_runtime.layout import Layout
from la_runtime.sampling import SamplingParams, Select


def test_names_of_rules_and_layouts_are_accepted_as_text():
    params = SamplingParams(select="exact", layout="full")

    assert params.select is Select.EXACT
    assert params.layout is Layout.FULL


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"k": -1}, "k must be 0 or more, got -1"),
        ({"select": "best"}, "select must be one of 'exact', 'threshold', got 'best'"),
        ({"layout": "wide"}, "layout must be one of 'root-only', 'full', got 'wide'"),
        ({"tau": 0.5}, "tau is for select 'threshold' only"),
        ({"select": "threshold"}, "needs tau"),
        ({"select": "threshold", "tau": 1.5}, r"tau must be a probability in \[0, 1\], got 1.5"),
        ({"select": "threshold", "tau": -0.1}, "got -0.1"),
        ({"select": "threshold", "tau": float("nan")}, "got nan"),
        ({"select": "threshold", "tau": 0.5, "layout": "full"}, "layout 'full' is for select"),
    ],
)
def test_impossible_parameters_are_refused(keywords, message):
    with pytest.raises(UsageError, match=message) as caught:
        SamplingParams(**keywords)

    assert caught.value.exit_code == ExitCode.USAGE
