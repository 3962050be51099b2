"""The report of a verification: as a record, as a file in the bundle, and as JUnit's XML."""

from __future__ import annotations

import errno
import json
import os
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

from la_export.verify.findings import RungResult, Status
from la_runtime.bundle import REPORTS_FOLDER, Bundle, Certificate
from la_runtime.certificate import certified_digests, hash_facts
from la_runtime.errors import ExitCode, HostError, UsageError

__all__ = [
    "LadderReport",
    "check_writable",
    "make_certificate",
    "now_utc",
    "printable",
    "write_junit",
    "write_report",
]


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
        num_prompts: how many texts were compared.
        prompts_sha256: SHA-256 of those texts.
        left_out: what a certificate asks for and was not compared, a line each.
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
    num_prompts: int
    prompts_sha256: str
    left_out: tuple[str, ...]
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
        """A full run, of everything, in which every rung passed or had no meaning."""
        is_full = not self.is_quick and not self.left_out and self.epsilon is not None
        return self.exit_code is ExitCode.DONE and is_full

    @property
    def stem(self) -> str:
        """Name of the report's file, but for its ending and what sets it apart from another."""
        stamp = self.utc.replace("-", "").replace(":", "").replace("+0000", "Z")
        return f"verify-{stamp}"

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
            "prompts": self.num_prompts,
            "prompts_sha256": self.prompts_sha256,
            "left_out": list(self.left_out),
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


def make_certificate(bundle: Bundle, report: LadderReport, *, path: Path) -> Certificate:
    """The certificate of a report that deserves one.

    Args:
        bundle: as it was verified.
        report: what was found.
        path: where the report was written.
    """
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
        digests=certified_digests(bundle.manifest, report.backend),
        facts_sha256=hash_facts(bundle.manifest),
        rungs={result.name: result.status.value for result in report.results},
        num_prompts=report.num_prompts,
        prompts_sha256=report.prompts_sha256,
        report=str(PurePosixPath(REPORTS_FOLDER) / path.name),
    )


def check_writable(folder: Path) -> None:
    """Require that a report and a manifest can be written into a bundle, before the long work.

    Raises:
        HostError: they cannot.
    """
    reports = folder / REPORTS_FOLDER
    is_good = os.access(folder, os.W_OK | os.X_OK) and (
        not os.path.lexists(reports) or (reports.is_dir() and os.access(reports, os.W_OK | os.X_OK))
    )
    if not is_good:
        raise HostError(
            f"the report is written into {printable(str(reports))}, which is not a folder that "
            "can be written; make it one, or verify a copy of the bundle"
        )


def write_report(report: LadderReport) -> Path:
    """Write the report into the bundle, in one step, under a name that no other has.

    Raises:
        HostError: the disk is full or not writable.
    """
    folder = report.bundle / REPORTS_FOLDER
    try:
        folder.mkdir(exist_ok=True)
        target = _reserve(folder, report.stem)
        try:
            _write_whole(target, json.dumps(report.record(), indent=2) + "\n")
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise HostError(
            f"could not write the report into {printable(str(folder))}: "
            f"{error.strerror or error}; {_advice(error)}, and verify again"
        ) from error
    return target


def _reserve(folder: Path, stem: str) -> Path:
    """An empty file of a new name."""
    for number in count(1):
        target = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            target.touch(exist_ok=False)
        except FileExistsError:
            if not folder.is_dir():
                raise
            continue
        return target
    raise AssertionError("unreachable: numbers do not end")


def _advice(error: OSError) -> str:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "free some space" if is_full else "make that folder writable"


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
            classname=printable(report.bundle.resolve().name),
            name=f"{case.number:02} {case.name}",
            time=f"{case.seconds:.3f}",
        )
        if case.status in tags:
            ET.SubElement(element, tags[case.status], message=printable(case.detail))
        else:
            ET.SubElement(element, "system-out").text = printable(case.detail)
    try:
        _write_whole(path, ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n")
    except OSError as error:
        raise UsageError(
            f"could not write {path}: {error.strerror or error}; choose another --junit"
        ) from error


def _count(cases: tuple[RungResult, ...], status: Status) -> str:
    return str(sum(case.status is status for case in cases))


def printable(text: str) -> str:
    """A text without what XML and terminals cannot hold: control characters, half characters."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _write_whole(path: Path, text: str) -> None:
    """Write beside, then rename, so that the file is whole or absent."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
