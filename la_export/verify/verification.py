"""A verification from end to end: open, climb the ladder, report, certify."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from la_export.verify.findings import RungResult, Status, Suspect, join_results
from la_export.verify.ladder import (
    FULL,
    Ladder,
    LadderProgress,
    LadderSettings,
    Rung,
    climb,
)
from la_export.verify.prompts import PROMPTS, LadderPrompt, hash_prompts
from la_export.verify.reference import SourceModel
from la_export.verify.report import (
    LadderReport,
    make_certificate,
    now_utc,
    write_report,
)
from la_export.verify.rungs import RUNGS
from la_runtime.backends import check_backend, open_backend, read_processor
from la_runtime.backends.availability import check_precision
from la_runtime.backends.base import Backend
from la_runtime.backends.trt_plan import choose_plan
from la_runtime.bundle import Bundle, Manifest, open_bundle
from la_runtime.certificate import (
    SELF_REFERENCE,
    TORCH_REFERENCE,
    certified_digests,
    check_unchanged,
    read_backend_version,
    withdraw_certificates,
    write_certificate,
)
from la_runtime.errors import BundleError, ExitCode, LookaheadError, UsageError
from la_runtime.plans import PlanFacts, PlanTarget

__all__ = ["BISECTED_RUNGS", "Published", "VerifyOptions", "departs", "publish", "verify"]

# Rungs that compare logits with PyTorch's; what fails them has a place in the graph.
BISECTED_RUNGS: Final = frozenset({2, 10, 14})

OpenSource = Callable[[Bundle], SourceModel]
Bisect = Callable[[Bundle, SourceModel, Suspect], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What to verify, and how much.

    Args:
        bundle: the bundle's folder.
        backend: what runs the graph.
        lookahead_lengths: values of k; those the bundle was built for when empty.
        prompts: texts; the shipped ones when empty.
        settings: how much is compared.
        threads: of one pass; 0 lets the library choose.
    """

    bundle: Path
    backend: str = "ort-cpu"
    lookahead_lengths: tuple[int, ...] = ()
    prompts: tuple[LadderPrompt, ...] = ()
    settings: LadderSettings = FULL
    threads: int = 0

    @property
    def is_quick(self) -> bool:
        """Whether less is compared than a certificate asks for."""
        return self.settings != FULL


def verify(
    options: VerifyOptions,
    *,
    open_source: OpenSource | None = None,
    bisect: Bisect | None = None,
    further_rungs: Sequence[Rung] = (),
    progress: LadderProgress | None = None,
) -> tuple[LadderReport, Bundle | None]:
    """Climb the whole ladder; nothing is written.

    Args:
        options: what to verify.
        open_source: opens the checkpoint to compare with; None compares the bundle with itself.
        bisect: looks for the layer when logits differ from PyTorch's.
        further_rungs: climbed after the others.
        progress: is told of each rung.

    Returns:
        The report, and the bundle as it was verified; None if it cannot be opened, which is what
        the first rung then says.

    Raises:
        UsageError: no bundle there, or an option is impossible.
        NotRunError: the checkpoint cannot be opened.
    """
    check_backend(options.backend)
    began = time.perf_counter()
    is_torch = open_source is not None
    try:
        bundle = open_bundle(
            options.bundle,
            check=lambda manifest: check_precision(options.backend, manifest.contract),
        )
        _check_lengths(options, bundle.manifest)
        source = None if open_source is None else open_source(bundle)
        climbs = _climbs(options, bundle.manifest)
        climbed = []
        opening_s = 0.0
        departure = ""
        for one in climbs:
            with closing(
                open_backend(options.backend, bundle, threads=options.threads, k=one.k)
            ) as backend:
                chosen = replace(options, lookahead_lengths=one.lookahead_lengths)
                ladder = _make_ladder(chosen, bundle, backend, source)
                opening_s = opening_s or time.perf_counter() - began
                results = climb(ladder, (*RUNGS, *further_rungs), progress)
                climbed.append((one.name, results))
                if not departure and bisect is not None and source is not None and departs(results):
                    departure = _locate(bisect, bundle, source, _suspect(ladder, results))
        results = join_results(climbed)
    except BundleError as error:
        results = _refused(str(error), seconds=time.perf_counter() - began)
        if progress is not None:
            progress.finish(results[0])
        return _make_report(options, None, is_torch=is_torch, results=results, opened=()), None
    results = (replace(results[0], seconds=results[0].seconds + opening_s), *results[1:])
    opened = tuple(one.plan for one in climbs if one.plan is not None)
    report = _make_report(options, ladder, is_torch=is_torch, results=results, opened=opened)
    return replace(report, departure=departure), bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Climb:
    """One ladder to climb.

    Args:
        name: what it is called beside others.
        k: lookahead length to open the backend for; None for all that it opens.
        lookahead_lengths: those to compare; those the bundle was built for when empty.
        plan: path of the plan it runs; None without one.
    """

    name: str
    k: int | None
    lookahead_lengths: tuple[int, ...]
    plan: str | None


