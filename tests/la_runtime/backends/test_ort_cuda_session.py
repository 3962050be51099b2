"""How the CUDA provider is asked for, and what is said when it is not there.

The library is a stand-in; the texts it says are those of onnxruntime-gpu 1.31.1 on a machine
without CUDA.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from la_runtime.backends.ort_cuda_session import check_cuda_provider, open_cuda_session
from la_runtime.errors import BundleError, ExitCode, HostError

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
NOT_STARTED = (
    "provider_bridge_ort.cc:2465 onnxruntime::ProviderInfo_CUDA& "
    "onnxruntime::GetProviderInfo_CUDA() CUDA Provider not available, can't get interface for it\n"
)
NOT_LOADED = "libcublasLt.so.13: cannot open shared object file: No such file or directory"
PRINTED = "Failed to load libcublasLt.so.13: " + NOT_LOADED
FALLBACK_REFUSED = (
    "[ONNXRuntimeError] : 1 : FAIL : This session contains graph nodes that are assigned to the "
    "default CPU EP, but fallback to CPU EP has been explicitly disabled by the user."
)


class Options:
    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def add_session_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value


class Library:
    """Stands in for the module `onnxruntime`.

    Args:
        available: what it says it was built with.
        starts: whether the CUDA provider starts.
        shapes_on_cpu: whether it refuses the graph when no node may be on the CPU.
        loads: whether it loads the graph at all.
    """

    __version__ = "1.31.1"
    __file__ = "/site-packages/onnxruntime/__init__.py"
    cuda_version = "13.0"
    SessionOptions = Options

    def __init__(self, *, available=(CUDA, CPU), starts=True, shapes_on_cpu=False, loads=True):
        self._available = available
        self._starts = starts
        self._shapes_on_cpu = shapes_on_cpu
        self._loads = loads
        self.opened: list[SimpleNamespace] = []
        self.OrtValue = SimpleNamespace(ortvalue_from_numpy=self._allocate)

    def get_available_providers(self):
        return list(self._available)

    def preload_dlls(self):
        if not self._starts:
            print(PRINTED)  # noqa: T201  # as it does

    def _allocate(self, array, device_type, device_id):
        assert (device_type, device_id) == ("cuda", 0)
        if not self._starts:
            raise RuntimeError(NOT_STARTED)

    def InferenceSession(self, path, options, *, providers, enable_fallback):  # noqa: N802
        self.opened.append(
            SimpleNamespace(options=options, providers=providers, enable_fallback=enable_fallback)
        )
        if not self._loads:
            raise RuntimeError("Protobuf parsing failed.")
        is_strict = "session.disable_cpu_ep_fallback" in options.entries
        if is_strict and (self._shapes_on_cpu or not self._starts):
            raise RuntimeError(FALLBACK_REFUSED)
        providers = [CUDA, CPU] if self._starts else [CPU]
        return SimpleNamespace(get_providers=lambda: providers)


def open_session(library: Library):
    return open_cuda_session(
        library, Path("model.onnx"), threads=2, stream=77, profile_prefix=Path("/tmp/pass")
    )


def refuse_library(name: str) -> None:
    assert name == "/site-packages/onnxruntime/capi/libonnxruntime_providers_cuda.so"
    raise OSError(NOT_LOADED)


def test_a_library_built_for_cpus_is_named_with_the_pip_line():
    with pytest.raises(HostError) as found:
        check_cuda_provider(Library(available=[CPU]))

    assert str(found.value) == (
        "backend 'ort-cuda' needs onnxruntime-gpu, and the installed onnxruntime 1.31.1 is built "
        "for CPUs: pip uninstall onnxruntime, then pip install 'lookahead-attention[gpu]'"
    )
    assert found.value.exit_code == ExitCode.ENVIRONMENT


def test_a_provider_that_does_not_start_is_refused_with_the_loader_s_reason(capsys):
    with pytest.raises(HostError) as found:
        check_cuda_provider(Library(starts=False), load_library=refuse_library)

    assert str(found.value) == (
        f"ONNX Runtime 1.31.1 does not start its CUDA provider: {NOT_LOADED}; it needs CUDA 13.0 "
        "and cuDNN 9: pip install 'onnxruntime-gpu[cuda,cudnn]'"
    )
    assert capsys.readouterr().out == "", "what ONNX Runtime prints is not ours to print"


def test_where_the_libraries_load_onnx_runtime_s_own_reason_is_given():
    with pytest.raises(HostError, match="CUDA Provider not available, can't get interface for it;"):
        check_cuda_provider(Library(starts=False), load_library=lambda _: None)


def test_a_provider_that_starts_is_accepted():
    check_cuda_provider(Library(), load_library=refuse_library)


def test_the_fall_back_is_switched_off_and_numbers_are_what_they_say():
    library = Library()

    open_session(library)

    (asked,) = library.opened
    assert asked.options.entries == {"session.disable_cpu_ep_fallback": "1"}
    assert asked.options.enable_profiling
    assert asked.options.intra_op_num_threads == 2
    assert asked.enable_fallback == 0
    ((name, settings),) = asked.providers
    assert name == CUDA, "with the CPU's beside it ONNX Runtime takes the option for a conflict"
    assert settings == {"device_id": "0", "user_compute_stream": "77", "use_tf32": "0"}


def test_shape_arithmetic_on_the_cpu_is_allowed_only_when_the_strict_session_is_refused():
    library = Library(shapes_on_cpu=True)

    session = open_session(library)

    assert session.get_providers()[0] == CUDA
    strict, lenient = library.opened
    assert "session.disable_cpu_ep_fallback" in strict.options.entries
    assert lenient.options.entries == {}
    assert lenient.options.enable_profiling, "so that placement can be checked"


def test_a_session_without_the_gpu_is_refused_although_it_would_run():
    with pytest.raises(HostError, match=rf"would run model.onnx on {CPU} instead of the GPU"):
        open_session(Library(starts=False))


def test_a_graph_that_does_not_load_is_tried_once():
    library = Library(loads=False)

    with pytest.raises(BundleError, match=r"1\.31\.1 cannot load model\.onnx: Protobuf parsing"):
        open_session(library)

    assert len(library.opened) == 1
