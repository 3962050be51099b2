"""Decodes for comparisons: token ids in, tokens with their margins out, on any backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from la_export.verify.recording import RecordingBackend
from la_runtime.backends.base import Backend
from la_runtime.batch import BlockPolicy
from la_runtime.bundle import Manifest
from la_runtime.decoder import Decoder
from la_runtime.sampling import SamplingParams
from la_runtime.stopping import FinishReason

__all__ = ["Decoded", "decode", "decode_recorded"]


@dataclass(slots=True, kw_only=True)
class Decoded:
    """One finished sequence.

    Args:
        token_ids: the new tokens.
        margins: per token, best minus second score of the row that chose it.
        block_lengths: how many each pass gave; more than one are a block of accepted drafts.
        accepted: how many were drafts that stood.
        finish_reason: why it ended.
    """

    token_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    block_lengths: list[int] = field(default_factory=list)
    accepted: int = 0
    finish_reason: FinishReason | None = None

    def first(self, count: int) -> Decoded:
        """The first tokens of a plain decoding, which gives one a pass."""
        return Decoded(
            token_ids=self.token_ids[:count],
            margins=self.margins[:count],
            block_lengths=self.block_lengths[:count],
            finish_reason=FinishReason.LENGTH,
        )


def decode(
    backend: Backend,
    manifest: Manifest,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    policy: BlockPolicy | None = None,
    context: int | None = None,
) -> list[Decoded]:
    """Decode these prompts as one batch.

    Args:
        backend: what runs the graph.
        manifest: of its bundle.
        prompts: token ids per sequence.
        params: parameters per sequence.
        policy: how passes are shaped.
        context: number of positions; the model's when not given.
    """
    decoder = Decoder(
        backend,
        context=manifest.model.context if context is None else context,
        eos_token_ids=manifest.model.eos_token_ids,
        group_mask=manifest.lookahead.group_mask,
    )
    found = [Decoded() for _ in prompts]
    with decoder.start(prompts, params, policy) as decoding:
        results = decoding.prefill()
        while True:
            for index, result in results:
                found[index].token_ids += result.token_ids
                found[index].margins += result.margins
                found[index].block_lengths.append(len(result.token_ids))
                found[index].accepted += result.accepted
                found[index].finish_reason = result.finish_reason
            if decoding.is_done:
                return found
            results = decoding.step()


def decode_recorded(
    backend: Backend,
    manifest: Manifest,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    policy: BlockPolicy | None = None,
) -> tuple[Decoded, dict[int, NDArray[np.float32]]]:
    """Decode one prompt; also the logits of each row that chose a token, by position."""
    recorder = RecordingBackend(backend)
    (decoded,) = decode(recorder, manifest, [prompt], [params], policy=policy)
    return decoded, dict(recorder.logits_at)
