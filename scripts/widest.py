"""Measure tokens per pass where rows cost nothing: all sources in a tree, at most 32 rows a pass.

    .venv/bin/python scripts/widest.py engines/smollm2-135m-int8 engines/smollm2-135m-int8-untuned

That is what a machine gains whose passes of 32 rows take as long as those of one; how fast this
one is is not part of it. Writes docs/results/widest.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from la_export.bench.results import Column, write_result
from la_export.bench.speed.questions import load_questions
from la_runtime.generation import Engine
from la_runtime.source_names import SourceName
from la_runtime.step_costs import StepCosts

COLUMNS = [
    Column(key="lookaheads", title="Lookaheads"),
    Column(key="sources", title="Sources"),
    Column(key="category", title="Category"),
    Column(key="prompts", title="Prompts"),
    Column(key="tokens_per_pass", title="Tokens per pass"),
    Column(key="rows_per_pass", title="Rows per pass", digits=1),
    Column(key="equal", title="Answers as plain"),
]
OVERALL = "overall"
# Hardly anything, so that a draft that cannot stand is left out.
FREE = StepCosts([(1, 1.0), (32, 1.01)])
ALL = tuple(SourceName)


@click.command()
@click.argument("bundles", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
@click.option("--per-category", type=int, default=1, show_default=True)
@click.option("--new-tokens", type=int, default=128, show_default=True)
@click.option("--threads", type=int, default=0)
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/results/widest.json"))
def main(
    bundles: tuple[Path, ...], per_category: int, new_tokens: int, threads: int, out: Path
) -> None:
    """Make the table and write it."""
    rows: list[dict[str, Any]] = []
    for bundle in bundles:
        with Engine.open(bundle, threads=threads) as engine:
            engine.use_costs(FREE)
            origin = engine.bundle.manifest.lookahead.origin
            questions = load_questions(None, per_category=per_category, fits=lambda _: True)
            prompts = [(q.category, engine.encode(q.text, chat=True)) for q in questions]
            plain = [engine.generate(p, k=0, max_new_tokens=new_tokens) for _, p in prompts]
            for sources in (ALL, (SourceName.LOOKAHEAD,)):
                counts: dict[str, list[int]] = {}
                for (category, prompt), truth in zip(prompts, plain, strict=True):
                    found = engine.generate(prompt, sources=sources, max_new_tokens=new_tokens)
                    stats = found.stats
                    passes = stats.passes - stats.prefill_passes
                    one = [
                        1,
                        stats.new_tokens - stats.prefill_tokens,
                        passes,
                        stats.rows - stats.prefill_rows,
                        int(found.token_ids == truth.token_ids),
                    ]
                    for key in (category, OVERALL):
                        total = counts.setdefault(key, [0] * len(one))
                        counts[key] = [a + b for a, b in zip(total, one, strict=True)]
                for category in (*(name for name in counts if name != OVERALL), OVERALL):
                    number, tokens, passes, num_rows, equal = counts[category]
                    rows.append(
                        {
                            "lookaheads": origin,
                            "sources": "all" if sources == ALL else ", ".join(sources),
                            "category": category,
                            "prompts": number,
                            "tokens_per_pass": tokens / max(1, passes),
                            "rows_per_pass": num_rows / max(1, passes),
                            "equal": equal,
                        }
                    )
                click.echo(", ".join(f"{n} {v}" for n, v in rows[-1].items()), err=True)
    write_result(
        out,
        command=" ".join([".venv/bin/python scripts/widest.py", *map(str, bundles)]),
        columns=COLUMNS,
        rows=rows,
        facts={"per_category": per_category, "new_tokens": new_tokens},
    )


if __name__ == "__main__":
    main()
