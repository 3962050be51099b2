"""A peer without a model: it counts on from the prompt's last token. Its options make it fail."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCAB_SIZE = 32


class FakePeer:
    version = "1.2"
    build = "made of paper"

    def __init__(self, job: dict[str, Any]) -> None:
        if job["options"].get("refuses"):
            raise ValueError("no weights\nwill be loaded")
        self.options = job["options"]
        self.job = job
        self.asked = 0

    def generate(
        self, token_ids: list[int], new_tokens: int, emit: Callable[[list[int]], None]
    ) -> None:
        self.asked += 1
        # The first answer of a process is a warm-up, or the one that its memory is looked at after.
        if self.asked == self.options.get("fails_at"):
            raise RuntimeError("out of paper")
        if self.options.get("dies"):
            os.abort()
        if self.options.get("hangs"):
            time.sleep(60)
        sys.stdout.write("a library that writes to standard output\n")
        sys.stdout.flush()
        size = self.options.get("at_once", 1)
        last = token_ids[-1]
        for start in range(0, self.options.get("length", new_tokens), size):
            emit([(last + 1 + start + place) % VOCAB_SIZE for place in range(size)])

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """The next number is as likely as the fifteen after it together."""
        rows = np.zeros((len(token_ids), VOCAB_SIZE), np.float32)
        rows[np.arange(len(token_ids)), [(t + 1) % VOCAB_SIZE for t in token_ids]] = np.log(31)
        return rows


def open_peer(job: dict[str, Any]) -> FakePeer:
    return FakePeer(job)