def _climbs(options: VerifyOptions, manifest: Manifest) -> tuple[_Climb, ...]:
    """One for the graph, or one for each plan that serves a length to verify.

    Raises:
        UsageError: no plan serves a length that was asked for.
    """
    asked = options.lookahead_lengths
    plans = _plans_of(options, manifest)
    if not plans:
        return (_Climb(name=options.backend, k=None, lookahead_lengths=asked, plan=None),)
    built = {k for plan in plans for k in plan.lookahead_lengths}
    target = PlanTarget(options.backend)
    serving = {choose_plan(manifest, target, k).path for k in asked or built}
    lengths = sorted({*(asked or manifest.lookahead_lengths)} - {0})
    climbs = []
    for plan in plans:
        k = max(plan.lookahead_lengths)
        if plan.path in serving:
            within = tuple(length for length in lengths if length <= k)
            name = f"plan for k={k}"
            climbs.append(_Climb(name=name, k=k, lookahead_lengths=within or (0,), plan=plan.path))
    return tuple(climbs)


def _plans_of(options: VerifyOptions, manifest: Manifest) -> list[PlanFacts]:
    """The backend's plans, the one for the largest k last."""
    plans = (plan for plan in manifest.plans if plan.target == options.backend)
    return sorted(plans, key=lambda plan: max(plan.lookahead_lengths))


def _make_ladder(
    options: VerifyOptions, bundle: Bundle, backend: Backend, source: SourceModel | None
) -> Ladder:
    try:
        return Ladder(
            bundle,
            backend,
            source=source,
            settings=options.settings,
            lookahead_lengths=options.lookahead_lengths,
            prompts=options.prompts,
            backend_name=options.backend,
            threads=options.threads,
        )
    except UsageError as error:
        if options.prompts:
            raise
        # Our own prompts are good; what refuses them is the bundle's tokenizer or template.
        raise BundleError(f"the bundle refuses the ladder's own prompts: {error}") from error


def _check_lengths(options: VerifyOptions, manifest: Manifest) -> None:
    built = manifest.lookahead_lengths
    for k in options.lookahead_lengths:
        if not 1 <= k <= max(built):
            raise UsageError(
                f"--k {k} is out of range; this bundle was built for up to {max(built)}, and 0 is "
                "what everything is compared with"
            )


def _refused(reason: str, *, seconds: float) -> tuple[RungResult, ...]:
    """The first rung failed, and nothing else has anything to stand on."""
    first = RungResult(
        number=RUNGS[0].number,
        name=RUNGS[0].name,
        status=Status.FAILED,
        figures=(),
        detail=reason,
        seconds=seconds,
    )
    others = (
        RungResult(
            number=rung.number,
            name=rung.name,
            status=Status.SKIPPED,
            figures=(),
            detail="the bundle cannot be opened",
            seconds=0.0,
        )
        for rung in RUNGS[1:]
    )
    return (first, *others)


