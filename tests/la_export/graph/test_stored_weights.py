from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from la_export import pipeline
from la_export.checkpoint import Checkpoint
from la_export.graph.stored_weights import check_weights
from la_export.graph.weights import TensorReader, write_graph
from la_export.options import BuildOptions, Precision
from la_export.pipeline import BuildReport, build
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
    contract = report.manifest.contract
    reference = TorchReference.load(str(checkpoint_of(variant)), weights=contract.compute_dtype)
    return lambda path: check_weights(path, contract, reference)


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


def test_weights_rounded_twice_give_no_bundle(
    checkpoint_of: Callable[[Variant], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of bfloat16: every score is within what float16 arithmetic is allowed."""

    class Coarse:
        def __init__(self, checkpoint: Checkpoint) -> None:
            self._checkpoint = checkpoint

        def read(self, parameter: str) -> NDArray[np.float32]:
            array = self._checkpoint.read(parameter)
            if parameter.endswith("inv_freq"):
                return array
            return from_stored(to_stored(array, Dtype.BFLOAT16), Dtype.BFLOAT16)

    def write(step_graph: object, reader: TensorReader, folder: Path) -> Path:
        assert isinstance(reader, Checkpoint)
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
