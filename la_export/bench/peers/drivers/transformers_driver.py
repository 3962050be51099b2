"""Drives transformers, eager PyTorch in float32: one token a pass, or prompt lookup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers.generation.streamers import BaseStreamer

__all__ = ["open_peer"]


class _Streamer(BaseStreamer):
    """Passes on what comes behind the prompt, which is the first thing it is given."""

    def __init__(self, emit: Callable[[Sequence[int]], None]) -> None:
        self._emit = emit
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._saw_prompt:
            self._emit(value.flatten().tolist())
        self._saw_prompt = True

    def end(self) -> None:
        pass


class _Peer:
    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_num_threads(job["threads"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=torch.float32, local_files_only=True
        ).eval()
        self._eos_token_ids = job["eos_token_ids"]
        self._options = job["options"]
        self.version = transformers.__version__
        self.build = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"

    def generate(
        self, token_ids: list[int], new_tokens: int, emit: Callable[[Sequence[int]], None]
    ) -> None:
        prompt = torch.tensor([token_ids])
        self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=self._eos_token_ids,
            pad_token_id=self._eos_token_ids[0],
            streamer=_Streamer(emit),
            **self._options,
        )

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = self._model(torch.tensor([token_ids])).logits[0].numpy()
        return rows


def open_peer(job: dict[str, Any]) -> _Peer:
    """Load a folder that transformers can read."""
    return _Peer(job)
