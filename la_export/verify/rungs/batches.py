"""Rung 4: what padding and neighbours in a batch change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Final

import numpy as np

from la_export.verify.decoding import decode
from la_export.verify.findings import Figure, Finding
from la_export.verify.ladder import Configuration, EncodedPrompt, Ladder, Proposals
from la_export.verify.passes import read_text, score_batch
from la_export.verify.tokens import Comparisons
from la_runtime.backends.base import CacheSizing
from la_runtime.batch import BlockPolicy
from la_runtime.block import Part
from la_runtime.generation import Engine
from la_runtime.layout import make_rows
from la_runtime.sampling import SamplingParams

__all__ = ["check_padding"]

_BATCH: Final = 4
_SMALL_BATCH: Final = 2
_EXTRA_WIDTH: Final = 7
_SHARES: Final = 2
_CHUNK: Final = 16
_NUM_SAMPLES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One way to decode a batch: plainly without a configuration, greedily without a seed."""

    configuration: Configuration | None
    seed: int | None

    def params(self, ladder: Ladder) -> SamplingParams:
        """Parameters of the batch's first sequence."""
        if self.seed is None:
            return ladder.greedy(self.configuration)
        return ladder.sampled(self.seed, self.configuration)

    def __str__(self) -> str:
        how = "greedy" if self.seed is None else f"seed {self.seed}"
        return f"{self.configuration or 'plain'}, {how}"


def check_padding(ladder: Ladder) -> Finding:
    """Logits and tokens of ragged, padded batches against each sequence alone.

    Batches of one length of life, and an engine that sequences join while others run.
    """
    batch = ladder.prompts[:_BATCH]
    share, problems = _compare_padded_logits(ladder, batch)
    batch = batch if ladder.settings.every_prompt else batch[-_SMALL_BATCH:]
    comparisons = Comparisons(tolerance=ladder.tolerance, epsilon=ladder.epsilon)
    ways = tuple(_ways(ladder))
    accepted = sum(_compare_ragged_tokens(ladder, batch, way, comparisons) for way in ways)
    if not accepted and ladder.has_room_for_blocks:
        problems.append("no proposal stood, so that no accepted draft was compared")
    requests = _compare_engine(ladder, batch, comparisons)
    return Finding(
        figures=(
            Figure(name="largest share of the range", value=share, bound=ladder.tolerance.logits),
            Figure(name="tokens", value=comparisons.num_tokens),
            Figure(name="near-ties", value=len(comparisons.near_ties)),
        ),
        problems=(*problems, *comparisons.problems),
        detail=f"{len(ways)} batches of {len(batch)} prompts of "
        f"{', '.join(str(len(p.token_ids)) for p in batch)} tokens, {accepted} drafts accepted, "
        f"and {requests} requests to an engine of {_NUM_SAMPLES} places, against each alone",
    )


def _compare_padded_logits(
    ladder: Ladder, batch: tuple[EncodedPrompt, ...]
) -> tuple[float, list[str]]:
    """Every row of one padded pass; the largest difference as a share of the range."""
    texts = [prompt.token_ids[: ladder.most_scored] for prompt in batch]
    parts = [
        Part(rows=make_rows(len(text), (), ()), token_ids=text, scored_from=0) for text in texts
    ]
    longest = max(map(len, texts))
    state = ladder.backend.allocate(len(batch), CacheSizing.STEPPED)
    found = score_batch(
        ladder.backend, state, parts, context=ladder.context, widths=(longest + _EXTRA_WIDTH,)
    ).copy()
    state.close()
    largest, problems = 0.0, []
    for prompt, text, logits in zip(batch, texts, found, strict=True):
        length = len(text)
        alone = read_text(ladder.backend, text, width=length, context=ladder.context)
        difference = np.abs(logits[:length] - alone)
        share = float(difference.max()) / (float(np.ptp(alone)) or 1.0)
        largest = max(largest, share)
        if not share <= ladder.tolerance.logits:
            row = int(np.argmax(difference.max(axis=-1)))
            problems.append(
                f"prompt {prompt.name}: logits at position {row} change by {share:.2g} of their "
                f"range in a batch of {len(batch)}"
            )
    return largest, problems


