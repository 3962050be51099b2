"""The result of a build, as a table for people and as a record for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from la_export.cli.console import format_bytes
from la_export.cli.plan_lines import plans_record, print_plans
from la_export.pipeline import BuildReport

__all__ = ["print_report", "report_record"]


def print_report(report: BuildReport, console: Console) -> None:
    """Print files, stages and checks."""
    manifest = report.manifest
    files = Table("file", "size", title=f"bundle {report.bundle}", title_justify="left")
    for name, entry in manifest.files.items():
        files.add_row(name, format_bytes(entry.bytes))
    console.print(files)
    stages = Table("stage", "seconds", "peak memory")
    for stage in report.stages:
        stages.add_row(
            stage.stage.value, f"{stage.seconds:.1f}", format_bytes(stage.peak_rss_bytes)
        )
    stages.add_row("total", f"{report.seconds:.1f}", format_bytes(report.peak_rss_bytes))
    console.print(stages)
    checks = Table("check", "measured", "allowed", "")
    for check in manifest.checks:
        checks.add_row(check.name, f"{check.value:.2g}", f"{check.bound:.2g}", check.detail)
    console.print(checks)
    if not console.quiet and (report.plans.plans or report.plans.skipped):
        print_plans(report.plans)


def report_record(report: BuildReport) -> dict[str, Any]:
    """The report as one JSON object."""
    return {
        "bundle": str(report.bundle),
        "seconds": round(report.seconds, 3),
        "peak_rss_bytes": report.peak_rss_bytes,
        "stages": [
            {
                "stage": stage.stage.value,
                "seconds": round(stage.seconds, 3),
                "peak_rss_bytes": stage.peak_rss_bytes,
            }
            for stage in report.stages
        ],
        **plans_record(report.plans),
        "manifest": report.manifest.model_dump(mode="json"),
    }
