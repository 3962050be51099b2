"""A whole tuning of a tiny model: it learns, it is resumable, and refuses what it must."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from la_export.checkpoint import find_model, load_checkpoint
from la_export.lookahead import read_lookaheads
from la_export.tune.options import NO_RANK, TuneOptions, parse_adapter
from la_export.tune.texts import TextFile
from la_export.tune.tuning import STATE_SUFFIX, prepare_model, tune
from la_runtime.errors import LookaheadError, UnsupportedModelError, UsageError
from la_runtime.layout import GroupMask
from tests.tiny_models import make_tiny_checkpoint

# The bound of what tuning must bring, and the interval that says it is no chance.
LEAST_GAIN = 0.05
STANDARD_ERRORS = 1.96


class Listener:
    """Keeps what it is told; raises at a step if it is asked to."""

    def __init__(self, break_off_at=None):
        self.num_texts = []
        self.steps = []
        self.looks = []
        self._break_off_at = break_off_at

    def wrote(self, num_texts, seconds):
        self.num_texts.append(num_texts)

    def took_step(self, step, seconds, loss):
        self.steps.append(step)
        if step == self._break_off_at:
            raise KeyboardInterrupt

    def evaluated(self, evaluation):
        self.looks.append(evaluation)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint", seed=3)


def small(checkpoint, out, **changes):
    options = TuneOptions(
        model=str(checkpoint), k=3, rank=2, minutes=3, steps=5, texts=24, text_tokens=48, out=out
    )
    return dataclasses.replace(options, **changes)


def test_a_tiny_model_learns_to_propose_what_it_writes(checkpoint, tmp_path):
    options = TuneOptions(
        model=str(checkpoint), k=2, rank=8, minutes=3, steps=120, texts=512, text_tokens=96,
        out=tmp_path / "tuned.safetensors",
    )  # fmt: skip

    report = tune(options, Listener())

    held_out = report.held_out
    assert held_out.num_anchors >= 2000
    assert held_out.gain >= LEAST_GAIN
    assert held_out.gain - STANDARD_ERRORS * held_out.gain_error > 0
    assert held_out.gain == pytest.approx(held_out.tuned[0] - held_out.untuned[0], abs=1e-9)
    weights = read_lookaheads(report.path)
    assert weights.vectors.shape == (2, 64)
    assert weights.adapter.num_weights == report.num_adapter_weights > 0
    for _, array in weights.adapter.parameters():
        assert np.array_equal(array, array.astype(np.float16).astype(np.float32))


def test_vectors_alone_have_no_adapter(checkpoint, tmp_path):
    report = tune(small(checkpoint, tmp_path / "t.safetensors", rank=NO_RANK), Listener())

    assert report.num_adapter_weights == 0
    assert read_lookaheads(report.path).adapter.pairs == ()
    assert report.num_vector_weights == 3 * 64


def test_a_causal_group_mask_is_what_the_file_says(checkpoint, tmp_path):
    options = small(checkpoint, tmp_path / "t.safetensors", group_mask=GroupMask.CAUSAL)

    assert read_lookaheads(tune(options, Listener()).path).group_mask is GroupMask.CAUSAL


def test_a_run_that_was_broken_off_writes_nothing_and_goes_on(checkpoint, tmp_path):
    out = tmp_path / "t.safetensors"
    with pytest.raises(KeyboardInterrupt):
        tune(small(checkpoint, out), Listener(break_off_at=3))
    assert not out.exists()

    listener = Listener()
    tune(small(checkpoint, out), listener)

    assert listener.steps == [4, 5]
    assert listener.num_texts == [listener.num_texts[0]]  # none was written again
    assert out.exists()
    assert list(tmp_path.glob("*.partial")) == []


def test_equal_runs_give_equal_files(checkpoint, tmp_path):
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path in (first, second):
        tune(small(checkpoint, path), Listener())

    one, other = read_lookaheads(first), read_lookaheads(second)
    assert np.array_equal(one.vectors, other.vectors)
    for (_, array), (_, truth) in zip(
        one.adapter.parameters(), other.adapter.parameters(), strict=True
    ):
        assert np.array_equal(array, truth)


def test_a_folder_of_a_tuning_with_other_options_is_refused(checkpoint, tmp_path):
    out = tmp_path / "t.safetensors"
    tune(small(checkpoint, out), Listener())

    with pytest.raises(UsageError, match=r"holds a tuning of another model or with other options"):
        tune(small(checkpoint, out, k=2), Listener())


@pytest.mark.parametrize("name", ["texts.json", "options.json", "training.safetensors"])
def test_a_damaged_folder_is_refused(checkpoint, tmp_path, name):
    out = tmp_path / "t.safetensors"
    tune(small(checkpoint, out), Listener())
    (out.with_name(out.name + STATE_SUFFIX) / name).write_text("{}")

    with pytest.raises(LookaheadError, match=r"remove its folder|remove it to begin anew"):
        tune(small(checkpoint, out), Listener())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 0}, "--k 0 is out of range; expected 1 to 16"),
        ({"k": 17}, "--k 17 is out of range"),
        ({"rank": 257}, "--adapter lora 257 is out of range"),
        ({"minutes": 0}, "--minutes 0 is out of range"),
        ({"minutes": float("nan")}, "--minutes nan is out of range"),
        ({"steps": 0}, "--steps 0 is out of range; expected at least 1"),
        ({"texts": 1}, "--texts 1 is out of range"),
        ({"text_tokens": 3}, "--text-tokens 3 is out of range"),
        ({"threads": 0}, "--threads 0 is out of range"),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        TuneOptions(**({"model": "m"} | changes))


def test_only_weights_are_rounded(checkpoint):
    """With rounded rotary frequencies it would be another model."""
    loaded = load_checkpoint(
        find_model(str(checkpoint), revision=None, allow_bin=False), context=None
    )
    expected = dict(loaded.load_model().named_buffers())

    found = dict(prepare_model(loaded).named_buffers())

    assert found.keys() == expected.keys()
    assert found
    for name, buffer in found.items():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer.cpu(), expected[name])


def test_what_is_held_out_stays_so_when_texts_are_added(checkpoint, tmp_path):
    out = tmp_path / "t.safetensors"
    path = out.with_name(out.name + STATE_SUFFIX) / "texts.json"
    tune(small(checkpoint, out), Listener())
    first = TextFile.model_validate_json(path.read_bytes())

    tune(small(checkpoint, out, texts=96, steps=6), Listener())

    second = TextFile.model_validate_json(path.read_bytes())
    assert second.held_out == first.held_out
    assert second.training[: len(first.training)] == first.training
    assert len(second.training) > len(first.training)
    assert not set(second.held_out) & set(second.training)


def test_a_folder_is_no_file_to_write(checkpoint, tmp_path):
    with pytest.raises(UsageError, match=r"is a folder; give a file"):
        tune(small(checkpoint, tmp_path), Listener())
    assert list(tmp_path.iterdir()) == []


def test_a_sliding_window_wider_than_the_texts_does_not_matter(tmp_path):
    windowed = make_tiny_checkpoint(tmp_path / "windowed", "mistral", sliding_window=64)

    report = tune(small(windowed, tmp_path / "t.safetensors"), Listener())

    assert report.path.exists()


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere"])
def test_models_whose_scores_are_no_plain_product_are_refused(family, tmp_path):
    folder = make_tiny_checkpoint(tmp_path / "model", family)

    with pytest.raises(UnsupportedModelError, match="which tuning does not do yet"):
        tune(small(folder, tmp_path / "t.safetensors", text_tokens=16), Listener())


def test_texts_wider_than_a_sliding_window_are_refused(tmp_path):
    windowed = make_tiny_checkpoint(tmp_path / "windowed", "mistral", sliding_window=32)

    with pytest.raises(UnsupportedModelError, match=r"see 32 tokens.*--text-tokens 32"):
        tune(small(windowed, tmp_path / "t.safetensors"), Listener())


def test_an_adapter_is_read_from_its_name():
    assert parse_adapter("none") == NO_RANK
    assert parse_adapter("lora:16") == 16


@pytest.mark.parametrize("text", ["", "lora", "lora:", "lora:0", "lora:-1", "prefix:8", "LORA:4"])
def test_other_adapters_are_refused(text):
    with pytest.raises(UsageError, match="expected none, or lora:R"):
        parse_adapter(text)
