"""Compare lookahead decoding of many prompts with plain decoding, greedy, sampled and strict.

    .venv/bin/python scripts/exactness.py engines/smollm2-135m

Needs a bundle that was built for every k asked for. It takes an hour, and may be stopped and
started again: what has been decoded is kept in .measurements/ as long as bundle and settings are
the same. Several processes may share the work, each with its own tasks (`--only`); the table is
written when the last task is complete. Ends with exit code 1 if any token differs without excuse,
or near-ties are too many, and with 3 while tasks are left to others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from la_export.bench.exactness import (
    EncodedPrompt,
    Store,
    Task,
    decode,
    encode_prompts,
    judge,
    make_tasks,
)
from la_export.bench.prompts import load_prompts
from la_export.bench.results import Cell, Column, write_result
from la_export.verify.epsilon import measure_epsilon
from la_export.verify.tolerance import FP32
from la_runtime.errors import UsageError
from la_runtime.generation import Engine
from la_runtime.layout import Layout

EPSILON_TOKENS = 1000
WRITE_EVERY = 5
INCOMPLETE = 3
COLUMNS = [
    Column(key="compared", title="Compared with"),
    Column(key="k", title="k"),
    Column(key="drafts", title="Drafts of a pass"),
    Column(key="sampling", title="Tokens chosen"),
    Column(key="strict", title="Strict"),
    Column(key="prompts", title="Prompts"),
    Column(key="tokens", title="Tokens"),
    Column(key="equal", title="Equal"),
    Column(key="excused", title="Near-ties"),
    Column(key="different", title="Different"),
    Column(key="tokens_per_pass", title="Tokens per pass"),
    Column(key="rechecked", title="Chosen again"),
]


def say(line: str) -> None:
    """Progress, with the time of day, on stderr."""
    click.echo(f"{time.strftime('%H:%M:%S')} {line}", err=True)


def fill(
    engine: Engine, store: Store, task: Task, prompts: Sequence[EncodedPrompt], new_tokens: int
) -> None:
    """Decode the prompts that the store lacks; write after every few of them."""
    missing = [
        (index, prompt)
        for index, prompt in enumerate(prompts[: task.num_prompts])
        if prompt.name not in store.runs(task)
    ]
    for start in range(0, len(missing), WRITE_EVERY):
        few = missing[start : start + WRITE_EVERY]
        runs = {
            prompt.name: decode(engine, task, prompt.token_ids, index=index, new_tokens=new_tokens)
            for index, prompt in few
            if prompt.name not in store.runs(task)
        }
        store.add(task, runs)
        say(f"{task.name}: {len(store.runs(task))} of {task.num_prompts} prompts")


def measure(engine: Engine, prompts: Sequence[EncodedPrompt], ks: Sequence[int]) -> float:
    """Margin of a near-tie, over tokens of the prompts."""
    widths = sorted({Layout.ROOT_ONLY.max_rows(k) for k in ks})
    say(f"near-ties: one row against {widths} rows")
    text = [token_id for prompt in prompts for token_id in prompt.token_ids]
    measured = measure_epsilon(
        engine.backend,
        text[:EPSILON_TOKENS],
        widths=widths,
        context=engine.bundle.manifest.model.context,
    )
    say(f"epsilon {measured:.2e}")
    return min(measured, FP32.epsilon)


def is_complete(store: Store, task: Task, names: Sequence[str]) -> bool:
    """Whether a task and the plain decoding it is compared with have all their prompts."""
    wanted = set(names[: task.num_prompts])
    return all(wanted <= store.runs(one).keys() for one in (task, task.plain))


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--k", "ks", type=int, multiple=True, default=(4, 2, 8), show_default=True)
@click.option("--prompts", "many", type=int, default=200, show_default=True, help="For k = 4.")
@click.option("--few", type=int, default=40, show_default=True, help="Prompts for other k.")
@click.option("--longest", type=int, default=400, show_default=True, help="Most prompt tokens.")
@click.option("--new-tokens", type=int, default=64, show_default=True)
@click.option(
    "--only", multiple=True, metavar="TASK", help="Such as planned-greedy; repeat for more."
)
@click.option("--threads", type=int, default=1, show_default=True)
@click.option(
    "--state", type=click.Path(path_type=Path), default=Path(".measurements/exactness.json")
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/results/exactness.json"))
def main(
    bundle: Path,
    ks: tuple[int, ...],
    many: int,
    few: int,
    longest: int,
    new_tokens: int,
    only: tuple[str, ...],
    threads: int,
    state: Path,
    out: Path,
) -> None:
    """Decode what is missing, and write the table if nothing is."""
    with Engine.open(bundle, threads=threads) as engine:
        prompts = encode_prompts(engine, load_prompts(), longest=longest)
        if len(prompts) < many:
            raise UsageError(
                f"{many} prompts are wanted, {len(prompts)} have at most {longest} tokens"
            )
        prompts = prompts[:many]
        digests = {
            path: entry.sha256 for path, entry in sorted(engine.bundle.manifest.files.items())
        }
        settings: dict[str, Any] = {"new_tokens": new_tokens, "longest_prompt": longest}
        store = Store(state, key={"sha256": digests, **settings})
        if store.epsilon is None:
            store.set_epsilon(measure(engine, prompts, ks))
        # Where every width gives the same bits, strict decoding has nothing to choose again.
        strict_below = engine.epsilon if store.epsilon else 0.0
        tasks = make_tasks(ks, many=many, few=few, strict_below=strict_below)
        known = [task.name for task in tasks]
        if unknown := set(only) - set(known):
            raise click.UsageError(f"no task {', '.join(unknown)}; there are {', '.join(known)}")
        for task in tasks:
            if not only or task.name in only:
                fill(engine, store, task.plain, prompts, new_tokens)
                fill(engine, store, task, prompts, new_tokens)
        names = [prompt.name for prompt in prompts]
        left = [task.name for task in tasks if not is_complete(store, task, names)]
        if left:
            say(f"left to do: {', '.join(left)}")
            sys.exit(INCOMPLETE)
        later_turns = sum(not name.endswith("/1") for name in names)
        facts = {
            "sha256": digests,
            **settings,
            "strict_below": strict_below,
            "sampled": "temperature 0.8, top_p 0.95, repetition penalty 1.1, presence penalty 0.2, "
            "frequency penalty 0.1, seed = place of the prompt",
            "later_turns_among_prompts": later_turns,
        }
    k_options = " ".join(f"--k {k}" for k in ks)
    command = (
        f".venv/bin/python scripts/exactness.py {bundle} {k_options} --prompts {many} --few {few} "
        f"--longest {longest} --new-tokens {new_tokens}"
    )
    sys.exit(publish(store, tasks, names, command=command, facts=facts, out=out))


def publish(
    store: Store,
    tasks: Sequence[Task],
    names: Sequence[str],
    *,
    command: str,
    facts: dict[str, Any],
    out: Path,
) -> int:
    """Write the table; 0 when every difference is excused and excuses are rare enough."""
    assert store.epsilon is not None, "measured before anything is decoded"
    rows: list[dict[str, Cell]] = []
    unequal: list[str] = []
    for task in tasks:
        row, lines = judge(task, store, names, epsilon=store.epsilon)
        rows.append(row)
        unequal += lines
        say(", ".join(f"{key} {value}" for key, value in row.items()))
    tokens, excused, different = (
        sum(int(row[key] or 0) for row in rows) for key in ("tokens", "excused", "different")
    )
    write_result(
        out,
        command=command,
        columns=COLUMNS,
        rows=rows,
        facts={
            **facts,
            "epsilon": store.epsilon,
            "tokens": tokens,
            "excused": excused,
            "excused_limit": FP32.excused_share,
            "different": different,
            "not_equal": unequal,
        },
    )
    for line in unequal:
        say(line)
    say(f"{tokens} tokens compared, {excused} near-ties, {different} different: {out}")
    return int(different > 0 or excused > tokens * FP32.excused_share)


if __name__ == "__main__":
    main()
