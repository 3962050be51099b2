"""One peer in a process of its own, asked line by line.

Owns the process: starting it, its answers, its time limit, and why it ended. The other end is
`drivers/serve.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from la_export.bench.peers.environments import last_line
from la_export.bench.peers.programs import DRIVERS, Option
from la_export.perplexity import Window
from la_runtime.errors import NotRunError

__all__ = ["Job", "PeerAnswer", "PeerProcess"]

_SERVER: Final = DRIVERS / "serve.py"
_TIME_LIMIT_S: Final = 600.0
_NEW_TOKENS_OF_WARM_UP: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process is started for.

    Args:
        python: interpreter of the peer's environment.
        driver: the file that speaks to it.
        model: what the driver opens.
        threads: for one pass.
        context: positions it needs.
        eos_token_ids: that end an answer.
        options: of the way to decode.
    """

    python: Path
    driver: Path
    model: Path
    threads: int
    context: int
    eos_token_ids: tuple[int, ...]
    options: Mapping[str, Option]


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Ready(_Reply):
    version: str
    build: str


class _Scored(_Reply):
    log_probs: list[float]


_R = TypeVar("_R", bound=_Reply)


class PeerAnswer(_Reply):
    """A prompt's answer.

    Args:
        token_ids: of it, with the token that ended it.
        first_tokens: how many of them came first, all at once.
        ttft_s: seconds to those.
        decode_s: seconds from those to the last ones.
        total_s: seconds until the peer said that it was done.
        pss_bytes: of its process, afterwards.
        peak_rss_bytes: the most it has held so far.
    """

    token_ids: tuple[int, ...]
    first_tokens: int
    ttft_s: float
    decode_s: float
    total_s: float
    pss_bytes: int
    peak_rss_bytes: int


class PeerProcess:
    """A peer that has loaded its weights. A context manager that ends the process.

    Args:
        job: what to start.
        log: file for what it prints.
        time_limit_s: seconds that any one answer may take.

    Raises:
        NotRunError: it does not start.
    """

    def __init__(self, job: Job, *, log: Path, time_limit_s: float = _TIME_LIMIT_S) -> None:
        self._name = job.driver.stem
        self._log = log
        self._time_limit_s = time_limit_s
        self._is_late = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [job.python, "-P", _SERVER, job.driver],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_make_variables(job.threads),
            )
        try:
            ready = self._ask(
                {
                    "model": str(job.model),
                    "threads": job.threads,
                    "context": job.context,
                    "eos_token_ids": job.eos_token_ids,
                    "options": dict(job.options),
                },
                _Ready,
            )
        except BaseException:
            self.close()
            raise
        self.version = ready.version
        self.build = ready.build

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with self._process:
            pass

    def generate(self, token_ids: Sequence[int], new_tokens: int) -> PeerAnswer:
        """Decode greedily behind a prompt.

        Raises:
            NotRunError: the peer failed.
        """
        request = {"do": "generate", "token_ids": list(token_ids), "new_tokens": new_tokens}
        answer = self._ask(request, PeerAnswer)
        if not answer.token_ids:
            raise NotRunError(f"{self._name} gave no token for a prompt; see logs/{self._log.name}")
        return answer

    def warm_up(self, token_ids: Sequence[int]) -> None:
        """Answer with a few tokens, for what libraries do once.

        Raises:
            NotRunError: the peer failed.
        """
        self.generate(token_ids, _NEW_TOKENS_OF_WARM_UP)

    def score(self, windows: Sequence[Window]) -> Iterator[NDArray[np.float64]]:
        """See `la_export.perplexity.ScoreWindows`.

        Raises:
            NotRunError: the peer failed.
        """
        for window in windows:
            request = {"do": "score", "token_ids": window.token_ids, "first": window.scored_from}
            yield np.asarray(self._ask(request, _Scored).log_probs)

    def _ask(self, request: Mapping[str, Any], kind: type[_R]) -> _R:
        assert self._process.stdin is not None, "it is piped"
        assert self._process.stdout is not None, "it is piped"
        with self._limited():
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = ""
        if not line:
            raise NotRunError(f"{self._name} ended: {self._reason()}; see logs/{self._log.name}")
        reply = json.loads(line)
        if "error" in reply:
            raise NotRunError(f"{self._name} failed: {reply['error']}; see logs/{self._log.name}")
        try:
            return kind.model_validate(reply)
        except ValidationError as error:
            raise NotRunError(
                f"{self._name} said what is no answer: {line:.80}; see logs/{self._log.name}"
            ) from error

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Ends the process when the block takes too long."""

        def end() -> None:
            self._is_late = True
            self._process.kill()

        timer = threading.Timer(self._time_limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _reason(self) -> str:
        """Why the process is no more."""
        code = self._process.wait()
        if self._is_late:
            return f"no answer within {self._time_limit_s:g} s"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return last_line(self._log) or f"exit code {code}"


def _make_variables(threads: int) -> dict[str, str]:
    """The process's environment: so many threads, and nothing from a network."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
