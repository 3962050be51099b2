"""The keywords of one request, as every method of an engine takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from la_runtime.layout import Layout
from la_runtime.sampling import LogitsProcessor, Select
from la_runtime.source_names import SourceName

__all__ = ["RequestOptions"]


class RequestOptions(TypedDict, total=False):
    """Keywords of one request; see `SamplingParams` for their meaning."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    n: int
    stop: str | tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logprobs: int | None
    logits_processors: tuple[LogitsProcessor, ...]
    k: int | None
    select: Select | str
    tau: float | None
    layout: Layout | str | None
    sources: Sequence[SourceName | str] | None
    drafts: int | None
    ignore_eos: bool
    strict: bool
