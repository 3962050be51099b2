"""Who takes part: peers made ready to start, bundles of ours, and who is absent and why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from la_export.bench.peers.environments import ensure_environment
from la_export.bench.peers.process import Job
from la_export.bench.peers.programs import DRIVERS, Option, PeerWeights, Program, Way
from la_export.bench.peers.race import Contestant, Entry, Report
from la_export.bench.speed.record import PeerMode
from la_runtime.bundle import Manifest
from la_runtime.errors import LookaheadError, UsageError

__all__ = [
    "OURS",
    "Field",
    "Need",
    "check_k",
    "check_names",
    "make_bundle_contestants",
    "make_field",
]

OURS = "Lookahead Attention"

WeightMaker = Callable[[Program, PeerWeights], Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What every process of a race is started with.

    Args:
        threads: for one pass.
        context: positions that the longest prompt and its answer take.
        eos_token_ids: that end an answer.
    """

    threads: int
    context: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """All entries, in the order of the table.

    Args:
        entries: every one.
        contestants: those that can be started.
        absent: why the others cannot, by name.
    """

    entries: tuple[Entry, ...]
    contestants: tuple[Contestant, ...]
    absent: Mapping[str, str]


def check_names(wanted: Sequence[str], programs: Sequence[Program]) -> tuple[Program, ...]:
    """The programs of these names, all without any.

    Raises:
        UsageError: there is no such peer.
    """
    known = {program.name: program for program in programs}
    for name in wanted:
        if name not in known:
            raise UsageError(f"there is no peer {name!r}; expected one of {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(wanted)) or tuple(programs)


def check_k(folder: Path, manifest: Manifest, wanted: int) -> None:
    """Refuse a lookahead length that a bundle was not built for.

    Raises:
        UsageError: it was not.
    """
    built = manifest.lookahead_lengths
    if wanted not in built:
        raise UsageError(
            f"{folder} was not built for k = {wanted}; choose --k of "
            f"{', '.join(map(str, built))}, or build it again"
        )


def make_bundle_contestants(
    name: str, folder: Path, manifest: Manifest, *, k: int | None, need: Need
) -> tuple[Contestant, ...]:
    """A bundle of ours, plain and with drafts.

    Args:
        name: what the table calls the bundle.
        folder: where it is.
        manifest: of it.
        k: slots of the second, a draft each; None plans over drafts of every source.
        need: of all processes.
    """
    ways: Sequence[tuple[PeerMode, str, Mapping[str, Option]]] = (
        (PeerMode.PLAIN, "plain", {"k": 0}),
        (PeerMode.BEST, "planned", {})
        if k is None
        else (PeerMode.BEST, f"lookahead, k = {k}", {"k": k}),
    )
    return tuple(
        Contestant(
            entry=Entry(
                peer=f"{OURS} ({name})",
                precision=manifest.precision,
                mode=mode,
                mode_name=mode_name,
            ),
            job=Job(
                python=Path(sys.executable),
                driver=DRIVERS / "lookahead_driver.py",
                model=folder.resolve(),
                threads=need.threads,
                context=need.context,
                eos_token_ids=need.eos_token_ids,
                options=options,
            ),
        )
        for mode, mode_name, options in ways
    )


def make_field(
    programs: Sequence[Program],
    *,
    cache: Path,
    need: Need,
    make_weights: WeightMaker,
    report: Report,
) -> Field:
    """Install the peers and make their weights. What cannot be had is absent.

    Args:
        programs: the peers.
        cache: where they are kept.
        need: of all processes.
        make_weights: finds or makes a peer's weights.
        report: told in a line what takes long.
    """
    entries: list[Entry] = []
    contestants: list[Contestant] = []
    absent: dict[str, str] = {}
    for program in programs:
        for weights in program.weights:
            found = [_make_entry(program, weights, way) for way in program.ways]
            entries += found
            try:
                if not program.environment.is_ready(cache):
                    report(f"installing {program.name} (once; some minutes)")
                    ensure_environment(program.environment, cache)
                model = make_weights(program, weights)
            except LookaheadError as error:
                report(f"{program.name} {weights.precision} is absent: {error}")
                absent |= {entry.name: str(error) for entry in found}
                continue
            for entry, way in zip(found, program.ways, strict=True):
                job = Job(
                    python=program.environment.python(cache),
                    driver=DRIVERS / program.driver,
                    model=model,
                    threads=need.threads,
                    context=need.context,
                    eos_token_ids=need.eos_token_ids,
                    options=way.options,
                )
                contestants.append(Contestant(entry=entry, job=job))
    return Field(entries=tuple(entries), contestants=tuple(contestants), absent=absent)


def _make_entry(program: Program, weights: PeerWeights, way: Way) -> Entry:
    return Entry(peer=program.name, precision=weights.precision, mode=way.mode, mode_name=way.name)
