"""Why a backend's library cannot be imported, in one line."""

from __future__ import annotations

from la_runtime.errors import HostError

__all__ = ["explain_import_error"]


def explain_import_error(error: ImportError) -> HostError:
    """The error to raise when `import onnxruntime` fails.

    Raises:
        KeyboardInterrupt: Ctrl-C came during the import, which native modules report as an
            import that failed.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime":
        return HostError(
            "backend 'ort-cpu' needs onnxruntime, which is not installed: "
            "pip install 'lookahead-attention[cpu]'"
        )
    return HostError(
        f"backend 'ort-cpu' needs onnxruntime, which is installed but cannot be imported: {error}"
    )
