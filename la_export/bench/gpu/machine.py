"""What is known of the machine from what doctor and the estimates said. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from la_export.bench.gpu.steps import Progress
from la_export.doctor.diagnosis import Section
from la_export.doctor.packages import PACKAGES, find_range, read_requirements

__all__ = [
    "DOCTOR",
    "INSTALL",
    "explain_misfit",
    "explain_missing",
    "explain_no_gpu",
    "explain_unlisted_gpu",
    "find_finding",
    "list_missing_packages",
]

DOCTOR: Final = "doctor"
INSTALL: Final = "install"
_PACKAGES_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "ort-cuda": ("onnxruntime-gpu",),
    "trt": ("cuda-bindings", "tensorrt"),
    "trt-rtx": ("cuda-bindings", "tensorrt-rtx"),
}
# The CUDA libraries it asks for come with these.
_PIP_EXTRAS: Final = {"onnxruntime-gpu": "[cuda,cudnn]"}


def _latest_findings(progress: Progress) -> list[Mapping[str, Any]]:
    """What doctor said last: again behind what was installed."""
    for name in (INSTALL, DOCTOR):
        findings = progress.found(name).get("findings")
        if findings:
            return list(findings)
    return []


def find_finding(progress: Progress, section: Section, name: str) -> Mapping[str, Any]:
    """What doctor found of something; empty when it did not look."""
    found = (
        finding
        for finding in _latest_findings(progress)
        if finding["section"] == section and finding["name"] == name
    )
    return next(found, {})


def explain_no_gpu(progress: Progress) -> str:
    """Why there is no GPU; empty when there is one."""
    findings = [f for f in _latest_findings(progress) if f["section"] == Section.GPU]
    if not findings:
        return "doctor did not say whether there is a GPU"
    (gpu,) = findings
    return "" if gpu["verdict"] in ("ok", "warn") else str(gpu["found"])


def explain_missing(progress: Progress, package: str) -> str:
    """That a package is not installed; empty when it is, or doctor did not look."""
    found = find_finding(progress, Section.PACKAGES, package).get("found")
    return f"{package} is not installed" if found == "not installed" else ""


def explain_unlisted_gpu(progress: Progress, backend: str) -> str:
    """Why a backend is not promised to work on this GPU; empty when it is."""
    finding = find_finding(progress, Section.RUNNING, backend)
    found = str(finding.get("found", ""))
    is_doubtful = finding.get("verdict") == "warn" and found.startswith("gpu:")
    return f"{backend}: {found}" if is_doubtful else ""


def explain_misfit(progress: Progress, estimate: str, target: str) -> str:
    """What the estimate warns of for a target: that building it takes more than there is."""
    warnings = (str(line) for line in progress.found(estimate).get("warnings", ()))
    return next((line for line in warnings if line.startswith(f"building for {target}")), "")


def list_missing_packages(progress: Progress, backends: Sequence[str]) -> list[str]:
    """What the checked backends need and doctor misses, as pip wants it."""
    ranges = {p.distribution: find_range(p, read_requirements()) for p in PACKAGES}
    wanted = dict.fromkeys(name for b in backends for name in _PACKAGES_OF.get(b, ()))
    return [
        f"{name}{_PIP_EXTRAS.get(name, '')}{ranges[name]}"
        for name in wanted
        if explain_missing(progress, name)
    ]
