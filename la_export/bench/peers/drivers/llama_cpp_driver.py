"""Drives llama.cpp through llama-cpp-python: one token a pass, or prompt lookup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from numpy.typing import NDArray

__all__ = ["open_peer"]


class _Peer:
    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._eos_token_ids = frozenset(job["eos_token_ids"])
        lookup = job["options"]
        # With a draft model every row's logits are kept, but room for them is made only when asked.
        draft = LlamaPromptLookupDecoding(**lookup) if lookup else None
        self._llama = self._open(draft_model=draft, logits_all=draft is not None)
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self.build = llama_cpp.llama_print_system_info().decode().strip(" |")

    def _open(self, **options: Any) -> Any:
        return llama_cpp.Llama(
            model_path=self._job["model"],
            n_ctx=self._job["context"],
            n_threads=self._job["threads"],
            n_threads_batch=self._job["threads"],
            verbose=False,
            **options,
        )

    def generate(
        self, token_ids: list[int], new_tokens: int, emit: Callable[[Sequence[int]], None]
    ) -> None:
        # Otherwise the template's first words, shared by all prompts, would still be in the cache.
        self._llama.reset()
        tokens = self._llama.generate(token_ids, temp=0.0, repeat_penalty=1.0)
        for token_id in islice(tokens, new_tokens):
            emit([token_id])
            if token_id in self._eos_token_ids:
                break
        tokens.close()

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        scorer = self._open(logits_all=True)
        scorer.eval(token_ids)
        rows = np.array(scorer.scores[: len(token_ids)], np.float32)
        scorer.close()
        return rows


def open_peer(job: dict[str, Any]) -> _Peer:
    """Load a GGUF file."""
    return _Peer(job)
