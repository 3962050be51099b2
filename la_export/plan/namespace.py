"""Finds a TensorRT and opens it, behind checks that cannot crash the process.

Full TensorRT dies where there is no driver: whether there is a GPU is asked of the driver first.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol, cast

from la_export.plan import api
from la_export.plan.flavors import FLAVORS, Flavor
from la_export.plan.options import Target
from la_runtime.backends.gpu import Gpu, read_gpu
from la_runtime.backends.trt_plan import RTX_COMPUTE_CAPABILITIES
from la_runtime.errors import HostError
from la_runtime.plans import PlanTarget

__all__ = ["Choice", "FindGpu", "Installation", "TensorRT", "choose_installation", "open_tensorrt"]

FindGpu = Callable[[], Gpu]

_VERSION: Final = re.compile(r"(\d+)\.(\d+)")


class TensorRT(Protocol):
    """The module ``tensorrt`` or ``tensorrt_rtx``, as far as it is used."""

    __version__: str
    BuilderFlag: api.BuilderFlag
    ComputeCapability: api.ComputeCapability
    DataType: api.DataType
    HardwareCompatibilityLevel: api.HardwareCompatibilityLevel
    IAttentionOutputLayer: type[api.IAttentionOutputLayer]
    ILogger: type[api.ILogger]
    IProgressMonitor: type[api.IProgressMonitor]
    LayerType: api.LayerType
    MemoryPoolType: api.MemoryPoolType
    NetworkDefinitionCreationFlag: api.NetworkDefinitionCreationFlag
    ProfilingVerbosity: api.ProfilingVerbosity

    def Builder(self, logger: api.ILogger) -> api.Builder: ...  # noqa: N802

    def OnnxParser(  # noqa: N802
        self, network: api.INetworkDefinition, logger: api.ILogger
    ) -> api.OnnxParser: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """A TensorRT that can build here.

    Args:
        flavor: which.
        trt: its module.
        gpu: what it builds on; None where it needs none.
    """

    flavor: Flavor
    trt: TensorRT
    gpu: Gpu | None

    @property
    def version(self) -> str:
        """Of the library."""
        return self.trt.__version__

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.flavor.title} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a `Target` comes to on this machine.

    Args:
        installation: what builds the plans; None if none are built.
        skipped: a line for each TensorRT that could not be used, with what to do.
        notes: a line for whatever else is to be known before the plans are built.
    """

    installation: Installation | None
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def choose_installation(target: Target, *, find_gpu: FindGpu = read_gpu) -> Choice:
    """Find what builds plans for a target.

    Args:
        target: for what.
        find_gpu: asks the driver for the GPU to build on.

    Raises:
        HostError: a target that was named cannot be built here. `Target.AUTO` skips it instead.
    """
    if target is Target.ONNX:
        return Choice(installation=None)
    if target is not Target.AUTO:
        return Choice(installation=open_tensorrt(PlanTarget(target), find_gpu=find_gpu))
    skipped = []
    for flavor_target in (PlanTarget.TRT, PlanTarget.TRT_RTX):
        try:
            found = open_tensorrt(flavor_target, find_gpu=find_gpu)
        except HostError as error:
            skipped.append(str(error))
        else:
            notes = tuple(_note_unserved(found, find_gpu))
            return Choice(installation=found, skipped=tuple(skipped), notes=notes)
    return Choice(installation=None, skipped=tuple(skipped))


def _note_unserved(installation: Installation, find_gpu: FindGpu) -> Iterator[str]:
    """Say when plans are built that this machine's own GPU cannot run."""
    if installation.flavor.needs_gpu:
        return
    try:
        gpu = find_gpu()
    except HostError:
        return
    if gpu.compute_capability not in RTX_COMPUTE_CAPABILITIES:
        yield (
            f"{installation.title} builds no plans for this machine's {gpu.name}, "
            f"{gpu.compute_capability}: they are for other GPUs; for this one use --target trt"
        )


def open_tensorrt(target: PlanTarget, *, find_gpu: FindGpu = read_gpu) -> Installation:
    """Load a TensorRT; nothing of it is created.

    Args:
        target: which.
        find_gpu: asks the driver for the GPU to build on.

    Raises:
        HostError: the package, the GPU or its driver is missing, or the version is not a known one.
    """
    flavor = FLAVORS[target]
    _check_installed(flavor)
    gpu = _require_gpu(flavor, find_gpu) if flavor.needs_gpu else None
    try:
        trt = cast(TensorRT, importlib.import_module(flavor.module))
    except ImportError as error:
        raise HostError(
            f"target {target} needs {flavor.title}, whose module {flavor.module} is installed but "
            f"cannot be imported: {error}; run: pip install '{flavor.requirement}'"
        ) from error
    _check_version(flavor, trt.__version__)
    return Installation(flavor=flavor, trt=trt, gpu=gpu)


def _check_installed(flavor: Flavor) -> None:
    if importlib.util.find_spec(flavor.module) is None:
        raise HostError(
            f"target {flavor.target} needs {flavor.title}, which is not installed; run: "
            f"pip install '{flavor.requirement}'"
        )


def _require_gpu(flavor: Flavor, find_gpu: FindGpu) -> Gpu:
    try:
        return find_gpu()
    except HostError as error:
        raise HostError(
            f"target {flavor.target} builds plans on the GPU they are for, and there is none that "
            f"works: {error}"
        ) from error


def _check_version(flavor: Flavor, version: str) -> None:
    found = _VERSION.match(version)
    first, after = flavor.versions
    if found is None or not first <= (int(found[1]), int(found[2])) < after:
        raise HostError(
            f"target {flavor.target} needs {flavor.title} from {_dotted(first)} to before "
            f"{_dotted(after)}, got {version}; run: pip install '{flavor.requirement}'"
        )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
