"""Requests of many threads, decoded together by one.

A worker thread runs every pass. It admits waiting requests in the order they came, reads their
prompts beside the sequences that are being decoded (a chunk of one, a step of the others), and
lets both go on as one batch. It knows tokens and caches, not text.

Whoever asks is told through a `Hearer`, called by the worker between two passes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

from la_runtime.backends.base import CacheState
from la_runtime.batch import Batch, BlockPolicy, Outcome, PassReport
from la_runtime.decoder import Decoder
from la_runtime.errors import LookaheadError, QueueFullError, UsageError
from la_runtime.sequence import StepResult, TokenSequence
from la_runtime.stats import PassKind, StepEvent
from la_runtime.stopping import FinishReason

__all__ = ["DEFAULT_MAX_QUEUE", "Hearer", "Job", "Observer", "Scheduler"]

DEFAULT_MAX_QUEUE: Final = 256

logger = logging.getLogger(__name__)

Observer: TypeAlias = Callable[[StepEvent], None]


class Hearer(Protocol):
    """Is told what becomes of the sequences of a job, by the worker thread."""

    def hear(self, sequence: TokenSequence, result: StepResult) -> None:
        """A sequence got tokens, or ended."""
        ...

    def fail(self, sequence: TokenSequence, error: Exception) -> None:
        """A sequence ended with an error."""
        ...


class Job:
    """One prompt's sequences.

    Args:
        sequences: one, or several samples of the same prompt.
        hearer: is told what becomes of them.
        cache: what the only sequence has cached already.
    """

    def __init__(
        self,
        sequences: Sequence[TokenSequence],
        hearer: Hearer,
        *,
        cache: CacheState | None = None,
    ) -> None:
        self.sequences = tuple(sequences)
        self.hearer = hearer
        self.cache = cache
        self.is_cancelled = False

    @property
    def is_alone(self) -> bool:
        """Whether its prompt cannot be read together with other prompts."""
        return len(self.sequences) > 1 or self.cache is not None


class Scheduler:
    """Decodes jobs on a thread of its own, which starts with the first of them.

    Args:
        decoder: makes batches.
        policy: how passes are shaped.
        max_batch: most sequences in one pass.
        max_queue: most submissions that may wait.
        observer: hears of every pass.
    """

    def __init__(
        self,
        decoder: Decoder,
        policy: BlockPolicy,
        *,
        max_batch: int,
        max_queue: int,
        observer: Observer | None = None,
    ) -> None:
        self._decoder = decoder
        self._policy = policy
        self.max_batch = max_batch
        self._max_queue = max_queue
        self._observer = observer
        self._changed = threading.Condition()
        self._queue: deque[deque[Job]] = deque()
        self._jobs: dict[TokenSequence, Job] = {}
        self._reading: Batch | None = None
        self._running: Batch | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    @property
    def num_waiting(self) -> int:
        """Submissions that wait for their first prompt to be admitted."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Sequences that are being decoded."""
        return len(self._jobs)

    @property
    def is_own_thread(self) -> bool:
        """Whether the worker is asking."""
        return threading.current_thread() is self._thread

    def submit(self, jobs: Sequence[Job]) -> None:
        """Let these jobs wait for their turn, behind all that wait already.

        Raises:
            UsageError: the scheduler is closed, a job has more samples than fit into a batch, or
                this is called from the thread that would have to serve it.
            QueueFullError: too many submissions wait.
        """
        self._check_caller("asks for a generation")
        for job in jobs:
            if len(job.sequences) > self.max_batch:
                raise UsageError(
                    f"n must be at most the engine's max_batch, {self.max_batch}; "
                    f"got {len(job.sequences)}"
                )
            for sequence in job.sequences:
                self._policy.check(sequence)
        with self._changed:
            if self._is_closing:
                raise UsageError("the engine is closed; open the bundle again")
            if len(self._queue) >= self._max_queue:
                raise QueueFullError(
                    f"the queue is full: {len(self._queue)} waiting, at most {self._max_queue}; "
                    "ask again later, or open the engine with a larger max_queue"
                )
            if self._thread is not None and not self._thread.is_alive():
                raise UsageError(
                    "the engine was used before this process was forked and does not survive that; "
                    "open the bundle in the new process"
                )
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="lookahead-engine", daemon=True)
                thread.start()
                self._thread = thread
            self._queue.append(deque(jobs))
            self._changed.notify_all()

    def _check_caller(self, what: str) -> None:
        """Refuse a call from the worker: it would wait for itself.

        Raises:
            UsageError: it is one.
        """
        if self.is_own_thread:
            raise UsageError(
                f"a logits processor or observer {what} of the engine that runs it, which cannot "
                "end; do that from another thread"
            )

    def cancel(self, job: Job) -> None:
        """End a job before the next pass; one that has ended stays as it is."""
        with self._changed:
            job.is_cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        """End every job as cancelled, after the running pass; returns when the worker has ended.

        Raises:
            UsageError: this is called from the worker.
        """
        self._check_caller("asks for the closing")
        self.begin_to_close()
        if self._thread is not None:
            self._thread.join()

    def begin_to_close(self) -> None:
        """The same, without waiting for it."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _work(self) -> None:
        """The worker: admits, reads and steps until the scheduler closes."""
        try:
            while self._wait_for_work():
                for run_pass in (self._read, self._step):
                    self._drop_cancelled()
                    if not self._is_closing:
                        run_pass()
        except BaseException as error:
            self._abandon(error)
            raise
        try:
            self._abandon(None)
        except BaseException as error:
            self._abandon(error)
            raise

    def _wait_for_work(self) -> bool:
        """Admit what fits; False when the scheduler closes."""
        with self._changed:
            while not (self._is_closing or self._queue or self._reading or self._running):
                self._changed.wait()
            if self._is_closing:
                return False
            admitted = [] if self._reading else self._pick()
            for job in admitted:
                self._jobs.update(dict.fromkeys(job.sequences, job))
        if admitted:
            try:
                self._reading = self._make_batch(admitted)
            except Exception as error:  # noqa: BLE001  # raised again where the requests were made
                for job in admitted:
                    self._fail(job.sequences, error)
        return True

    def _pick(self) -> list[Job]:
        """The jobs whose prompts are read next: as many from the front as fit and go together."""
        room = self.max_batch - (len(self._running) if self._running else 0)
        picked: list[Job] = []
        while self._queue:
            job = self._queue[0][0]
            room -= len(job.sequences)
            if room < 0 or (picked and not self._go_together([*picked, job])):
                break
            picked.append(self._queue[0].popleft())
            self._forget_empty()
        return picked

    def _forget_empty(self) -> None:
        self._queue = deque(waiting for waiting in self._queue if waiting)

    def _go_together(self, jobs: Sequence[Job]) -> bool:
        """Whether at most half of the block that reads these prompts is padding."""
        if any(job.is_alone for job in jobs):
            return False
        lengths = [min(job.sequences[0].prompt_len, self._policy.prefill_chunk) for job in jobs]
        return len(lengths) * max(lengths) <= 2 * sum(lengths)

    def _make_batch(self, jobs: Sequence[Job]) -> Batch:
        first = jobs[0]
        if len(first.sequences) > 1:
            return self._decoder.make_batch(
                first.sequences[:1], self._policy, siblings=first.sequences[1:]
            )
        sequences = [job.sequences[0] for job in jobs]
        return self._decoder.make_batch(sequences, self._policy, cache=first.cache)

    def _drop_cancelled(self) -> None:
        """End what was cancelled since the last pass, waiting jobs included."""
        with self._changed:
            leaving = {sequence: job for sequence, job in self._jobs.items() if job.is_cancelled}
            for waiting in self._queue:
                for job in [job for job in waiting if job.is_cancelled]:
                    waiting.remove(job)
                    leaving |= dict.fromkeys(job.sequences, job)
            self._forget_empty()
        if not leaving:
            return
        for batch in (self._reading, self._running):
            if batch is not None:
                batch.drop(leaving.keys())
        for sequence, job in leaving.items():
            self._jobs.pop(sequence, None)
            self._end_cancelled(sequence, job)
        self._close_empty()
        self._observe_ends(cancelled=len(leaving))

    def _observe_ends(self, *, cancelled: int = 0, failed: int = 0) -> None:
        """Tell the observer of sequences that ended without a pass."""
        self._observe(
            StepEvent(
                kind=PassKind.NONE,
                sequences=0,
                rows=0,
                padding_rows=0,
                new_tokens=0,
                accepted=0,
                finished=(FinishReason.CANCELLED,) * cancelled,
                failed=failed,
                running=self.num_running,
                waiting=self.num_waiting,
                seconds=0.0,
            )
        )

    @staticmethod
    def _end_cancelled(sequence: TokenSequence, job: Job) -> None:
        sequence.finish_reason = FinishReason.CANCELLED
        if sequence.keeps_cache and sequence.kept_cache is None:
            sequence.kept_cache = job.cache  # it was never touched
        result = StepResult(
            token_ids=(), accepted=0, margins=(), finish_reason=FinishReason.CANCELLED
        )
        sequence.end()
        _tell_end(job.hearer, sequence, result)

    def _close_empty(self) -> None:
        if self._reading is not None and len(self._reading) == 0:
            self._reading.close()
            self._reading = None
        if self._running is not None and len(self._running) == 0:
            self._running.close()
            self._running = None

    def _read(self) -> None:
        """One pass of the prompts being read; when it was the last, they join the others."""
        batch = self._reading
        if batch is None:
            return
        if batch.needs_reading:
            self._pass(batch, batch.read_chunk, PassKind.PREFILL)
            return
        self._pass(batch, batch.step, PassKind.PREFILL)
        if self._reading is None:
            return
        try:
            if self._running is None:
                self._running = batch
            else:
                self._running.absorb(batch)
            self._reading = None
        except Exception as error:  # noqa: BLE001  # raised again where the requests were made
            self._fail(batch.sequences, error)
            self._discard(batch)

    def _step(self) -> None:
        batch = self._running
        if batch is not None:
            self._pass(batch, batch.step, PassKind.STEP)

    def _pass(self, batch: Batch, run: Callable[[], PassReport], kind: PassKind) -> None:
        """Run one pass and tell everybody; what breaks it breaks this batch alone."""
        began = time.perf_counter()
        num_sequences = len(batch)
        try:
            report = run()
        except Exception as error:  # noqa: BLE001  # raised again where the requests were made
            self._fail((*batch.sequences, *batch.siblings), error)
            self._discard(batch)
            return
        seconds = time.perf_counter() - began
        for sequence, outcome in report.outcomes:
            self._tell(sequence, outcome)
        self._close_empty()
        results = [o for _, o in report.outcomes if isinstance(o, StepResult)]
        self._observe(
            StepEvent(
                kind=kind,
                sequences=num_sequences,
                rows=report.rows,
                padding_rows=report.padding_rows,
                new_tokens=sum(len(result.token_ids) for result in results),
                accepted=sum(result.accepted for result in results),
                finished=tuple(r.finish_reason for r in results if r.finish_reason is not None),
                failed=len(report.outcomes) - len(results),
                running=self.num_running,
                waiting=self.num_waiting,
                seconds=seconds,
            )
        )

    def _tell(self, sequence: TokenSequence, outcome: Outcome) -> None:
        hearer = self._jobs[sequence].hearer
        if isinstance(outcome, StepResult) and outcome.finish_reason is None:
            hearer.hear(sequence, outcome)
            return
        sequence.end()
        del self._jobs[sequence]
        if isinstance(outcome, Exception):
            hearer.fail(sequence, outcome)
        else:
            _tell_end(hearer, sequence, outcome)

    def _observe(self, event: StepEvent) -> None:
        if self._observer is None:
            return
        try:
            self._observer(event)
        except BaseException:
            # What counts requests must not end them.
            logger.exception("the observer failed; it is not called again")
            self._observer = None

    def _fail(self, sequences: Sequence[TokenSequence], error: Exception) -> None:
        """End sequences with an error."""
        for sequence in sequences:
            sequence.end()
            self._jobs.pop(sequence).hearer.fail(sequence, error)
        self._observe_ends(failed=len(sequences))

    def _discard(self, batch: Batch) -> None:
        """Forget a batch whose cache nobody can trust."""
        batch.sequences, batch.siblings = [], []
        batch.close()
        if batch is self._reading:
            self._reading = None
        else:
            self._running = None

    def _abandon(self, error: BaseException | None) -> None:
        """The worker ends: nobody may wait for it."""
        with self._changed:
            self._is_closing = True
            waiting = [job for jobs in self._queue for job in jobs]
            self._queue.clear()
        batches = [batch for batch in (self._reading, self._running) if batch is not None]
        if error is None:
            for batch in batches:
                batch.drop(set(self._jobs))
                batch.close()
        self._reading = self._running = None
        self._jobs |= {sequence: job for job in waiting for sequence in job.sequences}
        ending, self._jobs = self._jobs, {}
        for sequence, job in ending.items():
            if error is None:
                self._end_cancelled(sequence, job)
                continue
            failure = LookaheadError(f"the engine stopped: {type(error).__name__}: {error}")
            failure.__cause__ = error
            sequence.end()
            job.hearer.fail(sequence, failure)
        if error is None:
            self._observe_ends(cancelled=len(ending))
        else:
            self._observe_ends(failed=len(ending))


def _tell_end(hearer: Hearer, sequence: TokenSequence, result: StepResult) -> None:
    """Tell the last of a sequence; whoever cannot hear it is told of that instead."""
    try:
        hearer.hear(sequence, result)
    except Exception as error:  # noqa: BLE001  # raised again where the request was made
        hearer.fail(sequence, error)
