"""A diagnosis as plain text: doctor must speak where even the table's package is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from la_export.doctor.diagnosis import Diagnosis, Finding, Section

__all__ = ["format_diagnosis"]

_MARK_WIDTH: Final = 11


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """Every finding in a line, each fix once below its first, and the backends at the end."""
    return "\n".join(_lines(diagnosis))


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    width = max(len(finding.name) for finding in diagnosis.findings)
    margin = " " * (_MARK_WIDTH + width + 5)
    told: set[str] = set()
    for section in Section:
        findings = diagnosis.of(section)
        if findings:
            yield section.value
        for finding in findings:
            yield _finding_line(finding, width)
            if finding.fix and finding.fix not in told:
                told.add(finding.fix)
                yield f"{margin}fix: {finding.fix}"
    backends = ", ".join(diagnosis.backends) or "none"
    yield f"backends that run a bundle here: {backends}"


def _finding_line(finding: Finding, width: int) -> str:
    return f"  {finding.verdict.value:<{_MARK_WIDTH}} {finding.name:<{width}}  {finding.found}"
