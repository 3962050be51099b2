"""Drives openvino-genai: one token a pass, or prompt lookup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from numpy.typing import NDArray

__all__ = ["open_peer"]

_GRAPH = "openvino_model.xml"


class _Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]  # it has no types here
    """Passes tokens on as they are made, not as text."""

    def __init__(self, emit: Callable[[Sequence[int]], None]) -> None:
        super().__init__()
        self._emit = emit

    def write(self, token: int | Sequence[int]) -> Any:
        self._emit([token] if isinstance(token, int) else token)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class _Peer:
    def __init__(self, job: dict[str, Any]) -> None:
        self._folder = Path(job["model"])
        self._properties = {"INFERENCE_NUM_THREADS": job["threads"], "PERFORMANCE_HINT": "LATENCY"}
        self._eos_token_ids = set(job["eos_token_ids"])
        self._lookup = job["options"]
        self._pipeline = openvino_genai.LLMPipeline(
            self._folder,
            "CPU",
            **self._properties,
            **({"prompt_lookup": True} if self._lookup else {}),
        )
        self.version = openvino_genai.__version__
        self.build = f"OpenVINO {openvino.get_version()}"

    def generate(
        self, token_ids: list[int], new_tokens: int, emit: Callable[[Sequence[int]], None]
    ) -> None:
        wish = openvino_genai.GenerationConfig()
        wish.max_new_tokens = new_tokens
        wish.do_sample = False
        wish.stop_token_ids = self._eos_token_ids
        for name, value in self._lookup.items():
            setattr(wish, name, value)
        prompt = np.asarray([token_ids], np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt))
        )
        self._pipeline.generate(inputs, wish, _Streamer(emit))

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        compiled = openvino.Core().compile_model(self._folder / _GRAPH, "CPU", self._properties)
        request = compiled.create_infer_request()
        ids = np.asarray([token_ids], np.int64)
        request.infer(
            {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "position_ids": np.arange(ids.size)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        return np.array(request.get_tensor("logits").data[0], np.float32)


def open_peer(job: dict[str, Any]) -> _Peer:
    """Load a folder that optimum wrote."""
    return _Peer(job)
