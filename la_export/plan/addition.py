"""Gives a finished bundle other plans, in one step: it is never without some of its files."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from la_export.plan.namespace import FindGpu
from la_export.plan.options import PlanOptions
from la_export.plan.plans import PlanSource, build_plans_with, check_plan_options
from la_export.plan.progress import PlanProgress, SilentPlanProgress
from la_export.plan.report import PlansReport
from la_runtime.backends.gpu import read_gpu
from la_runtime.bundle import (
    MANIFEST_NAME,
    REPORTS_FOLDER,
    Bundle,
    Manifest,
    open_bundle,
    replace_manifest,
    write_bundle,
)
from la_runtime.certificate import check_unchanged
from la_runtime.digests import hash_file
from la_runtime.errors import HostError

__all__ = ["AddedPlans", "add_plans"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedPlans:
    """What `add_plans` made of a bundle.

    Args:
        bundle: its folder.
        manifest: as written.
        report: the plans that were built.
    """

    bundle: Path
    manifest: Manifest
    report: PlansReport


def add_plans(
    path: Path,
    options: PlanOptions,
    *,
    progress: PlanProgress | None = None,
    find_gpu: FindGpu = read_gpu,
) -> AddedPlans:
    """Build plans for a finished bundle, in the place of those it has for the same target.

    The new bundle is put together beside the old one, whose files it shares, and takes its place
    in one step. Whatever happens before, the old one stays as it was.

    Args:
        path: the bundle's folder.
        options: how plans are built.
        progress: is told of each plan.
        find_gpu: asks the driver for the GPU to build on.

    Raises:
        UsageError: no bundle there, or an option is impossible here or for this bundle.
        BundleError: the bundle is damaged, or was changed in the meantime.
        HostError: there is no TensorRT that can be used, or the disk is full.
        PlanError: TensorRT refuses the graph or cannot build it.
    """
    choice = check_plan_options(options, find_gpu=find_gpu)
    if choice.installation is None:
        reasons = "; ".join(choice.skipped) or "target onnx has none"
        raise HostError(f"no plan can be built here: {reasons}; the bundle is as it was")
    progress = progress or SilentPlanProgress()
    for note in choice.notes:
        progress.note(note)
    bundle = open_bundle(path)
    with write_bundle(path) as work:
        plans = build_plans_with(
            choice.installation,
            PlanSource.of(bundle.manifest),
            options,
            graph=bundle.path(bundle.manifest.graph),
            destination=work,
            progress=progress,
        )
        report = PlansReport(plans=plans, skipped=choice.skipped)
        manifest = _complete(bundle, work, report)
    return AddedPlans(bundle=path, manifest=manifest, report=report)


def _complete(bundle: Bundle, work: Path, report: PlansReport) -> Manifest:
    """Make a bundle of a folder that has only the new plans yet; returns its manifest."""
    current = check_unchanged(bundle)
    target = report.plans[0].facts.target
    staying = tuple(plan for plan in current.plans if plan.target is not target)
    leaving = {plan.path for plan in current.plans if plan.target is target}
    kept = {name: entry for name, entry in current.files.items() if name not in leaving}
    for name in kept:
        _share(bundle.root / name, work / name)
    for found in sorted(bundle.root.glob(f"{REPORTS_FOLDER}/**/*")):
        if found.is_file():
            _share(found, work / found.relative_to(bundle.root))
    new = {facts.path: hash_file(work / facts.path) for facts in report.facts}
    manifest = current.model_copy(
        update={
            "plans": tuple(
                sorted((*staying, *report.facts), key=lambda p: (p.target, p.lookahead_lengths))
            ),
            "files": dict(sorted({**kept, **new}.items())),
        }
    )
    replace_manifest(work, manifest, partial=(work / MANIFEST_NAME).with_suffix(".partial"))
    return manifest


def _share(source: Path, destination: Path) -> None:
    """Let a file be in both folders; a copy where the disk cannot do that."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), destination)
    except OSError:
        shutil.copy2(source, destination)
