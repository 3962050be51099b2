"""Opening a graph in ONNX Runtime's CUDA provider, or saying why not.

ONNX Runtime takes a graph that it cannot run on the GPU to the CPU and says so in its log alone.
Here that is an error. A session is first asked for with the fall-back switched off. Where shape
arithmetic must stay on the CPU, that is refused; then the fall-back is allowed, and the profile of
a pass shows what it was used for.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from la_runtime.errors import BundleError, HostError

__all__ = ["CUDA_PROVIDER", "check_cuda_provider", "open_cuda_session"]

logger = logging.getLogger(__name__)

CUDA_PROVIDER: Final = "CUDAExecutionProvider"
_NO_FALLBACK: Final = "session.disable_cpu_ep_fallback"
_FALLBACK_REFUSED: Final = "fallback to CPU EP has been explicitly disabled"
_PROVIDER_LIBRARY: Final = "libonnxruntime_providers_cuda.so"
_ERRORS: Final = 3
_NOTHING: Final = 4


def check_cuda_provider(
    onnxruntime: ModuleType, *, load_library: Callable[[str], object] = ctypes.CDLL
) -> None:
    """Refuse an ONNX Runtime that does not reach the GPU, before any graph is read.

    That the provider is among the available ones says only that it was built.

    Args:
        onnxruntime: the module.
        load_library: opens a shared library, to learn why ONNX Runtime could not.

    Raises:
        HostError: it is built for CPUs, or its CUDA provider does not start.
    """
    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        raise HostError(
            "backend 'ort-cuda' needs onnxruntime-gpu, and the installed onnxruntime "
            f"{onnxruntime.__version__} is built for CPUs: pip uninstall onnxruntime, then "
            "pip install 'lookahead-attention[gpu]'"
        )
    _load_cuda_libraries(onnxruntime)
    try:
        onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(1, dtype=np.float32), "cuda", 0)
    except RuntimeError as error:
        reason = _explain_missing_provider(onnxruntime, load_library) or str(error).strip()
        raise HostError(
            f"ONNX Runtime {onnxruntime.__version__} does not start its CUDA provider: {reason}; "
            f"it needs CUDA {onnxruntime.cuda_version} and cuDNN 9: pip install "
            "'onnxruntime-gpu[cuda,cudnn]'"
        ) from error


def _load_cuda_libraries(onnxruntime: ModuleType) -> None:
    """Make CUDA and cuDNN found where pip has put them."""
    said = StringIO()
    with redirect_stdout(said):  # it prints what it does not find
        onnxruntime.preload_dlls()
    logger.debug("loading CUDA's libraries: %s", said.getvalue().strip() or "all found")


def _explain_missing_provider(
    onnxruntime: ModuleType, load_library: Callable[[str], object]
) -> str:
    """What the loader says of the provider's library; empty if it loads."""
    try:
        load_library(str(Path(onnxruntime.__file__ or "").parent / "capi" / _PROVIDER_LIBRARY))
    except OSError as error:
        return str(error)
    return ""


def open_cuda_session(
    onnxruntime: ModuleType, graph: Path, *, threads: int, stream: int, profile_prefix: Path
) -> Any:
    """A session on the first GPU whose passes are profiled until `end_profiling`.

    Args:
        onnxruntime: the module.
        graph: the ONNX file.
        threads: for what runs on the CPU; 0 lets ONNX Runtime choose.
        stream: handle of the CUDA stream that passes run on.
        profile_prefix: how the profile's name begins.

    Raises:
        BundleError: ONNX Runtime cannot load the graph.
        HostError: it loads it without the GPU.
    """

    def open_session(*, strictly: bool) -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = _NOTHING if strictly else _ERRORS
        options.enable_profiling = True
        options.profile_file_prefix = str(profile_prefix)
        if strictly:
            options.add_session_config_entry(_NO_FALLBACK, "1")
        # TF32 would round what is multiplied to 10 bits, and fp32 would not be what it says.
        settings = {"device_id": "0", "user_compute_stream": str(stream), "use_tf32": "0"}
        return onnxruntime.InferenceSession(
            str(graph), options, providers=[(CUDA_PROVIDER, settings)], enable_fallback=0
        )

    try:
        try:
            session = open_session(strictly=True)
        except Exception as error:
            if _FALLBACK_REFUSED not in str(error):
                raise
            session = open_session(strictly=False)
    except Exception as error:
        raise BundleError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load {graph}: {error}"
        ) from error
    if CUDA_PROVIDER not in session.get_providers():
        raise HostError(
            f"ONNX Runtime {onnxruntime.__version__} would run {graph} on "
            f"{', '.join(session.get_providers())} instead of the GPU; what it logged says why"
        )
    return session
