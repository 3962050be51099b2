"""The whole check with children that are told what to say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from la_export.bench.gpu import main as command
from la_export.bench.gpu.checklist import Check
from la_export.bench.gpu.main import CheckFile, check_gpu, main
from la_export.bench.gpu.steps import StepError
from la_runtime.errors import ExitCode
from tests.la_export.bench.gpu.test_checklist import GPU, NO_GPU, SMALL, Commands, building, running
from tests.la_export.bench.gpu.test_summary import TIMED

TIMINGS = {"la_export.bench.gpu.decode": TIMED, "la_export.bench.torch_steps": TIMED}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(
        models=(SMALL,), precisions=("fp16",), lengths=(0, 4), backends=("trt",), work=tmp_path
    )


@pytest.fixture
def file(tmp_path: Path) -> CheckFile:
    return CheckFile(path=tmp_path / "check.json", command="scripts/gpu_check", options={"k": [4]})


def read(file: CheckFile) -> dict:
    return json.loads(file.path.read_text())


def gpu_commands() -> Commands:
    return Commands([GPU, *running("trt"), *building("trt")], **TIMINGS)


def test_a_whole_check_ends_in_one_file_with_the_ceiling_beside_each_figure(check, file) -> None:
    said: list[str] = []

    code = check_gpu(check, file, minutes=None, run=gpu_commands(), clock=Clock(), say=said.append)

    assert code is ExitCode.DONE
    record = read(file)
    assert record["exit_code"] == 0
    assert record["bandwidth"] == [4.8e12, "listed by NVIDIA"]
    assert [row["k"] for row in record["decoding"]] == [0, 4]
    assert record["decoding"][1]["ceiling_ms_per_pass"] == pytest.approx(5_000_000 / 4.8e9)
    assert {row["what"] for row in record["steps_timed"]} >= {"small fp16 on trt"}
    assert "time small fp16 on trt: done (0 s)" in said


def test_the_file_is_whole_after_every_step(check, file) -> None:
    seen: list[int] = []

    class Stopping(Commands):
        def __call__(self, words, *, timeout_s, good_codes=(0,)):
            if file.path.exists():
                seen.append(len(read(file)["steps"]))
            if "verify" in words:
                raise KeyboardInterrupt
            return super().__call__(words, timeout_s=timeout_s, good_codes=good_codes)

    with pytest.raises(KeyboardInterrupt):
        check_gpu(
            check,
            file,
            minutes=None,
            run=Stopping([GPU, *running("trt"), *building("trt")], **TIMINGS),
            clock=Clock(),
            say=lambda _: None,
        )

    record = read(file)
    assert record["exit_code"] is None
    assert [step["name"] for step in record["steps"]][-1] == "time small fp16 on trt"
    assert seen == sorted(seen)


def test_what_does_not_fit_into_the_minutes_is_left_out_and_said(check, file) -> None:
    clock = Clock()

    class Slow(Commands):
        def __call__(self, words, *, timeout_s, good_codes=(0,)):
            assert clock.now + timeout_s <= 60 * 8, "it would be ended in time"
            clock.now += 100.0
            return super().__call__(words, timeout_s=timeout_s, good_codes=good_codes)

    code = check_gpu(
        check,
        file,
        minutes=8,
        run=Slow([GPU, *running("trt"), *building("trt")], **TIMINGS),
        clock=clock,
        say=lambda _: None,
    )

    assert code is ExitCode.COULD_NOT_RUN
    why = {step["name"]: step["why"] for step in read(file)["steps"]}
    assert why["plan small fp16 on trt"] == "it takes about 90 s, and 80 s are left"


def test_a_machine_without_gpu_runs_through_and_ends_with_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_child", Commands([NO_GPU]))
    out = tmp_path / "check.json"

    result = CliRunner().invoke(main, ["--random", "llama-7b", "--minutes", "9", "--out", str(out)])

    assert result.exit_code == ExitCode.ENVIRONMENT, result.output
    assert result.stdout == f"{out}\n"
    record = json.loads(out.read_text())
    names = [step["name"] for step in record["steps"]]
    assert "build random-llama-7b bf16" in names
    assert (
        len([line for line in result.stderr.splitlines() if ": not run" in line]) == len(names) - 1
    )
    assert record["options"]["minutes"] == 9.0


def test_what_went_by_before_counts_into_the_minutes(check, file) -> None:
    commands = gpu_commands()

    code = check_gpu(
        check,
        file,
        minutes=2,
        spent_s=70.0,
        run=commands,
        clock=Clock(),
        say=lambda _: None,
    )

    why = {step["name"]: step["why"] for step in read(file)["steps"]}
    assert why["doctor"] == "it takes about 60 s, and 50 s are left"
    assert code is ExitCode.ENVIRONMENT


def test_a_disk_that_is_full_for_a_while_does_not_end_the_check(
    check, file, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    write = CheckFile.write

    def refuse_once(self, progress, *, code) -> None:
        if len(progress.outcomes) == 4:
            raise OSError(28, "No space left on device")
        write(self, progress, code=code)

    monkeypatch.setattr(CheckFile, "write", refuse_once)

    code = check_gpu(check, file, minutes=None, run=gpu_commands(), clock=Clock(), say=said.append)

    assert code is ExitCode.DONE
    assert f"{file.path} was not written: [Errno 28] No space left on device" in said
    assert read(file)["exit_code"] == 0


def test_models_of_one_name_are_checked_under_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_child", Commands([NO_GPU]))
    out = tmp_path / "not" / "there" / "check.json"

    models = ["--model", "a/llama", "--model", "b/llama", "--model", "smollm2-135m"]
    result = CliRunner().invoke(main, [*models, "--precision", "fp16", "--out", str(out)])

    assert result.exit_code == ExitCode.ENVIRONMENT, result.output
    names = [step["name"] for step in json.loads(out.read_text())["steps"]]
    assert [name for name in names if name.startswith("build ")] == [
        "build smollm2-135m fp16",
        "build llama fp16",
        "build llama-2 fp16",
        "build smollm2-135m-2 fp16",
    ]


def test_an_interrupted_check_ends_with_130_and_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Commands):
        def __call__(self, words, *, timeout_s, good_codes=(0,)):
            if "estimate" in words:
                raise KeyboardInterrupt
            return super().__call__(words, timeout_s=timeout_s, good_codes=good_codes)

    commands = Interrupted([NO_GPU, *running("ort-cpu")], **TIMINGS)
    monkeypatch.setattr(command, "run_child", commands)
    out = tmp_path / "check.json"

    result = CliRunner().invoke(main, ["--backend", "ort-cpu", "--out", str(out)])

    assert result.exit_code == 130
    assert json.loads(out.read_text())["steps"][0]["status"] == "done"


def test_a_failed_step_ends_the_check_with_1_and_the_rest_is_there(check, file) -> None:
    commands = gpu_commands()
    commands.answers["plan"] = StepError("ended with exit code 1: error: no memory")

    code = check_gpu(
        replace(check, backends=("trt", "ort-cuda")),
        file,
        minutes=None,
        run=commands,
        clock=Clock(),
        say=lambda _: None,
    )

    assert code is ExitCode.FAILED
    steps = {step["name"]: step for step in read(file)["steps"]}
    assert steps["plan small fp16 on trt"]["why"] == "ended with exit code 1: error: no memory"
    assert "no memory" in steps["time small fp16 on trt"]["why"]
