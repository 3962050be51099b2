"""The plans of a bundle: which there are, where they lie, and what the manifest says of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from la_export.plan.builder import PlanBuilder
from la_export.plan.flavors import check_options
from la_export.plan.namespace import Choice, FindGpu, Installation, choose_installation
from la_export.plan.options import PlanOptions, PlanSharing
from la_export.plan.profiles import (
    Sizes,
    make_graph_widths,
    make_prefill_profile,
    make_step_profile,
    resolve_sizes,
)
from la_export.plan.progress import PlanProgress, SilentPlanProgress
from la_export.plan.report import Compiled, PlanReport, PlansReport
from la_runtime.backends.gpu import read_gpu
from la_runtime.bundle import Manifest
from la_runtime.contract import Contract, Dtype
from la_runtime.digests import hash_file
from la_runtime.errors import UsageError
from la_runtime.plans import PLANS_FOLDER, PlanFacts, PlanProfile

__all__ = [
    "PlanSource",
    "build_plans",
    "build_plans_with",
    "check_plan_options",
]

_SHARED_NAME: Final = "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSource:
    """What plans are built from.

    Args:
        graph: path of the portable graph within the bundle.
        contract: of that graph.
        context: positions of the model.
        lookahead_lengths: those the bundle serves.
    """

    graph: str
    contract: Contract
    context: int
    lookahead_lengths: tuple[int, ...]

    @classmethod
    def of(cls, manifest: Manifest) -> PlanSource:
        """What a manifest says of it."""
        return cls(
            graph=manifest.graph,
            contract=manifest.contract,
            context=manifest.model.context,
            lookahead_lengths=manifest.lookahead_lengths,
        )


def check_plan_options(options: PlanOptions, *, find_gpu: FindGpu = read_gpu) -> Choice:
    """Find what builds the plans and refuse what it cannot do, before any long work.

    Raises:
        HostError: a target that was named cannot be built here.
        UsageError: an option that the target cannot do.
    """
    choice = choose_installation(options.target, find_gpu=find_gpu)
    if choice.installation is not None:
        check_options(options, choice.installation.flavor)
    return choice


def build_plans(
    root: Path,
    source: PlanSource,
    options: PlanOptions,
    *,
    progress: PlanProgress | None = None,
    find_gpu: FindGpu = read_gpu,
) -> PlansReport:
    """Build plans into a folder that becomes a bundle.

    Args:
        root: holds the graph and receives the plans, under `PLANS_FOLDER`.
        source: what they are built from.
        options: how they are built.
        progress: is told of each plan.
        find_gpu: asks the driver for the GPU to build on.

    Returns:
        The plans, none if no TensorRT can be used and none was named.

    Raises:
        UsageError: an option is impossible here, or for this bundle.
        HostError: a target that was named cannot be built here, or the disk is full.
        PlanError: TensorRT refuses the graph or cannot build it.
    """
    choice = check_plan_options(options, find_gpu=find_gpu)
    if choice.installation is None:
        return PlansReport(plans=(), skipped=choice.skipped)
    progress = progress or SilentPlanProgress()
    for note in choice.notes:
        progress.note(note)
    plans = build_plans_with(
        choice.installation,
        source,
        options,
        graph=root / source.graph,
        destination=root,
        progress=progress,
    )
    return PlansReport(plans=plans, skipped=choice.skipped)


def build_plans_with(
    installation: Installation,
    source: PlanSource,
    options: PlanOptions,
    *,
    graph: Path,
    destination: Path,
    progress: PlanProgress,
) -> tuple[PlanReport, ...]:
    """Build plans with a TensorRT that was chosen, its options checked; see `build_plans`.

    Args:
        installation: what builds them.
        source: what they are built from.
        options: how they are built.
        graph: the graph's file.
        destination: receives the plans, under `PLANS_FOLDER`.
        progress: is told of each plan.
    """
    lengths = _choose_lengths(options, source)
    sizes = resolve_sizes(options, source.contract, context=source.context, largest_k=lengths[-1])
    builder = PlanBuilder(
        installation,
        graph,
        source.contract,
        context=source.context,
        options=options,
        progress=progress,
    )
    graph_sha256 = hash_file(graph).sha256
    reports = []
    for blank in _plan_blanks(options, source.contract, lengths, sizes):
        path = f"{PLANS_FOLDER}/{installation.flavor.target}/{blank.name}.plan"
        progress.start_plan(path)
        compiled = builder.compile(blank.profiles, destination / path)
        _note_unfused(compiled, source.contract, path, progress)
        facts = _make_facts(installation, options, blank, path, graph_sha256)
        reports.append(PlanReport(facts=facts, compiled=compiled))
        progress.finish_plan(reports[-1])
    return tuple(reports)


def _choose_lengths(options: PlanOptions, source: PlanSource) -> tuple[int, ...]:
    """The lookahead lengths to build for, ascending; plain decoding is always allowed."""
    served = source.lookahead_lengths
    for k in options.lookahead_lengths:
        if k != 0 and k not in served:
            raise UsageError(
                f"--k {k} is not among the lookahead lengths of this bundle: expected some of "
                f"{', '.join(map(str, served))}; build a bundle with it"
            )
    return tuple(sorted(set(options.lookahead_lengths or served)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blank:
    """A plan that is to be built."""

    name: str
    lookahead_lengths: tuple[int, ...]
    profiles: tuple[PlanProfile, ...]


def _plan_blanks(
    options: PlanOptions, contract: Contract, lengths: tuple[int, ...], sizes: Sizes
) -> Iterator[_Blank]:
    groups = [lengths] if options.sharing is PlanSharing.SHARED else [(k,) for k in lengths]
    for group in groups:
        yield _Blank(
            name=_SHARED_NAME if options.sharing is PlanSharing.SHARED else f"k{group[0]}",
            lookahead_lengths=group,
            profiles=(
                make_prefill_profile(contract, sizes, k=group[-1]),
                *(make_step_profile(contract, sizes, k=k) for k in group),
            ),
        )


def _make_facts(
    installation: Installation,
    options: PlanOptions,
    blank: _Blank,
    path: str,
    graph_sha256: str,
) -> PlanFacts:
    gpu, flavor = installation.gpu, installation.flavor
    if gpu is None:
        capabilities = options.compute_capabilities or flavor.default_compute_capabilities
    else:
        capabilities = (gpu.compute_capability,)
    return PlanFacts(
        path=path,
        target=flavor.target,
        lookahead_lengths=blank.lookahead_lengths,
        graph_sha256=graph_sha256,
        version=installation.version,
        compute_capabilities=capabilities,
        driver=None if gpu is None else gpu.driver,
        profiles=blank.profiles,
        graph_widths=make_graph_widths(blank.lookahead_lengths),
        hardware_compatibility=options.hardware_compatibility,
        is_version_compatible=options.is_version_compatible,
        is_stripped=options.is_stripped,
    )


def _note_unfused(
    compiled: Compiled, contract: Contract, path: str, progress: PlanProgress
) -> None:
    """Say when attention is computed in pieces where a single kernel could do; never in float32."""
    if contract.compute_dtype is Dtype.FLOAT32:
        return
    fused = compiled.fused_attentions
    if fused is not None and fused < compiled.num_attentions:
        progress.note(
            f"{path}: {fused} of {compiled.num_attentions} attentions are one kernel each; the "
            "others are computed in pieces, which is slower"
        )
