from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from la_export import pipeline
from la_export.checkpoint import find_model, load_checkpoint
from la_export.graph.stored_weights import check_weights
from la_export.graph.weights import TensorReader, write_graph
from la_export.options import BuildOptions, Precision
from la_export.pipeline import BuildReport, build
from la_export.quantize.smoothing import NO_SMOOTHING
from la_export.quantize.smoothing_file import SMOOTHING_PATH, read_smoothing
from la_export.reference import TorchReference
from la_runtime.bundle import GRAPH_PATH
from la_runtime.contract import CacheForm, Dtype
from la_runtime.errors import CheckError
from la_runtime.storage import from_stored, to_stored

Variant = tuple[str, bool]
FORM = (Precision.FP16, CacheForm.SCATTER)


@pytest.fixture(params=[("llama", True), ("qwen3", False)], ids=["tied", "untied"])
def variant(request: pytest.FixtureRequest) -> Variant:
    found: Variant = request.param
    return found


@pytest.fixture
def report(variant: Variant, report_of: Callable[..., BuildReport]) -> BuildReport:
    return report_of(variant, FORM)


@pytest.fixture
def path(report: BuildReport, tmp_path: Path) -> Path:
    """A copy of a good graph that a test may break."""
    return shutil.copytree((report.bundle / GRAPH_PATH).parent, tmp_path / "onnx") / "model.onnx"


@pytest.fixture
def check(
    report: BuildReport, variant: Variant, checkpoint_of: Callable[[Variant], Path]
) -> Callable[[Path], object]:
    precision = Precision(report.manifest.precision)
    reference = TorchReference.load(str(checkpoint_of(variant)), precision=precision)
    return lambda path: check_weights(path, reference)


def _change(path: Path, name: str, change: Callable[[NDArray[np.generic]], None]) -> None:
    """Change a weight where it lies in the file."""
    tensor = ir.load(path).graph.initializers[name].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    data = path.with_name(str(tensor.location))
    values = np.memmap(
        data, np.float16, mode="r+", offset=tensor.offset or 0, shape=tensor.shape.numpy()
    )
    change(values)
    values.flush()


def test_good_weights_pass(path: Path, check: Callable[[Path], object]) -> None:
    check(path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight.transposed",
        "model.layers.0.self_attn.q_proj.weight.transposed",
    ],
)
def test_least_change_of_one_number_is_caught(
    path: Path, check: Callable[[Path], object], name: str
) -> None:
    def nudge(values: NDArray[np.generic]) -> None:
        values[3, 5] = np.nextafter(values[3, 5], np.float16(100))

    _change(path, name, nudge)
    with pytest.raises(CheckError, match=rf"weight {name} differs .* in 1 of \d+ numbers"):
        check(path)


def test_exchanged_columns_are_caught(path: Path, check: Callable[[Path], object]) -> None:
    name = "model.layers.0.mlp.up_proj.weight.transposed"

    def exchange(values: NDArray[np.generic]) -> None:
        values[:, [0, 1]] = values[:, [1, 0]]

    _change(path, name, exchange)
    with pytest.raises(CheckError, match=rf"weight {name} differs"):
        check(path)


def test_renamed_weight_is_missing(path: Path, check: Callable[[Path], object]) -> None:
    model = ir.load(path)
    weight = model.graph.initializers["model.norm.weight"]
    weight.name = "model.other.weight"
    ir.save(model, path)
    with pytest.raises(CheckError, match=r"model\.onnx has no weight model\.norm\.weight"):
        check(path)


def test_weight_of_another_shape_is_named(path: Path, check: Callable[[Path], object]) -> None:
    model = ir.load(path)
    weight = model.graph.initializers["model.norm.weight"]
    weight.const_value = ir.tensor(np.ones(3, np.float16), name="model.norm.weight")
    weight.shape = ir.Shape([3])
    ir.save(model, path)
    with pytest.raises(CheckError, match=r"has shape \[3\], the source model's has \[64\]"):
        check(path)


def test_other_rotary_frequencies_are_caught(path: Path, check: Callable[[Path], object]) -> None:
    model = ir.load(path)
    (name,) = (name for name in model.graph.initializers if name.endswith("inv_freq"))
    frequencies = model.graph.initializers[name]
    assert frequencies.const_value is not None
    rounded = frequencies.const_value.numpy().astype(np.float16).astype(np.float32)
    frequencies.const_value = ir.tensor(rounded, name=name)
    ir.save(model, path)
    with pytest.raises(CheckError, match="inv_freq differs"):
        check(path)


