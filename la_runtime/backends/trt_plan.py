"""Which plan of a bundle to run, whether it runs on this machine, and what passes it takes.

Pure functions of the manifest and of facts about the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from la_runtime.backends.base import PassLimits
from la_runtime.backends.device_cache import Room
from la_runtime.backends.gpu import Gpu
from la_runtime.bundle import Manifest
from la_runtime.contract import Axis, Contract, TensorSpec
from la_runtime.errors import BundleError, HostError, UsageError
from la_runtime.plans import HardwareCompatibility, PlanFacts, PlanTarget
from la_runtime.storage import storage_dtype

__all__ = [
    "RTX_COMPUTE_CAPABILITIES",
    "check_host",
    "choose_plan",
    "choose_profile",
    "largest_bytes",
    "plan_limits",
    "plan_room",
]

RTX_COMPUTE_CAPABILITIES: Final = ("SM75", "SM80", "SM86", "SM89", "SM120", "SM121")
"""Of the GPUs that TensorRT for RTX builds for."""

_AMPERE: Final = 80


def choose_plan(manifest: Manifest, target: PlanTarget, k: int | None) -> PlanFacts:
    """The plan to open for a lookahead length.

    Args:
        manifest: the bundle's.
        target: which TensorRT will run it.
        k: wanted lookahead length; the largest built when None.

    Returns:
        The one made for the smallest built length that is at least `k`.

    Raises:
        BundleError: there is none for the target, or it is not of the bundle's graph.
        UsageError: none takes blocks of so long a lookahead.
    """
    plans = [plan for plan in manifest.plans if plan.target is target]
    if not plans:
        raise BundleError(
            f"the bundle has no plan for target {target}; make one with 'la-export plan BUNDLE "
            f"--target {target}'"
        )
    lengths = sorted({length for plan in plans for length in plan.lookahead_lengths})
    wanted = lengths[-1] if k is None else k
    served = min((length for length in lengths if length >= wanted), default=None)
    if served is None:
        raise UsageError(
            f"no plan for k = {wanted}: the bundle's plans for target {target} are for k = "
            f"{', '.join(map(str, lengths))}; choose no larger one, or make one with 'la-export "
            f"plan BUNDLE --target {target}'"
        )
    plan = min(
        (plan for plan in plans if served in plan.lookahead_lengths),
        key=lambda plan: len(plan.lookahead_lengths),
    )
    if plan.graph_sha256 != manifest.files[manifest.graph].sha256:
        raise BundleError(
            f"{plan.path} was built from another graph than the bundle's; rebuild with 'la-export "
            f"plan BUNDLE --target {target}'"
        )
    return plan


def check_host(plan: PlanFacts, version: str, gpu: Gpu) -> None:
    """Refuse a plan that was built for another machine, before it is loaded.

    Args:
        plan: the plan.
        version: of the TensorRT that would load it.
        gpu: the GPU that would run it.

    Raises:
        HostError: it would not load, or not be what was built.
    """
    gpus = ", ".join(plan.compute_capabilities)
    command = f"la-export plan BUNDLE {_describe_target(plan.target, gpu)}"
    if not _runs_on(plan, gpu):
        raise HostError(
            f"{plan.path} was built for {gpus} with TensorRT {plan.version}; this GPU, {gpu.name}, "
            f"is {gpu.compute_capability}: rebuild with '{command}'"
        )
    if not _loads_in(plan, version):
        raise HostError(
            f"{plan.path} was built for {gpus} with TensorRT {plan.version}; here is TensorRT "
            f"{version}: install the other, or rebuild with '{command}'"
        )
    if plan.driver is None or gpu.driver is None:
        return
    if _numbers(gpu.driver) < _numbers(plan.driver):
        raise HostError(
            f"{plan.path} was built under driver {plan.driver}; here is driver {gpu.driver}, which "
            f"is older: update the driver, or rebuild with '{command}'"
        )


def _describe_target(target: PlanTarget, gpu: Gpu) -> str:
    """The options that build plans for this GPU; where TensorRT for RTX cannot, those of TensorRT.

    By default TensorRT for RTX does not build for all GPUs that it can build for.
    """
    if target is PlanTarget.TRT:
        return f"--target {target}"
    if gpu.compute_capability not in RTX_COMPUTE_CAPABILITIES:
        return f"--target {PlanTarget.TRT}"
    number = gpu.compute_capability.removeprefix("SM")
    return f"--target {target} --compute-capability {number[:-1]}.{number[-1]}"


def _runs_on(plan: PlanFacts, gpu: Gpu) -> bool:
    if plan.hardware_compatibility is HardwareCompatibility.AMPERE_PLUS:
        return int(gpu.compute_capability.removeprefix("SM")) >= _AMPERE
    return gpu.compute_capability in plan.compute_capabilities


def _loads_in(plan: PlanFacts, version: str) -> bool:
    built, here = _numbers(plan.version), _numbers(version)
    return here == built or (plan.is_version_compatible and here[0] == built[0] and here > built)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    numbers = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def choose_profile(plan: PlanFacts, sizes: Mapping[Axis, int]) -> int:
    """Index of the narrowest profile that a pass of these sizes fits.

    Raises:
        UsageError: it fits none.
    """
    fitting = [index for index, profile in enumerate(plan.profiles) if profile.holds(sizes)]
    if not fitting:
        pass_sizes = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        allowed = "; ".join(
            f"{profile.name}: "
            + ", ".join(
                f"{axis} {profile.axes[axis].least} to {profile.axes[axis].most}" for axis in sizes
            )
            for profile in plan.profiles
        )
        raise UsageError(
            f"no profile of {plan.path} takes a pass of {pass_sizes} ({allowed}); use a smaller "
            "batch, chunk or layout, or rebuild with larger limits: 'la-export plan BUNDLE "
            f"--target {plan.target}'"
        )
    return min(
        fitting,
        key=lambda index: math.prod(entry.most for entry in plan.profiles[index].axes.values()),
    )


def plan_limits(plan: PlanFacts, contract: Contract, *, context: int) -> PassLimits:
    """The largest pass a plan takes.

    Args:
        plan: the plan.
        contract: of its graph.
        context: positions the model has.
    """
    places = context if contract.capacity is not None else _most(plan, Axis.PAST)
    return PassLimits(
        batch=_most(plan, Axis.BATCH),
        block=_most(plan, Axis.BLOCK),
        rows=_most(plan, Axis.ROWS),
        places=places,
        k=max(plan.lookahead_lengths),
    )


def plan_room(plan: PlanFacts, contract: Contract) -> Room:
    """Columns of the past that every profile takes."""
    if contract.capacity is not None:
        return Room(least=contract.capacity, most=contract.capacity)
    ranges = [profile.axes[Axis.PAST] for profile in plan.profiles]
    return Room(
        least=max(entry.least for entry in ranges), most=max(entry.most for entry in ranges)
    )


def _most(plan: PlanFacts, axis: Axis) -> int:
    return max(profile.axes[axis].most for profile in plan.profiles)


def largest_bytes(plan: PlanFacts, spec: TensorSpec) -> int:
    """Bytes of a tensor in the largest pass of any profile."""
    elements = max(math.prod(profile.shape_of(spec.axes)[2]) for profile in plan.profiles)
    return elements * storage_dtype(spec.dtype).itemsize
