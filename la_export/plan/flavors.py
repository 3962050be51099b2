"""What sets TensorRT and TensorRT for RTX apart, as values: everything else is one code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from la_export.plan.options import PlanOptions
from la_runtime.errors import UsageError
from la_runtime.plans import HardwareCompatibility, PlanTarget

__all__ = ["FLAVORS", "Flavor", "check_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flavor:
    """One TensorRT.

    Args:
        target: what plans of it are for.
        title: what it is called.
        module: its Python module.
        requirement: what `pip install` gets it.
        versions: from which on and below which it is known, as (major, minor).
        needs_gpu: whether it builds on the GPU that the plans are for.
        has_timing_cache: whether it times kernels and can remember that.
        refuses: options it cannot do, each with the reason.
        default_compute_capabilities: what plans are for when nothing else is asked; empty where
            it is the GPU they are built on.
    """

    target: PlanTarget
    title: str
    module: str
    requirement: str
    versions: tuple[tuple[int, int], tuple[int, int]]
    needs_gpu: bool
    has_timing_cache: bool
    refuses: MappingProxyType[str, str]
    default_compute_capabilities: tuple[str, ...]


_WITHOUT_GPU: Final = "it builds without a GPU, and this needs one"

FLAVORS: Final[MappingProxyType[PlanTarget, Flavor]] = MappingProxyType(
    {
        PlanTarget.TRT: Flavor(
            target=PlanTarget.TRT,
            title="TensorRT",
            module="tensorrt",
            requirement="lookahead-attention[trt]",
            versions=((10, 15), (12, 0)),
            needs_gpu=True,
            has_timing_cache=True,
            refuses=MappingProxyType(
                {"--compute-capability": "it builds for the GPU it runs on"},
            ),
            default_compute_capabilities=(),
        ),
        PlanTarget.TRT_RTX: Flavor(
            target=PlanTarget.TRT_RTX,
            title="TensorRT for RTX",
            module="tensorrt_rtx",
            requirement="lookahead-attention[trt-rtx]",
            versions=((1, 7), (1, 8)),
            needs_gpu=False,
            has_timing_cache=False,
            refuses=MappingProxyType(
                {
                    "--hardware-compatibility": "its plans are for a list of GPUs, see "
                    "--compute-capability",
                    "--version-compatible": "it has no lean runtime",
                    "--strip": _WITHOUT_GPU,
                    "--timing-cache": "it times no kernels",
                }
            ),
            default_compute_capabilities=("SM80", "SM86", "SM89", "SM120", "SM121"),
        ),
    }
)


def check_options(options: PlanOptions, flavor: Flavor) -> None:
    """Refuse an option that this TensorRT cannot do.

    Raises:
        UsageError: the first such option, by name.
    """
    for option in _given(options):
        if option in flavor.refuses:
            raise UsageError(
                f"{option} cannot be used for target {flavor.target}: {flavor.title} refuses it "
                f"because {flavor.refuses[option]}; leave it out"
            )


def _given(options: PlanOptions) -> Iterator[str]:
    """The options that some flavor refuses and that were asked for."""
    if options.hardware_compatibility is not HardwareCompatibility.NONE:
        yield "--hardware-compatibility"
    if options.is_version_compatible:
        yield "--version-compatible"
    if options.is_stripped:
        yield "--strip"
    if options.timing_cache is not None:
        yield "--timing-cache"
    if options.compute_capabilities:
        yield "--compute-capability"
