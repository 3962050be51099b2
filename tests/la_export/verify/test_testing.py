"""The assertion for users' own test suites, in both directions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from la_export.verify import testing
from la_export.verify.testing import assert_lossless
from la_runtime import layout
from la_runtime.backends.base import Outputs
from la_runtime.backends.ort import OrtBackend
from la_runtime.errors import UsageError
from la_runtime.sampling import SamplingParams
from tests.tiny_models import VOCAB_SIZE

PROMPTS = ["The cat sat on", "rain", "One, two"]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=3)


@pytest.mark.parametrize("sampling", [None, SAMPLED, SamplingParams(stop_token_ids=(65, 66, 67))])
def test_a_sound_bundle_passes(tiny, sampling):
    assert_lossless(
        tiny / "bundle", prompts=PROMPTS, sampling=sampling, max_new_tokens=12, threads=1
    )


@pytest.mark.parametrize("sampling", [None, SAMPLED])
def test_drafts_at_wrong_positions_fail_with_the_first_difference(tiny, monkeypatch, sampling):
    make = layout._make_rows

    def make_faulty(*args):
        rows = make(*args)
        offsets = rows.offsets.copy()
        offsets[rows.num_known : rows.num_verified] += 1
        return replace(rows, offsets=offsets)

    monkeypatch.setattr(layout, "_make_cached_rows", make_faulty)

    with pytest.raises(
        AssertionError,
        match=r"^not lossless: prompt \d, k=\d (full|root-only) with (own|given) proposals: "
        r"new token \d+ is \d+, expected \d+ \(margin .*, epsilon .*\)$",
    ):
        assert_lossless(
            tiny / "bundle", prompts=PROMPTS, sampling=sampling, max_new_tokens=12, threads=1
        )


@pytest.mark.parametrize(
    "options", [{"k": 0}, {"k": ()}, {"prompts": []}, {"layouts": []}], ids=str
)
def test_a_comparison_of_nothing_is_refused(tiny, options):
    with pytest.raises(UsageError, match="nothing to compare: give at least one prompt"):
        assert_lossless(tiny / "bundle", threads=1, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": "The cat"}, "prompts is one text, whose characters would be prompts"),
        ({"layouts": ["bogus"]}, "each of layouts must be one of 'root-only', 'full', got 'bogus'"),
    ],
)
def test_an_argument_of_another_kind_is_refused(tiny, options, message):
    with pytest.raises(UsageError, match=message):
        assert_lossless(tiny / "bundle", threads=1, **options)


def test_a_near_tie_with_an_end_token_is_excused_with_what_follows_from_it(tiny, monkeypatch):
    """Wide passes prefer the end token by a hair, narrow ones another."""
    forward, prompt, end_token, other = OrtBackend.forward, tuple(range(5, 15)), 2, 50

    def forward_faulty(self, state, inputs):
        if not inputs.outputs:
            return forward(self, state, inputs)
        scores = forward(self, state, replace(inputs, outputs=inputs.outputs | Outputs.LOGITS))
        logits = scores.logits()
        is_wide = inputs.input_ids.shape[1] > 1 and (state.lengths > 0).all()
        for row, place in enumerate(inputs.logits_rows[0]):
            if inputs.position_ids[0, place] == 12 and inputs.input_ids[0, place] < VOCAB_SIZE:
                logits[0, row, other] = 9.0
                logits[0, row, end_token] = 9.0 + (1e-6 if is_wide else -1e-6)
        if Outputs.TOP in inputs.outputs:
            ids, top = scores.top()
            ids[:] = np.argsort(-logits, axis=-1, kind="stable")[..., : ids.shape[-1]]
            top[:] = np.take_along_axis(logits, ids, axis=-1)
        return scores

    monkeypatch.setattr(OrtBackend, "forward", forward_faulty)
    # Of a backend whose passes do differ by their width; this one's do not.
    monkeypatch.setattr(testing, "measure_epsilon", lambda *_, **__: 1e-4)

    assert_lossless(tiny / "bundle", prompts=[prompt], k=4, layouts=["root-only"], threads=1)


def test_a_lossy_selection_is_refused(tiny):
    with pytest.raises(UsageError, match="select 'threshold' is lossy"):
        assert_lossless(tiny / "bundle", sampling=SamplingParams(select="threshold", tau=0.5))


def test_it_needs_no_torch(tiny):
    program = (
        "import sys\n"
        "from la_export.verify.testing import assert_lossless\n"
        f"assert_lossless({str(tiny / 'bundle')!r}, prompts=['rain'], k=2, max_new_tokens=2)\n"
        "print(sorted({'torch', 'transformers', 'onnx'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
