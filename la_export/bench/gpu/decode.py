"""Times decoding on one backend, plain and with lookaheads, and single steps of every width.

python -m la_export.bench.gpu.decode BUNDLE --backend trt --k 0 --k 4
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import click
import numpy as np

from la_export.bench.prompts import load_prompts, pick_prompts
from la_runtime.backends.base import Backend, CacheSizing, CacheState, Outputs
from la_runtime.block import Part, make_step_inputs
from la_runtime.bundle import Manifest
from la_runtime.digests import DigestCheck
from la_runtime.generation import Engine
from la_runtime.layout import Layout, make_rows
from la_runtime.storage import storage_dtype

__all__ = ["count_read_bytes", "time_decoding", "time_passes"]

_WARM_UPS: Final = 3
_READ: Final = 64
_SEED: Final = 0


def time_decoding(
    engine: Engine, prompts: Sequence[Sequence[int]], *, k: int, num_tokens: int, rounds: int
) -> dict[str, Any]:
    """Decode the same prompts some times; the fastest and the middle round.

    Args:
        engine: opened for this k.
        prompts: token ids.
        k: lookahead length.
        num_tokens: new tokens of each.
        rounds: times that all prompts are decoded.

    Returns:
        Tokens a second, tokens per pass, milliseconds per pass, and the tokens themselves.
    """
    engine.generate(prompts[0], k=k, max_new_tokens=num_tokens, ignore_eos=True)
    seconds, passes, tokens = [], 0, 0
    token_ids: list[list[int]] = []
    for _ in range(rounds):
        results = [
            engine.generate(prompt, k=k, max_new_tokens=num_tokens, ignore_eos=True)
            for prompt in prompts
        ]
        seconds.append(sum(result.stats.decode_s for result in results))
        passes = sum(result.stats.passes - result.stats.prefill_passes for result in results)
        tokens = sum(result.stats.new_tokens - result.stats.prefill_tokens for result in results)
        token_ids = [list(result.token_ids) for result in results]
    return {
        "k": k,
        "tokens_per_s": tokens / min(seconds),
        "median_tokens_per_s": tokens / median(seconds),
        "tokens_per_pass": tokens / passes,
        "ms_per_pass": 1000 * min(seconds) / passes,
        "token_ids": token_ids,
    }


def time_passes(
    backend: Backend, *, k: int, layout: Layout, past: int, context: int, rounds: int
) -> dict[str, Any]:
    """Time the widest step of a layout behind a cache of `past` tokens, choice included.

    Args:
        backend: what runs the graph.
        k: lookahead length.
        layout: where groups stand.
        past: tokens in the cache.
        context: positions of the model.
        rounds: passes.
    """
    rng = np.random.default_rng(_SEED)
    vocab_size = backend.contract.vocab_size
    state = backend.allocate(1, CacheSizing.STEPPED)
    state.reserve(past + layout.max_rows(k))
    for start in range(0, past, _READ):
        read = rng.integers(0, vocab_size, min(_READ, past - start)).tolist()
        chunk = Part(
            rows=make_rows(len(read), (), ()), token_ids=tuple(read), scored_from=len(read) - 1
        )
        _run_pass(backend, state, chunk, context)
        backend.commit(state, [range(len(read))])
    rows = make_rows(1, tuple(range(k)), layout.groups(k, k))
    step = Part(
        rows=rows, token_ids=tuple(rng.integers(0, vocab_size, 1 + k).tolist()), scored_from=0
    )
    for _ in range(_WARM_UPS):
        _run_pass(backend, state, step, context)
    times = [_run_pass(backend, state, step, context) for _ in range(rounds)]
    state.close()
    return {
        "k": k,
        "layout": layout.value,
        "rows": rows.num_rows,
        "best_ms": 1000 * min(times),
        "median_ms": 1000 * median(times),
    }


def _run_pass(backend: Backend, state: CacheState, part: Part, context: int) -> float:
    """Seconds until the best tokens of every scored row are on the host."""
    inputs = make_step_inputs(
        [part],
        state,
        backend.contract,
        context=context,
        widths=backend.widths,
        outputs=Outputs.TOP,
    )
    began = time.perf_counter()
    backend.forward(state, inputs).top()
    return time.perf_counter() - began


def count_read_bytes(manifest: Manifest, *, past: int) -> int:
    """What a step has to read behind so many tokens: the weights, and their keys and values.

    Of an embedding table that the head does not share, hardly anything is read; it does not count.
    """
    contract = manifest.contract
    width = storage_dtype(contract.kv_dtype).itemsize
    per_token = 2 * contract.num_layers * contract.num_kv_heads * contract.head_dim * width
    weights = manifest.files[f"{manifest.graph}.data"].bytes
    if not manifest.model.tied_embeddings:
        held = storage_dtype(contract.compute_dtype).itemsize
        weights -= contract.vocab_size * contract.hidden_size * held
    return weights + past * per_token


@click.command()
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--backend", required=True)
@click.option("--k", "lengths", type=int, multiple=True, default=(0, 4), show_default=True)
@click.option("--tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--past", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--prompts", "num_prompts", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(min=0), default=0, show_default=True)
def _main(
    bundle: Path,
    backend: str,
    lengths: tuple[int, ...],
    tokens: int,
    past: int,
    num_prompts: int,
    rounds: int,
    threads: int,
) -> None:
    """Time decoding of BUNDLE and single steps; prints one JSON object."""
    decoding, passes = [], []
    read_bytes, plain = 0, None
    for k in sorted({0, *lengths}):
        # Hashed once: a large model's weights take half a minute.
        with Engine.open(
            bundle, backend=backend, k=k, threads=threads, digests=DigestCheck.CACHED
        ) as engine:
            manifest = engine.bundle.manifest
            context = manifest.model.context
            past = min(past, context // 2)
            texts = pick_prompts(load_prompts(), per_group=1)[:num_prompts]
            longest = max(1, context - tokens - 1)
            prompts = [engine.encode(text.turns[0])[:longest] for text in texts]
            entry = time_decoding(engine, prompts, k=k, num_tokens=tokens, rounds=rounds)
            token_ids = entry.pop("token_ids")
            plain = token_ids if plain is None else plain
            entry["same_tokens_as_plain"] = token_ids == plain
            middle = round(mean(len(prompt) for prompt in prompts)) + tokens // 2
            entry["past"] = middle
            entry["read_bytes"] = count_read_bytes(manifest, past=middle)
            decoding.append(entry)
            for layout in Layout if k else [Layout.ROOT_ONLY]:
                passes.append(
                    time_passes(
                        engine.backend,
                        k=k,
                        layout=layout,
                        past=past,
                        context=context,
                        rounds=10 * rounds,
                    )
                )
            read_bytes = count_read_bytes(manifest, past=past)
    record = {
        "backend": backend,
        "past": past,
        "new_tokens": tokens,
        "read_bytes": read_bytes,
        "decoding": decoding,
        "steps": passes,
    }
    click.echo(json.dumps(record, indent=1))


if __name__ == "__main__":
    _main()
