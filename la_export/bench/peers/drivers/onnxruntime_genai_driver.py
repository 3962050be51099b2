"""Drives onnxruntime-genai: one token a pass, or n-grams of the text as drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime_genai as og
from numpy.typing import NDArray

__all__ = ["open_peer"]


class _Peer:
    def __init__(self, job: dict[str, Any]) -> None:
        config = og.Config(job["model"])
        options = {"intra_op_num_threads": job["threads"]}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = og.Model(config)
        self._speculative = job["options"]
        self.version = og.__version__
        self.build = f"wheel of commit {og.__commit__[:12]}"

    def _start(self, token_ids: list[int], *, new_tokens: int) -> Any:
        params = og.GeneratorParams(self._model)
        params.set_search_options(max_length=len(token_ids) + new_tokens, do_sample=False)
        if self._speculative and new_tokens:
            params.set_speculative_options(**self._speculative)
        generator = og.Generator(self._model, params)
        generator.append_tokens(np.asarray(token_ids, np.int32))
        return generator

    def generate(
        self, token_ids: list[int], new_tokens: int, emit: Callable[[Sequence[int]], None]
    ) -> None:
        generator = self._start(token_ids, new_tokens=new_tokens)
        emitted = len(token_ids)
        while not generator.is_done():
            generator.generate_next_token()
            # A pass of speculation appends several.
            emit(generator.get_sequence(0)[emitted:].tolist())
            emitted = generator.token_count()

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        generator = self._start(token_ids, new_tokens=0)
        return np.asarray(generator.get_output("logits")[0], np.float32)


def open_peer(job: dict[str, Any]) -> _Peer:
    """Load a folder that onnxruntime-genai's model builder wrote."""
    return _Peer(job)