def _ways(ladder: Ladder) -> Iterator[_Way]:
    """Plainly; then every layout and origin of proposals, greedy and sampled, at the largest k.

    Where little is compared, the few configurations whose proposals stand are sampled and greedy
    in turn.
    """
    yield _Way(configuration=None, seed=None)
    if not ladder.settings.every_prompt:
        given = [c for c in ladder.chosen_configurations if c.proposals is Proposals.GIVEN]
        for seed, configuration in zip(cycle((0, None)), given, strict=False):
            yield _Way(configuration=configuration, seed=seed)
        return
    yield _Way(configuration=None, seed=0)
    largest = max(ladder.lookahead_lengths, default=0)
    widest = [c for c in ladder.configurations if c.k == largest]
    for index, (configuration, is_sampled) in enumerate(product(widest, (False, True))):
        yield _Way(configuration=configuration, seed=index if is_sampled else None)


def _compare_ragged_tokens(
    ladder: Ladder, batch: tuple[EncodedPrompt, ...], way: _Way, comparisons: Comparisons
) -> int:
    """Sequences of a batch end one after the other; each against its own plain run.

    Returns:
        How many drafts were accepted.
    """
    base = way.params(ladder)
    # Seeds differ by more than one, so that no sequence has the noise of its neighbour's place.
    params = [
        replace(
            base,
            seed=base.seed + len(batch) * index,
            max_new_tokens=max(1, ladder.new_tokens - index * ladder.new_tokens // 8),
        )
        for index in range(len(batch))
    ]
    if ladder.settings.every_prompt and way.configuration is not None:
        params = [replace(p, max_new_tokens=max(1, p.max_new_tokens // _SHARES)) for p in params]
    plain = [
        ladder.plain_decoding(prompt, wish) for prompt, wish in zip(batch, params, strict=True)
    ]
    backend = ladder.backend
    if way.configuration is not None:
        texts = [(*p.token_ids, *one.token_ids) for p, one in zip(batch, plain, strict=True)]
        backend = ladder.proposing(way.configuration, *texts)
    together = decode(backend, ladder.manifest, [p.token_ids for p in batch], params)
    for prompt, one, wish, found in zip(batch, plain, params, together, strict=True):
        comparisons.compare(
            f"prompt {prompt.name}" + (f", seed {wish.seed}" if wish.temperature else ""),
            f"batch of {len(batch)}, {way}",
            one.token_ids,
            one.margins,
            found.token_ids,
        )
    return sum(found.accepted for found in together)


def _compare_engine(
    ladder: Ladder, batch: tuple[EncodedPrompt, ...], comparisons: Comparisons
) -> int:
    """More requests than places, each with parameters of its own, one of them for two samples.

    Prompts are read in chunks, so that a newcomer is read while the others wait.

    Returns:
        How many requests there were.
    """
    k = max(ladder.lookahead_lengths, default=0)
    layouts = ladder.layouts
    tokens = ladder.new_tokens
    # The first one runs long, and those behind it join and leave.
    wishes = [
        ladder.greedy(),
        replace(ladder.sampled(1), k=k, layout=layouts[-1], max_new_tokens=max(1, tokens // 3)),
        replace(ladder.greedy(), k=k, layout=layouts[-1], max_new_tokens=max(1, tokens - 1)),
        replace(ladder.sampled(2), k=k, layout=layouts[0], n=_NUM_SAMPLES),
        replace(ladder.sampled(3), k=k, layout=layouts[0], max_new_tokens=max(1, tokens // 2)),
        replace(ladder.greedy(), k=k, layout=layouts[0]),
    ]
    prompts = [prompt for prompt, _ in zip(cycle(batch), wishes, strict=False)]
    samples = [
        [replace(wish, n=1, seed=wish.seed + sample) for sample in range(wish.n)] for wish in wishes
    ]
    plain = [
        [ladder.plain_decoding(prompt, wish) for wish in wanted]
        for prompt, wanted in zip(prompts, samples, strict=True)
    ]
    texts = [
        (*prompt.token_ids, *one.token_ids)
        for prompt, decoded in zip(prompts, plain, strict=True)
        for one in decoded
    ]
    backend = ladder.borrowed()
    if k:
        given = Configuration(k=k, layout=layouts[0], proposals=Proposals.GIVEN)
        backend = ladder.proposing(given, *texts, backend=backend)
    policy = BlockPolicy(widths=backend.widths, prefill_chunk=_CHUNK)
    with Engine(ladder.bundle, backend, k=0, max_batch=_NUM_SAMPLES, policy=policy) as engine:
        results = engine.generate([list(prompt.token_ids) for prompt in prompts], wishes)
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        for sample, (one, found) in enumerate(zip(plain[index], result.samples, strict=True)):
            comparisons.compare(
                f"prompt {prompt.name}, request {index} of an engine",
                f"sample {sample}, k={wishes[index].k}, temperature {wishes[index].temperature}",
                one.token_ids,
                one.margins,
                found.token_ids,
            )
    return len(wishes)
