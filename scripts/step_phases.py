"""Measure where the time of a step goes outside its pass.

    .venv/bin/python scripts/step_phases.py engines/smollm2-135m

Greedy and sampled, plain and with lookaheads; writes docs/results/step_phases.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from la_export.bench.phases import Phase, PhaseTimes, time_phases
from la_export.bench.prompts import load_prompts, pick_prompts
from la_export.bench.results import Column, write_result
from la_runtime.generation import Engine
from la_runtime.sampling import SamplingParams

NUM_PROMPTS = 3
NUM_TOKENS = 64
WAYS: dict[str, dict[str, Any]] = {
    "greedy, k = 0": {"k": 0},
    "greedy, k = 4": {"k": 4},
    "greedy, k = 4, full": {"k": 4, "layout": "full"},
    "temperature 0.8, k = 0": {"k": 0, "temperature": 0.8},
    "temperature 0.8, k = 4": {"k": 4, "temperature": 0.8},
    "temperature 0.8, top_k 40, top_p 0.95, k = 4": {
        "k": 4,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
    },
}
COLUMNS = [
    Column(key="way", title="Decoding"),
    Column(key="steps", title="Steps"),
    Column(key="pass_ms", title="Pass (ms)", digits=1),
    Column(key="outside_us", title="Outside it (µs)", digits=0),
    *(Column(key=phase.value, title=phase.value, digits=0) for phase in Phase),
]


def row(way: str, found: PhaseTimes) -> dict[str, Any]:
    """One way's medians; said on stderr as they are measured."""
    click.echo(f"{way}: {found.outside_us:.0f} us beside {found.pass_ms:.1f} ms", err=True)
    return {
        "way": way,
        "steps": found.num_steps,
        "pass_ms": found.pass_ms,
        "outside_us": found.outside_us,
        **{phase.value: found.phases_us[phase] for phase in Phase},
    }


@click.command()
@click.argument(
    "bundle", type=click.Path(path_type=Path, exists=True), default=Path("engines/smollm2-135m")
)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("docs/results/step_phases.json")
)
def main(bundle: Path, threads: int, out: Path) -> None:
    """Measure and write the table."""
    with Engine.open(bundle, threads=threads) as engine:
        picked = pick_prompts(load_prompts(), per_group=1)
        encoded = [engine.encode(prompt.turns[0], chat=True) for prompt in picked]
        prompts = sorted(encoded, key=len)[:NUM_PROMPTS]
        engine.warmup()
        rows = [
            row(
                way,
                time_phases(
                    engine,
                    prompts,
                    SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, **options),
                ),
            )
            for way, options in WAYS.items()
        ]
    write_result(
        out,
        command=f".venv/bin/python scripts/step_phases.py {bundle}",
        columns=COLUMNS,
        rows=rows,
        facts={"threads": threads, "prompts": NUM_PROMPTS, "new_tokens": NUM_TOKENS},
    )


if __name__ == "__main__":
    main()
