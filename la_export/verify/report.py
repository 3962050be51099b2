"""The report of a verification: as a record, as a file in the bundle, and as JUnit's XML."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from la_export.verify.findings import RungResult, Status
from la_runtime.bundle import REPORTS_FOLDER, Bundle, Certificate
from la_runtime.certificate import certified_digests, hash_facts
from la_runtime.errors import ExitCode, HostError, UsageError

__all__ = ["LadderReport", "make_certificate", "now_utc", "write_junit", "write_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderReport:
    """What a verification found, and about what.

    Args:
        bundle: the bundle's folder.
        utc: when it ended.
        reference: ``torch`` or ``self``.
        backend: what ran the graph.
        backend_version: of its library.
        processor: what it ran on.
        threads: of one pass; 0 if the library chose.
        is_quick: whether less was compared than a certificate asks for.
        lookahead_lengths: the values of k compared.
        epsilon: margin of a near-tie; None when it was not measured.
        digests: SHA-256 by path of what was verified.
        results: the rungs.
        departure: where a hidden state departs from PyTorch's, if that was looked for.
    """

    bundle: Path
    utc: str
    reference: str
    backend: str
    backend_version: str
    processor: str
    threads: int
    is_quick: bool
    lookahead_lengths: tuple[int, ...]
    epsilon: float | None
    digests: dict[str, str]
    results: tuple[RungResult, ...]
    departure: str = ""

    @property
    def exit_code(self) -> ExitCode:
        """Failed if any rung did; else could not run if any rung could not; else done."""
        found = {result.status for result in self.results}
        if Status.FAILED in found:
            return ExitCode.FAILED
        return ExitCode.COULD_NOT_RUN if Status.COULD_NOT_RUN in found else ExitCode.DONE

    @property
    def verdict(self) -> str:
        """One line."""
        counts = dict.fromkeys(Status, 0)
        for result in self.results:
            counts[result.status] += 1
        said = ", ".join(
            f"{count} {status.replace('_', ' ')}" for status, count in counts.items() if count
        )
        word = {
            ExitCode.DONE: "verified",
            ExitCode.FAILED: "failed",
            ExitCode.COULD_NOT_RUN: "could not be verified",
        }[self.exit_code]
        return f"{word}: {said}"

    @property
    def deserves_certificate(self) -> bool:
        """A full run in which every rung passed or had no meaning."""
        return self.exit_code is ExitCode.DONE and not self.is_quick and self.epsilon is not None

    @property
    def path(self) -> PurePosixPath:
        """Where the report lies within the bundle."""
        stamp = self.utc.replace("-", "").replace(":", "").replace("+0000", "Z")
        return PurePosixPath(REPORTS_FOLDER) / f"verify-{stamp}.json"

    def record(self) -> dict[str, Any]:
        """The report as one JSON object."""
        return {
            "bundle": str(self.bundle),
            "verdict": self.verdict,
            "exit_code": int(self.exit_code),
            "utc": self.utc,
            "reference": self.reference,
            "backend": self.backend,
            "backend_version": self.backend_version,
            "processor": self.processor,
            "threads": self.threads,
            "quick": self.is_quick,
            "lookahead_lengths": list(self.lookahead_lengths),
            "epsilon": self.epsilon,
            "digests": self.digests,
            "departure": self.departure,
            "rungs": [_rung_record(result) for result in self.results],
        }


def now_utc() -> str:
    """The time as reports and certificates write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _rung_record(result: RungResult) -> dict[str, Any]:
    return {
        "number": result.number,
        "name": result.name,
        "status": result.status.value,
        "figures": [
            {"name": figure.name, "value": _finite(figure.value), "bound": figure.bound}
            for figure in result.figures
        ],
        "detail": result.detail,
        "seconds": round(result.seconds, 3),
    }


def _finite(value: float) -> float | str:
    """JSON has no word for NaN and infinity."""
    return value if abs(value) < float("inf") else str(value)


def make_certificate(bundle: Bundle, report: LadderReport) -> Certificate:
    """The certificate of a report that deserves one."""
    assert report.deserves_certificate, "only a full run without failures gives a certificate"
    assert report.epsilon is not None, "a full run measures it"
    return Certificate(
        utc=report.utc,
        reference=report.reference,
        backend=report.backend,
        backend_version=report.backend_version,
        processor=report.processor,
        threads=report.threads,
        epsilon=report.epsilon,
        lookahead_lengths=report.lookahead_lengths,
        digests=certified_digests(bundle.manifest),
        facts_sha256=hash_facts(bundle.manifest),
        rungs={result.name: result.status.value for result in report.results},
        report=str(report.path),
    )


def write_report(report: LadderReport) -> Path:
    """Write the report into the bundle, in one step.

    Raises:
        HostError: the folder is not writable.
    """
    target = report.bundle / report.path
    try:
        target.parent.mkdir(exist_ok=True)
        _write_whole(target, json.dumps(report.record(), indent=2) + "\n")
    except OSError as error:
        raise HostError(
            f"could not write the report {target}: {error.strerror or error}; make the bundle's "
            "folder writable"
        ) from error
    return target


def write_junit(report: LadderReport, path: Path) -> None:
    """Write the report as a JUnit test suite, a case for each rung.

    Raises:
        UsageError: the file cannot be written.
    """
    cases = report.results
    suite = ET.Element(
        "testsuite",
        name="la-export verify",
        tests=str(len(cases)),
        failures=_count(cases, Status.FAILED),
        errors=_count(cases, Status.COULD_NOT_RUN),
        skipped=_count(cases, Status.SKIPPED),
        time=f"{sum(case.seconds for case in cases):.3f}",
        timestamp=report.utc,
    )
    tags = {Status.FAILED: "failure", Status.COULD_NOT_RUN: "error", Status.SKIPPED: "skipped"}
    for case in cases:
        element = ET.SubElement(
            suite,
            "testcase",
            classname=report.bundle.name,
            name=f"{case.number:02} {case.name}",
            time=f"{case.seconds:.3f}",
        )
        if case.status in tags:
            ET.SubElement(element, tags[case.status], message=_printable(case.detail))
        else:
            ET.SubElement(element, "system-out").text = _printable(case.detail)
    try:
        _write_whole(path, ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n")
    except OSError as error:
        raise UsageError(
            f"could not write {path}: {error.strerror or error}; choose another --junit"
        ) from error


def _count(cases: tuple[RungResult, ...], status: Status) -> str:
    return str(sum(case.status is status for case in cases))


def _printable(text: str) -> str:
    """XML has no control characters."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _write_whole(path: Path, text: str) -> None:
    """Write beside, then rename, so that the file is whole or absent."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
