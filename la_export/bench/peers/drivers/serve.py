"""Serves one peer: requests on stdin, answers on stdout, one JSON object a line.

    python -P serve.py DRIVER.py

Runs in the peer's own environment, with the standard library and NumPy. Owns the protocol, the
clock and the process's memory figures; how tokens are made is the business of the driver's file,
whose `open_peer` is called with the first line.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

__all__ = ["main"]

_KIBIBYTE: Final = 1024


class Peer(Protocol):
    """What a driver's `open_peer` returns.

    `version` is the program's, `build` says how it was compiled as far as it is known.
    """

    version: str
    build: str

    def generate(
        self, token_ids: list[int], new_tokens: int, emit: Callable[[Sequence[int]], None]
    ) -> None:
        """Decode greedily behind a prompt to which nothing is known; `emit` tokens as they come.

        Ends with the token that ends the answer, or after `new_tokens`.
        """
        ...

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """[tokens, vocab_size] of a text."""
        ...


class _Recorder:
    """Tokens of one answer and when they came."""

    def __init__(self, eos_token_ids: frozenset[int], new_tokens: int) -> None:
        self._eos_token_ids = eos_token_ids
        self._new_tokens = new_tokens
        self._began = time.perf_counter()
        self._ended = False
        self.token_ids: list[int] = []
        self.first_tokens = 0
        self.ttft_s = 0.0
        self.last_s = 0.0

    def emit(self, token_ids: Sequence[int]) -> None:
        """Take tokens; those behind the end of the answer do not count."""
        now = time.perf_counter() - self._began
        before = len(self.token_ids)
        for token_id in token_ids:
            if self._ended:
                break
            self.token_ids.append(int(token_id))
            self._ended = token_id in self._eos_token_ids or len(self.token_ids) == self._new_tokens
        if not before:
            self.ttft_s, self.first_tokens = now, len(self.token_ids)
        if len(self.token_ids) > before:
            self.last_s = now

    def as_answer(self) -> dict[str, Any]:
        """The answer's line."""
        memory = _read_fields(Path("/proc/self/smaps_rollup"))
        return {
            "token_ids": self.token_ids,
            "first_tokens": self.first_tokens,
            "ttft_s": self.ttft_s,
            "decode_s": self.last_s - self.ttft_s,
            "total_s": time.perf_counter() - self._began,
            "pss_bytes": memory["Pss"] * _KIBIBYTE,
            "peak_rss_bytes": _read_fields(Path("/proc/self/status"))["VmHWM"] * _KIBIBYTE,
        }


def _read_fields(path: Path) -> dict[str, int]:
    """The fields of a file of Linux's that are counted in kibibytes."""
    fields = {}
    for line in path.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value.split()[0])
    return fields


def _score(logits: NDArray[np.float32], token_ids: Sequence[int], first: int) -> list[float]:
    """Log-probability of each of `token_ids[first:]` behind all that stand before it."""
    found = []
    for place in range(first, len(token_ids)):
        row = logits[place - 1].astype(np.float64)
        largest = row.max()
        log_sum = np.log(np.exp(row - largest).sum()) + largest
        found.append(float(row[token_ids[place]] - log_sum))
    return found


def _answer(peer: Peer, job: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    token_ids = request["token_ids"]
    if request["do"] == "score":
        return {"log_probs": _score(peer.logits(token_ids), token_ids, request["first"])}
    recorder = _Recorder(frozenset(job["eos_token_ids"]), request["new_tokens"])
    peer.generate(token_ids, request["new_tokens"], recorder.emit)
    return recorder.as_answer()


@contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """The real standard output; what libraries print goes to standard error meanwhile."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        yield replies


def _last_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip().splitlines()[-1]


def main(driver: str) -> None:
    """Open the peer that the first line asks for and answer until the input ends."""
    # Whoever started this process ends it; a Ctrl-C at the terminal reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _own_stdout() as replies:

        def say(reply: dict[str, Any]) -> None:
            replies.write(json.dumps(reply) + "\n")
            replies.flush()

        try:
            job = json.loads(sys.stdin.readline())
            peer: Peer = runpy.run_path(driver)["open_peer"](job)
            say({"version": peer.version, "build": peer.build})
            for line in sys.stdin:
                say(_answer(peer, job, json.loads(line)))
        except Exception as error:
            say({"error": _last_line(error)})
            raise


if __name__ == "__main__":
    main(sys.argv[1])
