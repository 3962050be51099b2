"""Why a backend's library cannot be imported, in one line."""

from __future__ import annotations

from typing import Final

from la_runtime.contract import Contract, Dtype
from la_runtime.errors import HostError

__all__ = ["check_precision", "explain_import_error"]

_EXTRAS: Final = {"ort-cpu": "cpu", "ort-cuda": "gpu"}
_PACKAGES: Final = {"ort-cpu": "onnxruntime", "ort-cuda": "onnxruntime-gpu"}


def explain_import_error(error: ImportError, *, backend: str) -> HostError:
    """The error to raise when `import onnxruntime` fails.

    Args:
        error: what the import raised.
        backend: which backend needs it.

    Raises:
        KeyboardInterrupt: Ctrl-C came during the import, which native modules report as an
            import that failed.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        cause = cause.__cause__ or cause.__context__
    package = _PACKAGES[backend]
    if isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime":
        return HostError(
            f"backend '{backend}' needs {package}, which is not installed: "
            f"pip install 'lookahead-attention[{_EXTRAS[backend]}]'"
        )
    return HostError(
        f"backend '{backend}' needs {package}, which is installed but cannot be imported: {error}"
    )


def check_precision(backend: str, contract: Contract) -> None:
    """Refuse a graph whose numbers a backend cannot compute with.

    Args:
        backend: its name.
        contract: of the graph.

    Raises:
        HostError: it cannot.
    """
    if backend == "ort-cpu" and Dtype.BFLOAT16 in (contract.compute_dtype, contract.kv_dtype):
        raise HostError(
            "this bundle is bf16, and ONNX Runtime has no bf16 arithmetic on CPUs: build with "
            "--precision fp32 or fp16, or use a GPU backend"
        )
