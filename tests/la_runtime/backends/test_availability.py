"""What a failed import of a backend's library says."""

from __future__ import annotations

import pytest

from la_runtime.backends.availability import explain_import_error
from la_runtime.errors import ExitCode


@pytest.mark.parametrize(
    ("backend", "package", "extra"),
    [("ort-cpu", "onnxruntime", "cpu"), ("ort-cuda", "onnxruntime-gpu", "gpu")],
)
def test_a_missing_library_is_named_with_its_pip_line(backend, package, extra):
    missing = ModuleNotFoundError("No module", name="onnxruntime")

    error = explain_import_error(missing, backend=backend)

    assert str(error) == (
        f"backend '{backend}' needs {package}, which is not installed: "
        f"pip install 'lookahead-attention[{extra}]'"
    )
    assert error.exit_code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize(
    "cause",
    [ImportError("libgomp.so: cannot open"), ModuleNotFoundError("No module x", name="numpy")],
)
@pytest.mark.parametrize("backend", ["ort-cpu", "ort-cuda"])
def test_a_broken_library_says_what_is_wrong_with_it(cause, backend):
    error = explain_import_error(cause, backend=backend)

    assert str(error).startswith(f"backend '{backend}' needs onnxruntime")
    assert str(error).endswith(f"installed but cannot be imported: {cause}")


def test_ctrl_c_during_the_import_stays_ctrl_c():
    try:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise ImportError("initialization failed") from interrupt
    except ImportError as error:
        with pytest.raises(KeyboardInterrupt):
            explain_import_error(error, backend="ort-cpu")
