"""Compare bundles of one model in several cache forms and precisions, token by token.

    .venv/bin/python scripts/cache_forms.py engines/smollm2-135m engines/smollm2-135m-scatter \
        engines/smollm2-135m-fp16 engines/smollm2-135m-scatter-fp16

The bundles are built from one model, with every k asked for:

    la-export build --model smollm2-135m --k 2 --k 4 --k 8 --cache-form scatter --context 512 \
        --precision fp16 --out engines/smollm2-135m-scatter-fp16

Float32 bundles are compared with plain decoding of the first of them, others with their own plain
decoding. Ends with exit code 1 if any token differs without excuse, or near-ties are too many.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from la_export.bench.cache_forms import FormRuns, compare_forms, decode_form, make_ways
from la_export.bench.exactness import EncodedPrompt, encode_prompts
from la_export.bench.prompts import load_prompts
from la_export.bench.results import Column, write_result
from la_runtime.bundle import Manifest
from la_runtime.errors import UsageError
from la_runtime.generation import Engine

COLUMNS = [
    Column(key="precision", title="Arithmetic"),
    Column(key="cache_form", title="Cache form"),
    Column(key="k", title="k"),
    Column(key="proposals", title="Proposals"),
    Column(key="reference", title="Compared with"),
    Column(key="prompts", title="Prompts"),
    Column(key="tokens", title="Tokens"),
    Column(key="equal", title="Equal"),
    Column(key="excused", title="Near-ties"),
    Column(key="different", title="Different"),
    Column(key="tokens_per_pass", title="Tokens per pass"),
]


def say(line: str) -> None:
    """Progress, with the time of day, on stderr."""
    click.echo(f"{time.strftime('%H:%M:%S')} {line}", err=True)


@click.command()
@click.argument("bundles", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
@click.option("--k", "ks", type=int, multiple=True, default=(2, 4, 8), show_default=True)
@click.option("--prompts", "num_prompts", type=int, default=20, show_default=True)
@click.option("--longest", type=int, default=400, show_default=True, help="Tokens of a prompt.")
@click.option("--new-tokens", type=int, default=32, show_default=True)
@click.option("--epsilon-positions", type=int, default=1000, show_default=True)
@click.option("--threads", type=int, default=1, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("docs/results/cache_forms.json")
)
def main(
    bundles: tuple[Path, ...],
    ks: tuple[int, ...],
    num_prompts: int,
    longest: int,
    new_tokens: int,
    epsilon_positions: int,
    threads: int,
    out: Path,
) -> None:
    """Decode on one bundle after the other, and write the table."""
    prompts: list[EncodedPrompt] = []
    forms: list[FormRuns] = []
    built: list[str] = []
    for bundle in bundles:
        with Engine.open(bundle, threads=threads) as engine:
            manifest = engine.bundle.manifest
            if longest + new_tokens > manifest.model.context:
                raise UsageError(
                    f"{longest} + {new_tokens} tokens do not fit into the context of {bundle}, "
                    f"{manifest.model.context} tokens; choose a smaller --longest or --new-tokens"
                )
            prompts = prompts or encode_prompts(engine, load_prompts(), longest=longest)
            if len(prompts) < num_prompts:
                raise UsageError(
                    f"{num_prompts} prompts are wanted, {len(prompts)} have at most {longest} "
                    "tokens"
                )
            say(f"{bundle}: {num_prompts} prompts, plainly and with k of {', '.join(map(str, ks))}")
            forms.append(
                decode_form(
                    engine,
                    prompts[:num_prompts],
                    make_ways(ks),
                    new_tokens=new_tokens,
                    epsilon_positions=epsilon_positions,
                )
            )
            built.append(describe_build(manifest))
    rows, problems = compare_forms(forms, [prompt.name for prompt in prompts[:num_prompts]])
    for row in rows:
        say(", ".join(f"{key} {value}" for key, value in row.items()))
    for line in problems:
        say(line)
    k_options = " ".join(f"--k {k}" for k in ks)
    write_result(
        out,
        command=(
            f".venv/bin/python scripts/cache_forms.py {' '.join(map(str, bundles))} {k_options} "
            f"--prompts {num_prompts} --longest {longest} --new-tokens {new_tokens} "
            f"--epsilon-positions {epsilon_positions}"
        ),
        columns=COLUMNS,
        rows=rows,
        facts={
            "bundles": dict(zip(map(str, bundles), built, strict=True)),
            "measured_epsilon": {form.name: form.measured_epsilon for form in forms},
            "excused_limit": {form.name: form.tolerance.excused_share for form in forms},
            "tokens": sum(int(row["tokens"] or 0) for row in rows),
            "not_excused": problems,
        },
    )
    say(f"{'differences' if problems else 'no difference but near-ties'}: {out}")
    sys.exit(bool(problems))


def describe_build(manifest: Manifest) -> str:
    """The command that builds a bundle."""
    lengths = " ".join(f"--k {k}" for k in manifest.lookahead_lengths)
    return (
        f"la-export build --model {manifest.model.name} {lengths} --precision "
        f"{manifest.precision} --cache-form {manifest.contract.cache_form} --context "
        f"{manifest.model.context}"
    )


if __name__ == "__main__":
    main()
