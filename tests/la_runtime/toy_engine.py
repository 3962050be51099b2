"""An engine whose model is the toy: exact, so that nothing may ever differ, and under control."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from la_runtime.backends.fake import FakeBackend
from la_runtime.bundle import open_bundle
from la_runtime.generation import Engine

__all__ = ["GatedBackend", "open_toy_engine"]

K_MAX = 4


class GatedBackend(FakeBackend):
    """Passes wait at a gate while it is closed. A pass that waits there has not run yet."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.num_passes = 0
        self.error: Exception | None = None

    def forward(self, state, inputs):
        self.at_gate.set()
        assert self.gate.wait(60), "a test left the gate closed"
        self.num_passes += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().forward(state, inputs)

    def close_gate(self) -> None:
        self.at_gate.clear()
        self.gate.clear()


def open_toy_engine(bundle: Path, **options: Any) -> Engine:
    """An engine over a bundle's tokenizer, template and facts, with the toy as its model."""
    opened = open_bundle(bundle)
    backend = GatedBackend(vocab_size=opened.manifest.contract.vocab_size, k_max=K_MAX, seed=1)
    return Engine(opened, backend, k=K_MAX, **options)
