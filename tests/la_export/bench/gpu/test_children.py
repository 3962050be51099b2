from __future__ import annotations

import os
import subprocess
import sys

import pytest

from la_export.bench.gpu.children import TERMINATED, run_child
from la_export.bench.gpu.steps import StepError


def python(program: str, **options):
    return run_child([sys.executable, "-c", program], **({"timeout_s": 60.0} | options))


def test_the_object_that_a_command_prints_is_what_it_found() -> None:
    assert python("print('{\"a\": [1]}')") == {"a": [1]}
    assert python("print('no object')") == {}


def test_lines_that_libraries_print_around_the_object_are_passed_over() -> None:
    program = "print('[TRT] a line'); print('{odd'); print('{\\n \"a\": {}\\n}'); print('bye')"

    assert python(program) == {"a": {}}


@pytest.mark.parametrize(("code", "status"), [(1, "failed"), (3, "not_run"), (4, "not_run")])
def test_a_command_that_could_not_run_has_not_failed(code: int, status: str) -> None:
    with pytest.raises(StepError) as failure:
        python(f"import sys; sys.exit({code})")

    assert failure.value.status.value == status


def test_a_check_that_is_terminated_ends_its_command(tmp_path) -> None:
    """The command holds a pipe open as long as it lives."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    lasting = (
        "import signal\n"
        f"stream = open({str(pipe)!r}, 'w')\n"
        "print('up', file=stream, end='', flush=True)\n"
        "signal.pause()\n"
    )
    program = (
        "import sys\n"
        "from la_export.bench.gpu.children import end_when_terminated, run_child\n"
        "end_when_terminated()\n"
        f"run_child([sys.executable, '-c', {lasting!r}], timeout_s=60)\n"
    )
    check = subprocess.Popen([sys.executable, "-c", program])

    with pipe.open() as stream:
        assert stream.read(2) == "up"
        check.terminate()
        assert stream.read() == "", "it ends, because nobody holds it open"
    assert check.wait() == TERMINATED == 143


def test_a_command_that_fails_says_its_last_words_and_keeps_what_it_found() -> None:
    with pytest.raises(StepError, match="ended with exit code 1: error: no such bundle") as failure:
        python("import sys; print('{\"rungs\": []}'); sys.exit('error: no such bundle')")

    assert failure.value.found == {"rungs": []}


def test_an_exit_code_that_is_no_failure_is_none() -> None:
    assert python("import sys; print('{}'); sys.exit(4)", good_codes=(0, 4)) == {}


def test_a_command_that_crashes_is_named_by_its_signal() -> None:
    with pytest.raises(StepError, match="died of SIGSEGV: none"):
        python("import os; os.kill(os.getpid(), 11)")


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path) -> None:
    """A process that the command starts holds a pipe open as long as it lives."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    lasting = f"import signal; open({str(pipe)!r}, 'w').write('up'); signal.pause()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {lasting!r}])"

    with pytest.raises(StepError, match="gave no answer within 3 s; last words: none"):
        python(program, timeout_s=3.0)

    os.set_blocking(reading, True)
    with open(reading, "rb") as stream:
        assert stream.read() in (b"", b"up"), "it ends, because nobody holds it open"
