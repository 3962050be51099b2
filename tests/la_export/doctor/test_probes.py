"""The real probes, as child processes."""

from __future__ import annotations

import onnx.helper
import pytest

from la_export.doctor.children import run_probe
from la_export.doctor.probes.provider import IDENTITY_MODEL

TIMEOUT_S = 120.0


def test_the_model_of_one_node_is_what_onnx_makes_of_it() -> None:
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "probe",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])],
    )
    opset = onnx.helper.make_opsetid("", 23)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10, producer_name="")

    assert model.SerializeToString() == IDENTITY_MODEL


def test_a_provider_that_runs_is_the_sessions_own() -> None:
    answer = run_probe("provider", ["CPUExecutionProvider"], timeout_s=TIMEOUT_S)

    assert answer.records == ({"providers": ["CPUExecutionProvider"]},)


def test_a_provider_that_this_build_lacks_is_not_among_those_taken() -> None:
    answer = run_probe("provider", ["CUDAExecutionProvider"], timeout_s=TIMEOUT_S)

    taken = answer.records[-1]["providers"] if answer.records else []
    assert "CUDAExecutionProvider" not in taken


_STARTS = "return None"
_BREAKS = "raise RuntimeError('CUDA is missing')"


@pytest.mark.parametrize(("start", "taken"), [(_STARTS, True), (_BREAKS, False)])
def test_cuda_is_asked_as_the_backend_asks_and_libraries_may_print(
    start: str, *, taken: bool, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ONNX Runtime that needs its libraries loaded, and prints to stdout beneath Python."""
    (tmp_path / "onnxruntime.py").write_text(
        f"""
import os
__version__, cuda_version, loaded = "1.27.0", "13", []
def get_available_providers():
    return ["CUDAExecutionProvider", "CPUExecutionProvider"]
def preload_dlls():
    loaded.append(True)
class OrtValue:
    @staticmethod
    def ortvalue_from_numpy(*_):
        {start}
class InferenceSession:
    def __init__(self, model, providers):
        os.write(1, b'{{"providers": ["a library"]}} and more\\n')
        self.providers = providers if loaded else ["CPUExecutionProvider"]
    def run(self, *_):
        return []
    def get_providers(self):
        return self.providers
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    answer = run_probe("provider", ["CUDAExecutionProvider"], timeout_s=TIMEOUT_S)

    assert answer.records == ({"providers": ["CUDAExecutionProvider"] if taken else []},)
    if not taken:
        assert "does not start its CUDA provider" in answer.last_words


def test_a_module_that_is_not_there_is_named() -> None:
    answer = run_probe("imports", ["json", "no_such_module"], timeout_s=TIMEOUT_S)

    assert [record["module"] for record in answer.records] == ["json"]
    assert "No module named 'no_such_module'" in answer.failure


def test_the_cache_folders_are_ours_and_the_hubs() -> None:
    answer = run_probe("caches", timeout_s=TIMEOUT_S)

    assert [record["name"] for record in answer.records] == [
        "cache of digests",
        "cache of downloaded models",
    ]


def test_tensorrt_for_rtx_imports_every_operator_of_our_graphs() -> None:
    pytest.importorskip("tensorrt_rtx", reason="the extra trt-rtx is not installed")

    answer = run_probe("parser", ["tensorrt_rtx"], timeout_s=TIMEOUT_S)

    assert answer.failure == ""
    assert answer.records[-1]["refused"] == []
