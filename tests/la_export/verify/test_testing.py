"""The assertion for users' own test suites, in both directions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from la_export.verify.testing import assert_lossless
from la_runtime import layout
from la_runtime.errors import UsageError
from la_runtime.sampling import SamplingParams

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
