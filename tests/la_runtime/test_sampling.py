"""Parameters of a request, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from la_runtime.errors import ExitCode, UsageError
from la_runtime.layout import Layout
from la_runtime.sampling import SamplingParams, Select
from la_runtime.source_names import SourceName


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
        ({"repetition_penalty": 0}, "repetition_penalty must be at least 1e-06 .*, got 0"),
        ({"repetition_penalty": -1}, "repetition_penalty must be at least 1e-06 .*, got -1"),
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
        ({"frequency_penalty": float("-inf")}, "frequency_penalty must be a finite number"),
        ({"logprobs": 1001}, "logprobs must be at least 0 and at most 1000, got 1001"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": 2}, "n = 2 greedy samples would be the same text; give a temperature above 0"),
        (
            {"select": "threshold", "tau": 0.5, "strict": True},
            "strict is for select 'exact' only: 'threshold' verifies nothing",
        ),
    ],
)
def test_impossible_parameters_are_refused(keywords, message):
    with pytest.raises(UsageError, match=message) as caught:
        SamplingParams(**keywords)

    assert caught.value.exit_code == ExitCode.USAGE


INTS = ("max_new_tokens", "min_new_tokens", "top_k", "seed", "k", "logprobs")
FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "tau",
)


@pytest.mark.parametrize("field", INTS)
@pytest.mark.parametrize(
    ("value", "got"),
    [
        (1.5, "1.5 (float)"),
        (1.0, "1.0 (float)"),
        (True, "True (bool)"),
        ("5", "'5' (str)"),
        (np.float32(1), "(float32)"),
        (np.bool_(True), "(bool)"),
        ([1], "[1] (list)"),
    ],
)
def test_a_whole_number_must_be_an_int(field, value, got):
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{field: value})

    assert str(caught.value).startswith(f"{field} must be an integer, got ")
    assert got in str(caught.value)


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize(
    ("value", "got"),
    [("0.5", "'0.5' (str)"), (True, "True (bool)"), (1j, "1j (complex)"), (10**400, "(int)")],
)
def test_a_number_must_be_an_int_or_a_float(field, value, got):
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{field: value})

    assert str(caught.value).startswith(f"{field} must be a number")
    assert got in str(caught.value)


@pytest.mark.parametrize("field", sorted({*INTS, *FLOATS} - {"k", "logprobs", "tau"}))
def test_a_number_that_has_a_default_cannot_be_none(field):
    with pytest.raises(UsageError, match=rf"{field} must be .*, got None \(NoneType\)"):
        SamplingParams(**{field: None})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"stop": 5}, r"stop must be a sequence of texts, or one text, got 5 \(int\)"),
        ({"stop": None}, "stop must be a sequence of texts, or one text, got None"),
        ({"stop": ("a", 5)}, r"each text of stop must be a str, got 5 \(int\)"),
        ({"stop": b"end"}, "each text of stop must be a str, got 101"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a sequence of token ids, got 5"),
        ({"stop_token_ids": "12"}, r"an id in stop_token_ids must be an integer, got '1' \(str\)"),
        ({"stop_token_ids": (1, 2.0)}, "an id in stop_token_ids must be an integer, got 2.0"),
        ({"logits_processors": print}, "logits_processors must be a sequence of functions"),
        ({"logits_processors": [5]}, "one of logits_processors must be a function, got 5"),
        ({"logit_bias": [(1, 2.0)]}, "logit_bias must be a mapping from token id to number"),
        ({"logit_bias": {"1": 2.0}}, "a token id in logit_bias must be an integer, got '1'"),
        ({"logit_bias": {1: "2"}}, "logit_bias of token 1 must be a number, got '2'"),
        ({"ignore_eos": "no"}, r"ignore_eos must be True or False, got 'no' \(str\)"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ],
)
def test_values_of_another_type_are_refused(keywords, message):
    with pytest.raises(UsageError, match=message):
        SamplingParams(**keywords)


def test_numpy_scalars_become_python_numbers():
    given = SamplingParams(
        max_new_tokens=np.int64(5),
        k=np.uint8(2),
        seed=np.int32(7),
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        frequency_penalty=np.int64(1),
        logit_bias={np.int64(3): np.float32(0.5)},
        stop_token_ids=np.array([1, 2]),
        ignore_eos=np.bool_(True),
    )

    assert given == SamplingParams(
        max_new_tokens=5,
        k=2,
        seed=7,
        temperature=0.5,
        top_p=0.25,
        frequency_penalty=1.0,
        logit_bias={3: 0.5},
        stop_token_ids=(1, 2),
        ignore_eos=True,
    )
    values = [getattr(given, field.name) for field in dataclasses.fields(given)]
    numbers = [*values, *given.logit_bias, *given.logit_bias.values(), *given.stop_token_ids]
    assert not any(isinstance(number, np.generic) for number in numbers)


def test_stop_texts_may_come_as_a_list():
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_a_huge_whole_number_is_no_error():
    assert SamplingParams(max_new_tokens=10**400, seed=-(10**400)).max_new_tokens == 10**400


def test_defaults_are_plain_greedy_decoding_without_a_filter():
    params = SamplingParams()

    assert {field.name: getattr(params, field.name) for field in dataclasses.fields(params)} == {
        "max_new_tokens": 256,
        "min_new_tokens": 0,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "seed": 0,
        "n": 1,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "logprobs": None,
        "logits_processors": (),
        "k": None,
        "select": Select.EXACT,
        "tau": None,
        "layout": None,
        "sources": None,
        "drafts": None,
        "strict": False,
    }
    assert params.is_plain_greedy


@pytest.mark.parametrize(
    "keywords",
    [
        {"max_new_tokens": 1},
        {"min_new_tokens": 8, "max_new_tokens": 8},
        {"top_p": 1},
        {"min_p": 1},
        {"logprobs": 0},
        {"logprobs": 1000},
        {"k": 0},
        {"n": 1, "temperature": 0},
        {"n": 2, "temperature": 0.1},
        {"presence_penalty": -2.0, "frequency_penalty": -2.0},
        {"select": "threshold", "tau": 0.0},
        {"select": "threshold", "tau": 0.5},
        {"select": "threshold", "tau": 1.0},
    ],
)
def test_values_at_the_edge_of_their_range_are_accepted(keywords):
    params = SamplingParams(**keywords)

    assert {name: getattr(params, name) for name in keywords} == keywords


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.99}, True),
        ({"min_p": 0.01}, True),
    ],
)
def test_a_filter_is_one_that_may_cut_a_token(keywords, expected):
    assert SamplingParams(**keywords).has_filters == expected


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"temperature": 0.5, "top_k": 3, "seed": 9, "repetition_penalty": 1.0}, False),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"logit_bias": {0: 0.0}}, True),
        ({"logits_processors": (print,)}, True),
        ({"min_new_tokens": 1}, True),
    ],
)
def test_an_adjustment_is_what_changes_scores(keywords, expected):
    params = SamplingParams(**keywords)

    assert params.has_adjustments == expected
    assert not (expected and params.is_plain_greedy)


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [({}, True), ({"temperature": 0.1}, False), ({"logprobs": 0}, False), ({"seed": 3}, True)],
)
def test_plain_greedy_reads_nothing_but_the_best_score(keywords, expected):
    assert SamplingParams(**keywords).is_plain_greedy == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1e-46}, "temperature must be 0 or at least 1e-30, got 1e-46"),
        ({"temperature": 1e39}, r"temperature must be at most 1e\+30, got 1e\+39"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty must be at least 1e-06 and at most"),
        ({"presence_penalty": -1e300}, "presence_penalty must be at least -1000000.0 and at most"),
        ({"frequency_penalty": 1e7}, "frequency_penalty must be at least -1000000.0 and at most"),
        ({"logit_bias": {3: 1e300}}, "logit_bias of token 3 must be at least -1000000000.0"),
        ({"top_p": -0.5}, "top_p must be more than 0, got -0.5"),
        ({"strict": 1}, r"strict must be True or False, got 1 \(int\)"),
        ({"strict": True, "select": "threshold", "tau": 0.5}, "strict is for select 'exact' only"),
    ],
)
def test_what_float32_cannot_hold_and_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        SamplingParams(**options)


def test_parameters_can_be_copied_sent_and_shown():
    params = SamplingParams(logit_bias={3: 1.0}, temperature=0.5, stop=("a", "b"), n=2)

    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert dataclasses.asdict(params)["logit_bias"] == {3: 1.0}


def test_the_extremes_themselves_are_accepted():
    for temperature in (1e-30, 1e30):
        assert SamplingParams(temperature=temperature).temperature == temperature
    SamplingParams(repetition_penalty=1e6, presence_penalty=-1e6, logit_bias={0: -1e9})


def test_sources_come_by_name_once_and_in_order():
    params = SamplingParams(sources=["recycled", SourceName.LOOKAHEAD, "recycled"], drafts=3)

    assert params.sources == (SourceName.LOOKAHEAD, SourceName.RECYCLED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": ["prompt"]}, "sources must be among 'lookahead', 'suffix', 'recycled', got"),
        ({"sources": "suffix"}, "sources must be a sequence of names among"),
        ({"sources": 3}, "sources must be a sequence of names among"),
        ({"sources": []}, "sources names none; leave it out"),
        ({"drafts": 4}, "drafts is for requests that name sources, got drafts 4 without"),
        ({"sources": ["suffix"], "drafts": 0}, "drafts must be at least 1"),
        ({"sources": ["suffix"], "drafts": 1000}, "drafts must be at least 1 and at most 256"),
        ({"sources": ["suffix"], "drafts": 1.5}, "drafts must be an integer"),
        (
            {"sources": ["suffix"], "select": "threshold", "tau": 0.5},
            "sources is for select 'exact' only",
        ),
    ],
)
def test_sources_that_cannot_be_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        SamplingParams(**options)