def _suspect(ladder: Ladder, results: Sequence[RungResult]) -> Suspect:
    """The first text whose logits differ."""
    found = (r.suspect for r in results if r.number in BISECTED_RUNGS and r.suspect is not None)
    return next(found, Suspect(token_ids=ladder.prompts[0].token_ids))


def _locate(bisect: Bisect, bundle: Bundle, source: SourceModel, suspect: Suspect) -> str:
    """Where the graph departs; a graph that cannot be searched costs nobody the report."""
    try:
        return bisect(bundle, source, suspect)
    except LookaheadError as error:
        return f"bisect could not be run: {error}"


def departs(results: Sequence[RungResult]) -> bool:
    """Whether logits differ from the reference's."""
    return any(
        result.number in BISECTED_RUNGS and result.status is Status.FAILED for result in results
    )


def _make_report(
    options: VerifyOptions,
    ladder: Ladder | None,
    *,
    is_torch: bool,
    results: tuple[RungResult, ...],
    opened: tuple[str, ...],
) -> LadderReport:
    epsilons = [
        figure.value
        for result in results
        for figure in result.figures
        if figure.name.partition(",")[0] == "epsilon"
    ]
    return LadderReport(
        bundle=options.bundle,
        utc=now_utc(),
        reference=TORCH_REFERENCE if is_torch else SELF_REFERENCE,
        backend=options.backend,
        backend_version=read_backend_version(options.backend),
        processor=read_processor(options.backend),
        threads=options.threads,
        is_quick=options.is_quick,
        lookahead_lengths=() if ladder is None else ladder.lookahead_lengths,
        epsilon=max(epsilons, default=None),
        digests={} if ladder is None else certified_digests(ladder.manifest, options.backend),
        num_prompts=0 if ladder is None else len(ladder.prompts),
        prompts_sha256=hash_prompts(options.prompts or PROMPTS[: options.settings.prompts]),
        left_out=() if ladder is None else tuple(_left_out(options, ladder, opened)),
        results=results,
    )


def _left_out(options: VerifyOptions, ladder: Ladder, opened: tuple[str, ...]) -> Iterator[str]:
    """What a certificate asks for beside a full run's thoroughness."""
    manifest = ladder.manifest
    plans = _plans_of(options, manifest)
    unopened = [plan.path for plan in plans if plan.path not in opened]
    if unopened:
        yield f"the plan {', '.join(unopened)}; leave --k out"
    built = {k for plan in plans for k in plan.lookahead_lengths} or {*manifest.lookahead_lengths}
    missing = sorted(built - {0, *ladder.lookahead_lengths})
    if missing:
        yield f"lookahead length {', '.join(map(str, missing))}, which the bundle was built for"
    texts = {prompt.text for prompt in options.prompts}
    if options.prompts and not texts >= {prompt.text for prompt in PROMPTS}:
        yield "the prompts that ship with the package; leave --prompts out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What was written into a bundle.

    Args:
        report: the report's file.
        is_certified: whether a certificate was.
        num_withdrawn: certificates that were taken away, because a rung failed.
    """

    report: Path
    is_certified: bool
    num_withdrawn: int


def publish(report: LadderReport, bundle: Bundle, *, certify: bool) -> Published:
    """Write the report into the bundle, and a certificate if it deserves one.

    A rung that failed, in a quick run, too, takes away the certificates for the same backend.

    Args:
        report: what was found.
        bundle: as it was verified.
        certify: whether certificates may be written and taken away.

    Raises:
        HostError: the disk is full or not writable.
        BundleError: the bundle was rebuilt in the meantime; nothing was written.
    """
    check_unchanged(bundle)
    path = write_report(report)
    num_withdrawn = 0
    if certify and report.deserves_certificate:
        write_certificate(bundle, make_certificate(bundle, report, path=path))
    elif certify and report.exit_code is ExitCode.FAILED:
        num_withdrawn = withdraw_certificates(bundle, backend=report.backend)
    return Published(
        report=path,
        is_certified=certify and report.deserves_certificate,
        num_withdrawn=num_withdrawn,
    )
