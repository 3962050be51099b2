"""Measure the paper's threshold rule: tokens per pass, and how often the model agrees.

    .venv/bin/python scripts/threshold.py engines/smollm2-135m-all

Writes docs/results/threshold.json.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import click

from la_export.bench.prompts import load_prompts, pick_prompts
from la_export.bench.results import Column, write_result
from la_runtime.generation import Engine
from la_runtime.sampling import Select

COLUMNS = [
    Column(key="k", title="k"),
    Column(key="tau", title="tau", digits=1),
    Column(key="tokens_per_pass", title="Tokens per pass"),
    Column(key="reread", title="Emitted proposals"),
    Column(key="agreement", title="Agreement", digits=3),
]


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--k", "ks", type=int, multiple=True, default=(2, 4, 8), show_default=True)
@click.option(
    "--tau", "taus", type=float, multiple=True, default=(0.0, 0.1, 0.5, 0.9), show_default=True
)
@click.option("--per-group", type=int, default=1, show_default=True, help="Prompts per group.")
@click.option("--new-tokens", type=int, default=45, show_default=True)
@click.option("--threads", type=int, default=0)
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/results/threshold.json"))
def main(
    bundle: Path,
    ks: tuple[int, ...],
    taus: tuple[float, ...],
    per_group: int,
    new_tokens: int,
    threads: int,
    out: Path,
) -> None:
    """Make the table and write it."""
    rows = []
    with Engine.open(bundle, threads=threads) as engine:
        picked = pick_prompts(load_prompts(), per_group=per_group)
        prompts = [engine.encode(prompt.turns[0], chat=True) for prompt in picked]
        for k, tau in product(ks, taus):
            stats = [
                engine.generate(
                    prompt,
                    k=k,
                    select=Select.THRESHOLD,
                    tau=tau,
                    max_new_tokens=new_tokens,
                    ignore_eos=True,
                ).stats
                for prompt in prompts
            ]
            reread = sum(one.reread for one in stats)
            row = {
                "k": k,
                "tau": tau,
                "tokens_per_pass": sum(one.new_tokens - one.prefill_tokens for one in stats)
                / sum(one.passes - one.prefill_passes for one in stats),
                "reread": reread,
                "agreement": sum(one.agreed for one in stats) / reread if reread else None,
            }
            rows.append(row)
            click.echo(", ".join(f"{key} {value}" for key, value in row.items()), err=True)
    write_result(
        out,
        command=f".venv/bin/python scripts/threshold.py {bundle} --per-group {per_group}",
        columns=COLUMNS,
        rows=rows,
        facts={"prompts": len(prompts), "new_tokens": new_tokens, "vectors": "untuned"},
    )


if __name__ == "__main__":
    main()
