"""Findings with verdicts and fixes, and the exit code they come to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from la_runtime.errors import ExitCode

__all__ = ["Diagnosis", "Finding", "Section", "Verdict"]


class Verdict(StrEnum):
    """How something stands.

    ``ok``: it works. ``warn``: it works, and something about it may trouble the user.
    ``missing``: it is not there. ``broken``: it is there and does not work.
    ``not needed``: it is not there, and on this machine nothing needs it.
    """

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"
    BROKEN = "broken"
    NOT_NEEDED = "not needed"


class Section(StrEnum):
    """The parts of a diagnosis, in the order they are shown."""

    PYTHON = "Python"
    PACKAGES = "packages"
    PROVIDERS = "ONNX Runtime providers"
    GPU = "GPU"
    PARSERS = "TensorRT parsers"
    MACHINE = "machine"
    BUILDING = "building"
    RUNNING = "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Args:
        section: where it belongs.
        name: what it is.
        verdict: how it stands.
        found: what was seen, in a line.
        fix: what to do about it; empty when there is nothing to do.
    """

    section: Section
    name: str
    verdict: Verdict
    found: str
    fix: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether what it names works."""
        return self.verdict in (Verdict.OK, Verdict.WARN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that was looked at."""

    findings: tuple[Finding, ...]

    def of(self, section: Section) -> tuple[Finding, ...]:
        """The findings of a section."""
        return tuple(finding for finding in self.findings if finding.section is section)

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends that run a bundle on this machine."""
        return tuple(finding.name for finding in self.of(Section.RUNNING) if finding.is_usable)

    @property
    def exit_code(self) -> ExitCode:
        """Done when at least one backend runs a bundle here."""
        return ExitCode.DONE if self.backends else ExitCode.ENVIRONMENT

    def record(self) -> dict[str, Any]:
        """The diagnosis as one JSON object."""
        return {
            "exit_code": int(self.exit_code),
            "backends": list(self.backends),
            "findings": [
                {
                    "section": finding.section.value,
                    "name": finding.name,
                    "verdict": finding.verdict.value,
                    "found": finding.found,
                    "fix": finding.fix,
                }
                for finding in self.findings
            ],
        }
