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
        ({"min_new_tokens": -1}, "min_new_tokens must be at least 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens must be .* at most 8, got 9"),
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"temperature": float("inf")}, "temperature must be a finite number, got inf"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": 0.0}, "top_p must be more than 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "got 1.1"),
        ({"min_p": -0.5}, "min_p must be at least 0 and at most 1, got -0.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be more than 0, got 0"),
        ({"repetition_penalty": -1}, "repetition_penalty must be more than 0, got -1"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be a finite number"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias of token 3 must be a finite number"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
        ({"stop": ("x", "")}, "a stop string is empty"),
        ({"stop": ""}, "a stop string is empty"),
        (
            {"select": "threshold", "tau": 0.5, "temperature": 0.7},
            "select 'threshold' is greedy: leave out temperature",
        ),
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
