"""The body of `scripts/bench_peers`: other programs and bundles of ours on the same prompts."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import click

from la_export.bench.peers.contest import Settings, Standing, hold_contest
from la_export.bench.peers.entries import (
    Field,
    check_k,
    check_names,
    make_bundle_contestants,
    make_field,
)
from la_export.bench.peers.figures import lap_rows, make_columns, make_rows, make_runs
from la_export.bench.peers.programs import PeerWeights, Program, make_programs
from la_export.bench.peers.race import Contestant
from la_export.bench.peers.task import Task, load_task
from la_export.bench.peers.weights import ensure_source, ensure_weights
from la_export.bench.results import Result, write_result
from la_export.bench.tables import render_table
from la_export.checkpoint import ModelSource, find_model, load_checkpoint
from la_runtime.errors import ExitCode, LookaheadError, UsageError

_CACHE: Final = Path("~/.cache/lookahead-attention/peers")
_RESULT: Final = Path("docs/results/peers.json")


def _say(line: str) -> None:
    """Progress, with the time of day, on stderr."""
    click.echo(f"{time.strftime('%H:%M:%S')} {line}", err=True)


@click.command(context_settings={"max_content_width": 100})
@click.option(
    "--bundle",
    "bundles",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    multiple=True,
    default=(Path("engines/smollm2-135m"),),
    show_default=True,
    help="Bundle of ours that takes part; again for more. Ratios are over the first.",
)
@click.option("--model", default="smollm2-135m", show_default=True, help="What it was built from.")
@click.option("--k", type=click.IntRange(min=1), help="Slots alone.  [default: planned]")
@click.option("--peers", metavar="NAME,...", default="", help="Only these.  [default: all]")
@click.option(
    "--environments",
    type=click.Path(path_type=Path, file_okay=False),
    default=_CACHE,
    show_default=True,
    help="Where the peers' environments and weights are kept.",
)
@click.option(
    "--per-category", type=click.IntRange(min=1), default=1, show_default=True, help="Prompts."
)
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--new-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="[default: as many as there are cores]")
@click.option(
    "--perplexity-tokens",
    type=click.IntRange(min=0),
    default=4096,
    show_default=True,
    help="Tokens whose probability is taken; 0 for none.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Begin no further prompt after so many minutes of measuring.  [default: no limit]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    default=_RESULT,
    show_default=True,
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def main(
    bundles: tuple[Path, ...],
    model: str,
    k: int | None,
    peers: str,
    environments: Path,
    per_category: int,
    rounds: int,
    new_tokens: int,
    threads: int | None,
    perplexity_tokens: int,
    minutes: float | None,
    out: Path,
    *,
    as_json: bool,
) -> None:
    """Decode the benchmark's prompts with other programs and with bundles of ours, in turn.

    Each program has its own environment and process. The first run installs them, which takes
    minutes. What cannot be had here is named as absent.
    """
    cache = environments.expanduser().absolute()
    programs = check_names([name for name in peers.split(",") if name], make_programs())
    source = find_model(model, revision=None, allow_bin=False)
    task = load_task(
        list(dict.fromkeys(bundle.resolve() for bundle in bundles)),
        per_category=per_category,
        new_tokens=new_tokens,
        perplexity_tokens=perplexity_tokens,
        threads=threads or len(os.sched_getaffinity(0)),
        report=_say,
    )
    if task.bundles[0].manifest.model.source_digest != source.digest():
        raise UsageError(f"{bundles[0]} was not built from {model}; name its source with --model")
    if k is not None:
        for bundle in task.bundles:
            check_k(bundle.folder, bundle.manifest, k)
    ours = _enter_bundles(task, k)
    _say(f"what the programs print goes to {cache / 'logs'}")
    settings = Settings(rounds=rounds, new_tokens=new_tokens, minutes=minutes, logs=cache / "logs")
    field = _enter_peers(programs, source, cache, task, ours)
    began = time.monotonic()
    standing = hold_contest(field, task, settings, _say)
    _say(f"done after {time.monotonic() - began:.0f} s")
    _show(_write(out, standing, task, settings, programs, ours), as_json=as_json)


def _enter_bundles(task: Task, k: int | None) -> tuple[Contestant, ...]:
    """Each bundle of ours, plain and with drafts."""
    names = [bundle.folder.name for bundle in task.bundles]
    return tuple(
        contestant
        for name, bundle in zip(names, task.bundles, strict=True)
        for contestant in make_bundle_contestants(
            name if names.count(name) == 1 else str(bundle.folder),
            bundle.folder,
            bundle.manifest,
            k=k,
            need=task.need,
        )
    )


def _enter_peers(
    programs: Sequence[Program],
    source: ModelSource,
    cache: Path,
    task: Task,
    ours: Sequence[Contestant],
) -> Field:
    """Everyone, bundles of ours first."""

    def make_weights(program: Program, weights: PeerWeights) -> Path:
        float32 = ensure_source(source, cache, partial(load_checkpoint, context=None), _say)
        return ensure_weights(
            weights, program.environment, source=source, float32=float32, cache=cache, report=_say
        )

    field = make_field(
        programs, cache=cache, need=task.need, make_weights=make_weights, report=_say
    )
    return replace(
        field,
        entries=(*(one.entry for one in ours), *field.entries),
        contestants=(*ours, *field.contestants),
    )


def _write(
    out: Path,
    standing: Standing,
    task: Task,
    settings: Settings,
    programs: Sequence[Program],
    ours: Sequence[Contestant],
) -> Result:
    # The first bundle's two ways come first.
    reference = {one.entry.mode: one.name for one in ours[:2]}
    laps = [lap for found in standing.laps.values() for lap in found]
    runs = make_runs(standing, threads=task.need.threads)
    return write_result(
        out,
        command=shlex.join(["scripts/bench_peers", *sys.argv[1:]]),
        columns=make_columns(standing),
        rows=make_rows(standing, reference),
        facts={
            "threads": task.need.threads,
            "new_tokens": settings.new_tokens,
            "prompts": len(task.prompts),
            "prompts_sha256": task.prompts_sha256,
            "rounds": settings.rounds,
            "perplexity_tokens": {
                "own answers": sum(window.num_scored for window in task.texts.own),
                "pages": sum(window.num_scored for window in task.texts.pages),
            },
            "statistic": "median over prompts and rounds",
            "ours_over_this": list(reference.values()),
            "installed": {
                program.name: {
                    "requirements": list(program.environment.requirements),
                    "variables": dict(program.environment.variables),
                }
                for program in programs
            },
            "peers": [run.model_dump(mode="json") for run in runs],
            "answers": lap_rows(laps),
        },
    )


def _show(result: Result, *, as_json: bool) -> None:
    click.echo(result.model_dump_json(indent=1) if as_json else render_table(result))


if __name__ == "__main__":
    try:
        main.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except LookaheadError as error:
        click.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(int(error.exit_code))
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(int(ExitCode.INTERRUPTED))