INTEGERS = (Precision.INT8, Precision.INT4)
INTEGER_VALUES = "model.layers.1.mlp.down_proj.weight.transposed.values"
# Joined with what reads the same activation, and the table of a tied head.
INTEGER_SCALES = {
    Precision.INT8: (
        "model.layers.0.mlp.gate_proj.weight+model.layers.0.mlp.up_proj.weight.scales",
        "lm_head.weight.scales",
    ),
    Precision.INT4: (
        "model.layers.0.mlp.gate_proj.weight+model.layers.0.mlp.up_proj.weight.transposed.scales",
        "lm_head.weight.scales",
    ),
}


@pytest.fixture(params=INTEGERS)
def precision(request: pytest.FixtureRequest) -> Precision:
    found: Precision = request.param
    return found


@pytest.fixture
def integer_bundle(precision: Precision, report_of: Callable[..., BuildReport]) -> Path:
    bundle: Path = report_of(("llama", True), (precision, CacheForm.CONCAT)).bundle
    return bundle


@pytest.fixture
def integer_path(integer_bundle: Path, tmp_path: Path) -> Path:
    """A copy of a good graph of integers."""
    return shutil.copytree((integer_bundle / GRAPH_PATH).parent, tmp_path / "onnx") / "model.onnx"


@pytest.fixture
def check_integers(
    precision: Precision, integer_bundle: Path, checkpoint_of: Callable[[Variant], Path]
) -> Callable[[Path], object]:
    folder, smoothing = str(checkpoint_of(("llama", True))), integer_bundle / SMOOTHING_PATH
    checkpoint = load_checkpoint(find_model(folder, revision=None, allow_bin=False), context=None)
    reference = TorchReference(
        checkpoint.load_model(),
        precision=precision,
        smoothing=read_smoothing(smoothing) if smoothing.exists() else NO_SMOOTHING,
    )
    return lambda path: check_weights(path, reference)


def _flip_byte(path: Path, name: str) -> None:
    """The lowest bit of the seventh byte."""
    tensor = ir.load(path).graph.initializers[name].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    data = np.memmap(path.with_name(str(tensor.location)), np.uint8, mode="r+")
    data[(tensor.offset or 0) + 6] ^= 1
    data.flush()


def test_good_integers_pass(integer_path: Path, check_integers: Callable[[Path], object]) -> None:
    check_integers(integer_path)


def test_least_change_of_one_integer_is_caught(
    integer_path: Path, check_integers: Callable[[Path], object], precision: Precision
) -> None:
    _flip_byte(integer_path, INTEGER_VALUES)
    with pytest.raises(
        CheckError, match=rf"{INTEGER_VALUES} differs .* rounded to {precision}, in 1 of \d+ "
    ):
        check_integers(integer_path)


@pytest.mark.parametrize("place", [0, 1], ids=["joined", "tied"])
def test_other_scale_of_integers_is_caught(
    integer_path: Path, check_integers: Callable[[Path], object], precision: Precision, place: int
) -> None:
    name = INTEGER_SCALES[precision][place]
    _flip_byte(integer_path, name)
    with pytest.raises(CheckError, match=rf"{re.escape(name)} differs .* in 1 of \d+ numbers"):
        check_integers(integer_path)


def test_integers_without_their_scales_are_missing(
    integer_path: Path, check_integers: Callable[[Path], object]
) -> None:
    model = ir.load(integer_path)
    model.graph.initializers["lm_head.weight.scales"].name = "other"
    ir.save(model, integer_path)
    with pytest.raises(CheckError, match=r"no weight model\.embed_tokens\.weight\.scales"):
        check_integers(integer_path)


def test_weights_rounded_twice_give_no_bundle(
    checkpoint_of: Callable[[Variant], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of bfloat16: every score is within what float16 arithmetic is allowed."""

    class Coarse:
        def __init__(self, exact: TensorReader) -> None:
            self._exact = exact

        def read(self, parameter: str) -> NDArray[np.float32]:
            array = self._exact.read(parameter)
            if parameter.endswith("inv_freq"):
                return array
            return from_stored(to_stored(array, Dtype.BFLOAT16), Dtype.BFLOAT16)

    def write(step_graph: object, reader: TensorReader, folder: Path, **_: object) -> Path:
        return write_graph(step_graph, Coarse(reader), folder)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline, "write_graph", write)
    options = BuildOptions(
        model=str(checkpoint_of(("llama", True))),
        lookahead_lengths=(2,),
        precision=Precision.FP16,
        out=tmp_path / "out",
    )
    with pytest.raises(CheckError, match="differs from the source model's, rounded to float16"):
        build(options)
    assert not (tmp_path / "out").exists()
