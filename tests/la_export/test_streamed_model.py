"""A model that holds no weights says what it says when it holds them all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from la_export.checkpoint import checkpoint as checkpoint_module
from la_export.checkpoint import find_model, load_checkpoint
from la_export.graph import sliced_session
from la_export.graph.stored_integers import StoredIntegers
from la_export.options import BuildOptions, Precision
from la_export.pipeline import build
from la_export.quantize import calibration
from la_export.quantize.calibration import calibrate
from la_export.quantize.smoothing import NO_SMOOTHING
from la_export.quantize.smoothing_file import SMOOTHING_PATH, read_smoothing
from la_export.reference import TorchReference
from la_runtime.bundle import GRAPH_PATH
from tests.tiny_models import VOCAB_SIZE, make_tiny_checkpoint

CLOSE = 2e-5
SEQUENCES = [
    ([5, 17, 90, 33], range(4)),
    ([8, VOCAB_SIZE, 9], [0, 3, 4]),
    ([250], range(1)),
]


def load(folder: Path):
    return load_checkpoint(find_model(str(folder), revision=None, allow_bin=False), context=None)


def make_both(checkpoint, precision, smoothing=NO_SMOOTHING):
    """The model in memory, and the one that reads its weights when it needs them."""
    options = {"precision": precision, "smoothing": smoothing}
    return (
        TorchReference(checkpoint.load_model(), **options),
        TorchReference(checkpoint.make_skeleton(), read=checkpoint.read, **options),
    )


def check_equal(held: TorchReference, streamed: TorchReference, hidden_size: int) -> None:
    vectors = np.random.default_rng(0).normal(size=(2, hidden_size)).astype(np.float32)
    expected = held.run_many(SEQUENCES, vectors)
    found = streamed.run_many(SEQUENCES, vectors)
    for one, other in zip(found, expected, strict=True):
        scale = float(np.ptp(other.logits))
        np.testing.assert_allclose(one.logits, other.logits, atol=CLOSE * scale)
        np.testing.assert_allclose(
            one.key_values, other.key_values, atol=CLOSE * float(np.ptp(other.key_values))
        )


@pytest.mark.parametrize("precision", [p for p in Precision if p is not Precision.INT8])
@pytest.mark.parametrize("tied", [False, True])
def test_a_streamed_model_says_the_same(precision: Precision, tied: bool, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model", "qwen2", tie_word_embeddings=tied)
    checkpoint = load(folder)

    check_equal(*make_both(checkpoint, precision), checkpoint.config.hidden_size)


@pytest.mark.parametrize("tied", [False, True])
def test_so_does_one_of_integers_that_is_turned_and_smoothed(tied: bool, tmp_path: Path) -> None:
    """Without rounding activations: that could fall the other way after sums in another order."""
    folder = make_tiny_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    checkpoint = load(folder)
    held, streamed = make_both(checkpoint, Precision.INT8, calibrate(checkpoint.load_model()))

    with held.float_activations(), streamed.float_activations():
        check_equal(held, streamed, checkpoint.config.hidden_size)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox", "qwen3_moe", "granite"])
def test_so_do_families_that_scale_or_name_their_weights_otherwise(
    family: str, tmp_path: Path
) -> None:
    checkpoint = load(make_tiny_checkpoint(tmp_path / "model", family))

    check_equal(*make_both(checkpoint, Precision.FP32), checkpoint.config.hidden_size)


def test_behind_a_pass_no_weight_is_held(tmp_path: Path) -> None:
    checkpoint = load(make_tiny_checkpoint(tmp_path / "model"))
    skeleton = checkpoint.make_skeleton()
    largest = []

    def count(module, _):
        held = [p for p in skeleton.parameters() if p.device.type != "meta"]
        largest.append(sum(p.numel() for p in held))

    for layer in skeleton.get_decoder().layers:
        layer.self_attn.register_forward_pre_hook(count)
    reference = TorchReference(skeleton, read=checkpoint.read)

    reference.run([1, 2, 3])

    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    of_a_layer = sum(p.numel() for p in skeleton.get_decoder().layers[0].parameters())
    assert largest == [of_a_layer] * 2


def test_weights_are_the_same_one_at_a_time(tmp_path: Path) -> None:
    checkpoint = load(make_tiny_checkpoint(tmp_path / "model", tie_word_embeddings=True))
    held, streamed = make_both(checkpoint, Precision.INT4)

    expected, found = dict(held.weights()), dict(streamed.weights())
    assert found.keys() == expected.keys()
    for names, read in found.items():
        np.testing.assert_array_equal(read(), expected[names]())
    expected, found = dict(held.quantized_weights()), dict(streamed.quantized_weights())
    assert set(map(frozenset, found)) == set(map(frozenset, expected))
    by_name = {name: weight for names, weight in expected.items() for name in names}
    for names, quantize in found.items():
        np.testing.assert_array_equal(quantize().values, by_name[names[0]]().values)
        np.testing.assert_array_equal(quantize().scales, by_name[names[0]]().scales)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
@pytest.mark.parametrize("tied", [False, True])
def test_integers_can_be_had_from_a_graph_that_has_passed(
    precision: Precision, tied: bool, tmp_path: Path
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    report = build(
        BuildOptions(
            model=str(folder), lookahead_lengths=(2,), precision=precision, out=tmp_path / "bundle"
        )
    )
    checkpoint = load(folder)
    smoothing = NO_SMOOTHING
    if precision is Precision.INT8:
        smoothing = read_smoothing(report.bundle / SMOOTHING_PATH)
    _, streamed = make_both(checkpoint, precision, smoothing)
    stored = StoredIntegers(report.bundle / GRAPH_PATH, checkpoint.shapes())
    found = {names: quantize() for names, quantize in streamed.quantized_weights()}
    assert found

    streamed.take_integers(stored.read)

    for names, quantize in streamed.quantized_weights():
        assert any(stored.read(name) is not None for name in names)
        assert type(quantize()) is type(found[names])
        np.testing.assert_array_equal(quantize().values, found[names].values)
        np.testing.assert_array_equal(quantize().scales, found[names].scales)


def test_the_same_passes_are_computed_once(tmp_path: Path) -> None:
    checkpoint = load(make_tiny_checkpoint(tmp_path / "model"))
    read = list[str]()

    def count(name: str):
        read.append(name)
        return checkpoint.read(name)

    streamed = TorchReference(checkpoint.make_skeleton(), read=count, precision=Precision.INT8)
    first = streamed.run_many(SEQUENCES[:1])
    once = len(read)
    assert streamed.run_many(SEQUENCES[:1]) is first
    assert len(read) == once
    with streamed.float_activations():
        other = streamed.run_many(SEQUENCES[:1])
    assert len(read) > once
    assert not np.array_equal(other[0].logits, first[0].logits)
    assert not np.array_equal(streamed.run_many(SEQUENCES[2:])[0].logits, first[0].logits)


@pytest.mark.parametrize("precision", [p for p in Precision if p is not Precision.BF16])
def test_a_large_model_is_built_to_the_same_bytes(
    precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only how it is checked differs; every check passes either way."""
    folder = make_tiny_checkpoint(tmp_path / "model", seed=4)

    def build_into(name: str) -> Path:
        return build(
            BuildOptions(
                model=str(folder),
                lookahead_lengths=(2,),
                precision=precision,
                smoothing=False,
                out=tmp_path / name,
            )
        )

    small = build_into("small")
    monkeypatch.setattr(checkpoint_module, "LARGEST_HELD_BYTES", 0)
    monkeypatch.setattr(sliced_session, "_WHOLE_BYTES", 0)
    large = build_into("large")

    for suffix in ("", ".data"):
        one, other = (report.bundle / (GRAPH_PATH + suffix) for report in (small, large))
        assert one.read_bytes() == other.read_bytes()
    assert [c.name for c in large.manifest.checks] == [c.name for c in small.manifest.checks]


def test_a_large_model_is_smoothed_without_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model", seed=4)
    monkeypatch.setattr(checkpoint_module, "LARGEST_HELD_BYTES", 0)
    monkeypatch.setattr(sliced_session, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(calibration, "_write", None)

    report = build(
        BuildOptions(
            model=str(folder),
            lookahead_lengths=(2,),
            precision=Precision.INT8,
            out=tmp_path / "bundle",
        )
    )

    assert {check.name for check in report.manifest.checks} >= {
        "integer_products",
        "float_activations.logits",
        "ort-cpu.float_activations.logits",
    }
