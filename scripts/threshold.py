r"""Measure the paper's threshold rule: tokens per pass, speed, and how often the model agrees.

    .venv/bin/python scripts/threshold.py engines/smollm2-135m-int8 \
        engines/smollm2-135m-int8-untuned

Writes docs/results/threshold.json (the sweep over tau) and docs/results/threshold_paper.json (the
speed where agreement is the paper's).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click

from la_export.bench.report.paper import ACCEPTANCE, LENGTHS, SPEEDUPS
from la_export.bench.results import Column, write_result
from la_export.bench.speed.questions import load_questions
from la_runtime.generation import Engine
from la_runtime.results import GenerationResult
from la_runtime.sampling import Select

COLUMNS = [
    Column(key="lookaheads", title="Lookaheads"),
    Column(key="k", title="k"),
    Column(key="tau", title="tau"),
    Column(key="tokens_per_pass", title="Tokens per pass"),
    Column(key="speedup", title="Speedup over plain"),
    Column(key="reread", title="Emitted proposals"),
    Column(key="agreement", title="Agreement", digits=3),
    Column(key="equal", title="Answers equal to greedy", digits=2),
]
PAPER_COLUMNS = [
    Column(key="lookaheads", title="Lookaheads"),
    Column(key="k", title="k"),
    Column(key="paper_agreement", title="The paper's acceptance", digits=3),
    Column(key="paper_speedup", title="The paper's speedup"),
    Column(key="tau", title="tau"),
    Column(key="agreement", title="Agreement there", digits=3),
    Column(key="speedup", title="Speedup there"),
    Column(key="equal", title="Answers equal to greedy", digits=2),
]
# Of its first model, by k: acceptance and speedup.
PAPER = dict(zip(LENGTHS, zip(ACCEPTANCE[0].values, SPEEDUPS[0].values, strict=True), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One pass over all prompts."""

    results: tuple[GenerationResult, ...]

    @property
    def tokens_per_s(self) -> float:
        """Of decoding, over all prompts."""
        stats = [result.stats for result in self.results]
        tokens = sum(one.new_tokens - one.prefill_tokens for one in stats)
        return tokens / sum(one.decode_s for one in stats)


@click.command()
@click.argument("bundles", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
@click.option("--k", "ks", type=int, multiple=True, default=(2, 4, 8), show_default=True)
@click.option(
    "--tau",
    "taus",
    type=float,
    multiple=True,
    default=(0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95),
    show_default=True,
)
@click.option("--per-category", type=int, default=1, show_default=True)
@click.option("--new-tokens", type=int, default=128, show_default=True)
@click.option("--threads", type=int, default=0)
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/results/threshold.json"))
def main(
    bundles: tuple[Path, ...],
    ks: tuple[int, ...],
    taus: tuple[float, ...],
    per_category: int,
    new_tokens: int,
    threads: int,
    out: Path,
) -> None:
    """Make both tables and write them."""
    rows: list[dict[str, Any]] = []
    for bundle in bundles:
        with Engine.open(bundle, threads=threads) as engine:
            picked = load_questions(None, per_category=per_category, fits=lambda _: True)
            prompts = [engine.encode(prompt.text, chat=True) for prompt in picked]
            origin = engine.bundle.manifest.lookahead.origin
            for k in ks:
                # Plain decoding right before, so that the machine is in the same mood.
                plain = _run(engine, prompts, new_tokens, k=0)
                for tau in taus:
                    run = _run(engine, prompts, new_tokens, k=k, select=Select.THRESHOLD, tau=tau)
                    rows.append({"lookaheads": origin, "k": k, "tau": tau, **_measure(run, plain)})
                    click.echo(", ".join(f"{n} {v}" for n, v in rows[-1].items()), err=True)
    command = " ".join([".venv/bin/python scripts/threshold.py", *map(str, bundles)])
    facts = {"prompts": len(prompts), "new_tokens": new_tokens}
    write_result(out, command=command, columns=COLUMNS, rows=rows, facts=facts)
    write_result(
        out.with_name(f"{out.stem}_paper.json"),
        command=command,
        columns=PAPER_COLUMNS,
        rows=list(_beside_paper(rows)),
        facts=facts,
    )


def _run(engine: Engine, prompts: list[list[int]], new_tokens: int, **params: Any) -> Run:
    return Run(
        results=tuple(
            engine.generate(prompt, max_new_tokens=new_tokens, **params) for prompt in prompts
        )
    )


def _measure(run: Run, plain: Run) -> dict[str, float | None]:
    stats = [result.stats for result in run.results]
    reread = sum(one.reread for one in stats)
    passes = sum(one.passes - one.prefill_passes for one in stats)
    equal = [
        result.token_ids == truth.token_ids
        for result, truth in zip(run.results, plain.results, strict=True)
    ]
    return {
        "tokens_per_pass": sum(one.new_tokens - one.prefill_tokens for one in stats) / passes,
        "speedup": run.tokens_per_s / plain.tokens_per_s,
        "reread": reread,
        "agreement": sum(one.agreed for one in stats) / reread if reread else None,
        "equal": sum(equal) / len(equal),
    }


def _beside_paper(rows: list[dict[str, Any]]) -> Any:
    """The smallest tau whose agreement is at least the paper's; none where there is no such."""
    origins = dict.fromkeys(row["lookaheads"] for row in rows)
    for origin, (k, (agreement, speedup)) in product(origins, PAPER.items()):
        reached = [
            row
            for row in rows
            if (row["lookaheads"], row["k"]) == (origin, k)
            and row["agreement"] is not None
            and row["agreement"] >= agreement
        ]
        best = max(reached, key=lambda row: row["speedup"], default=None)
        yield {
            "lookaheads": origin,
            "k": k,
            "paper_agreement": agreement,
            "paper_speedup": speedup,
            **{
                key: "not reached" if best is None else best[key]
                for key in ("tau", "agreement", "speedup", "equal")
            },
        }


if __name__ == "__main__":
    main()
