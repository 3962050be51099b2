"""Bundles with a plan for the fake TensorRT."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from la_export.graph.twin import float32_twin
from la_runtime.bundle import Bundle, open_bundle, replace_manifest
from la_runtime.contract import Axis, CacheForm, Contract, Dtype
from la_runtime.digests import hash_file
from la_runtime.plans import AxisRange, PlanFacts, PlanProfile, PlanTarget
from tests.tensorrt_api.engine import make_plan_bytes

__all__ = ["VERSION", "make_profile", "with_plans"]

VERSION = "11.4.0.106"


def make_profile(
    contract: Contract, name: str, *, batch: int, block: int, past: int = 1024, k: int = 4
) -> PlanProfile:
    """A profile up to these sizes."""
    axes = {
        Axis.BATCH: AxisRange(least=1, likely=1, most=batch),
        Axis.BLOCK: AxisRange(least=1, likely=block, most=block),
        Axis.ROWS: AxisRange(least=1, likely=1, most=block),
    }
    if contract.cache_form is CacheForm.CONCAT:
        axes |= {
            Axis.PAST: AxisRange(least=0, likely=past, most=past),
            Axis.KEYS: AxisRange(least=1, likely=past + block, most=past + block),
        }
    return PlanProfile(name=name, k=k, axes=axes)


def with_plans(folder: Path, destination: Path, *changes: dict[str, Any]) -> Bundle:
    """A copy of a bundle with a plan for each of these changes of the facts of a usual one."""
    shutil.copytree(folder, destination)
    bundle = open_bundle(destination)
    manifest = bundle.manifest
    contract = manifest.contract
    graph = _computed_graph(bundle, destination.with_suffix(".twin"))
    block = 512 if contract.capacity is None else contract.capacity - manifest.model.context
    plans, files = [], dict(manifest.files)
    for number, change in enumerate(changes):
        facts = {
            "path": f"trt/plan-{number}.plan",
            "target": PlanTarget.TRT,
            "lookahead_lengths": (4,),
            "graph_sha256": manifest.files[manifest.graph].sha256,
            "version": VERSION,
            "compute_capabilities": ("SM90",),
            "driver": None,
            "profiles": (
                make_profile(contract, "prefill", batch=3, block=block),
                make_profile(contract, "step", batch=3, block=min(32, block)),
            ),
        }
        plan = PlanFacts(**(facts | change))
        path = destination / plan.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_plan_bytes(plan, contract, graph))
        files[plan.path] = hash_file(path)
        plans.append(plan)
    manifest = manifest.model_copy(update={"plans": tuple(plans), "files": files})
    replace_manifest(destination, manifest, partial=destination / "manifest.partial")
    return open_bundle(destination)


def _computed_graph(bundle: Bundle, folder: Path) -> Path:
    """The bundle's graph, or for bfloat16 its float32 twin, in a folder of its own."""
    graph = bundle.path(bundle.manifest.graph)
    if bundle.manifest.contract.compute_dtype is not Dtype.BFLOAT16:
        return graph
    with float32_twin(graph) as twin:
        shutil.copytree(twin.parent, folder)
    return folder / graph.name
