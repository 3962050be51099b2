"""The slow truth about the toy backend: plain decoding, every token from a pass over its prefix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from la_runtime.backends.base import CacheSizing, Outputs, StepInputs
from la_runtime.backends.fake import FakeBackend
from la_runtime.choosing import Choice, Chooser
from la_runtime.decoder import BlockPolicy, Decoder, StepResult
from la_runtime.sampling import SamplingParams
from la_runtime.stats import GenerationStats

VOCAB_SIZE = 13
K_MAX = 6
CONTEXT = 200


def next_logits(backend: FakeBackend, token_ids: Sequence[int]) -> np.ndarray:
    """[vocab_size] logits after a prefix: one causal pass without a cache."""
    length = len(token_ids)
    causal = np.tri(length, dtype=bool)
    mask = np.where(causal, 0.0, -1e9).astype(np.float32)
    sliding = None
    if (window := backend.contract.window) is not None:
        near = np.triu(np.ones_like(causal), 1 - window)
        sliding = np.where(causal & near, 0.0, -1e9).astype(np.float32)[None, None]
    state = backend.allocate(1, CacheSizing.EXACT)
    scores = backend.forward(
        state,
        StepInputs(
            input_ids=np.asarray([token_ids]),
            position_ids=np.arange(length)[None],
            attention_mask=mask[None, None],
            logits_rows=np.asarray([[length - 1]]),
            outputs=Outputs.LOGITS,
            columns=np.arange(length)[None],
            sliding_attention_mask=sliding,
        ),
    )
    return scores.logits()[0, 0]


def sample_plainly(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    eos_token_ids: Sequence[int] = (),
) -> list[Choice]:
    """What the toy model says after a prompt under these parameters, token by token."""
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, seed=seed)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    chooser = Chooser(
        params,
        request=0,
        prompt=prompt,
        end_token_ids=tuple(ends),
        scratch=np.empty(VOCAB_SIZE, dtype=np.float32),
    )
    token_ids = list(prompt)
    choices: list[Choice] = []
    while len(choices) < params.max_new_tokens:
        choices.append(chooser.choose(next_logits(backend, token_ids), token_ids))
        token_ids.append(choices[-1].token_id)
        if token_ids[-1] in ends:
            break
    return choices


def decode_plainly(
    prompt: Sequence[int],
    num_tokens: int,
    *,
    seed: int = 0,
    eos_token_ids: Sequence[int] = (),
    context: int = CONTEXT,
) -> list[int]:
    """What the toy model says after a prompt, up to its end."""
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, seed=seed)
    token_ids = list(prompt)
    while len(token_ids) < min(len(prompt) + num_tokens, context):
        token_ids.append(int(np.argmax(next_logits(backend, token_ids))))
        if token_ids[-1] in eos_token_ids:
            break
    return token_ids[len(prompt) :]


def decode(
    backend: FakeBackend,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    policy: BlockPolicy | None = None,
    eos_token_ids: Sequence[int] = (),
    context: int = CONTEXT,
) -> tuple[list[list[StepResult]], list[GenerationStats]]:
    """Run a batch to its end; per sequence its results and statistics."""
    decoder = Decoder(backend, context=context, eos_token_ids=eos_token_ids)
    results: list[list[StepResult]] = [[] for _ in prompts]
    with decoder.start(prompts, params, policy) as decoding:
        passes = [decoding.prefill()]
        while not decoding.is_done:
            passes.append(decoding.step())
        for one_pass in passes:
            for index, result in one_pass:
                results[index].append(result)
        return results, [decoding.stats(index) for index in range(len(prompts))]


def emitted(results: Sequence[StepResult]) -> list[int]:
    """The tokens of a sequence, in order."""
    return [token for result in results for token in result.token_ids]
