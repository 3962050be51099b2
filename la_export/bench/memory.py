"""How much memory a process holds, and what reading a prompt takes of it.

Reads Linux's own figures.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from la_runtime.decoder import Decoder
from la_runtime.generation import Engine
from la_runtime.sampling import SamplingParams

__all__ = [
    "PrefillMemory",
    "measure_prefill",
    "peak_bytes",
    "reset_peak",
    "resident_bytes",
]

_STATUS: Final = Path("/proc/self/status")
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_WARM_UP_TOKENS: Final = 8


def resident_bytes() -> int:
    """Memory this process holds now."""
    return _read_status("VmRSS")


def peak_bytes() -> int:
    """The most it has held since `reset_peak`, or since it began."""
    return _read_status("VmHWM")


def reset_peak() -> None:
    """Forget the peak so far."""
    _CLEAR_REFS.write_text("5", encoding="ascii")


def _read_status(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.split()[0])
    raise AssertionError(f"{_STATUS} has no {field}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillMemory:
    """What reading one prompt took.

    Args:
        num_tokens: of the prompt.
        opened_bytes: what the process held before, the bundle open and warm.
        peak_bytes: the most it held meanwhile.
        cache_bytes: K/V of the cache afterwards, unused places included.
    """

    num_tokens: int
    opened_bytes: int
    peak_bytes: int
    cache_bytes: int

    @property
    def beyond_cache_bytes(self) -> int:
        """What the passes took beyond the open bundle and the K/V they left behind."""
        return self.peak_bytes - self.opened_bytes - self.cache_bytes

    @property
    def process_beyond_cache_bytes(self) -> int:
        """All that the process held beyond K/V, weights and libraries included."""
        return self.peak_bytes - self.cache_bytes


def measure_prefill(bundle: Path, num_tokens: int, *, threads: int) -> PrefillMemory:
    """Read a prompt of random tokens. Use a fresh process: memory once held may be kept.

    Args:
        bundle: folder of the bundle.
        num_tokens: of the prompt, less than the bundle's context.
        threads: threads for one pass.
    """
    with Engine.open(bundle, threads=threads) as engine:
        contract = engine.backend.contract
        model = engine.bundle.manifest.model
        decoder = Decoder(engine.backend, context=model.context, eos_token_ids=model.eos_token_ids)
        # Two tokens, so that the sequence and its cache are still there behind prefill.
        params = SamplingParams(max_new_tokens=2, ignore_eos=True)
        prompt = np.random.default_rng(0).integers(contract.vocab_size, size=num_tokens).tolist()
        with decoder.start([prompt[:_WARM_UP_TOKENS]], [params]) as decoding:
            decoding.prefill()
        gc.collect()
        opened = resident_bytes()
        reset_peak()
        with decoder.start([prompt], [params]) as decoding:
            decoding.prefill()
            peak = peak_bytes()
            places = decoding.cache.past_len
    place_bytes = (
        2
        * contract.num_layers
        * contract.num_kv_heads
        * contract.head_dim
        * np.dtype(contract.kv_dtype).itemsize
    )
    return PrefillMemory(
        num_tokens=num_tokens,
        opened_bytes=opened,
        peak_bytes=peak,
        cache_bytes=places * place_bytes,
    )
