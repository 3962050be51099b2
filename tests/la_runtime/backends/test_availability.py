"""What a failed import of a backend's library says."""

from __future__ import annotations

import pytest

from la_runtime.backends.availability import explain_import_error
from la_runtime.errors import ExitCode


def test_a_missing_library_is_named_with_its_pip_line():
    error = explain_import_error(ModuleNotFoundError("No module", name="onnxruntime"))

    assert "onnxruntime, which is not installed: pip install 'lookahead-attention[cpu]'" in str(
        error
    )
    assert error.exit_code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize(
    "cause",
    [ImportError("libgomp.so: cannot open"), ModuleNotFoundError("No module x", name="numpy")],
)
def test_a_broken_library_says_what_is_wrong_with_it(cause):
    error = explain_import_error(cause)

    assert str(error).endswith(f"installed but cannot be imported: {cause}")


def test_ctrl_c_during_the_import_stays_ctrl_c():
    try:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise ImportError("initialization failed") from interrupt
    except ImportError as error:
        with pytest.raises(KeyboardInterrupt):
            explain_import_error(error)
