"""The service of docs/embedding.md, served over a real socket."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Condition, Event, Thread
from types import ModuleType
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from la_runtime import Engine, SamplingParams, StepEvent
from la_runtime.errors import NonFiniteScoreError, UsageError
from la_runtime.stats import PassKind
from la_runtime.stopping import FinishReason
from tests.markdown import find_code_blocks

PAGE = Path(__file__).parent.parent / "docs" / "embedding.md"
BUNDLE = "engines/smollm2-135m"
PROMPT = "The cat sat on the mat and the dog"

# Seconds until a test that waits in vain fails; none waits for time to pass.
PATIENCE = 120


class Gate:
    """Stands before a backend's passes: lets some through, then holds the next until opened."""

    def __init__(self, engine: Engine) -> None:
        self._forward = engine.backend.forward
        self._changed = Condition()
        self._allowed = math.inf
        self._is_holding = False
        self.num_passes = 0
        engine.backend.forward = self._pass  # type: ignore[method-assign]

    def hold_after(self, num_passes: int) -> None:
        with self._changed:
            self._allowed = self.num_passes + num_passes

    def wait_until_holding(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_holding, PATIENCE)

    def open(self) -> None:
        with self._changed:
            self._allowed = math.inf
            self._changed.notify_all()

    def _pass(self, *arguments: Any) -> Any:
        with self._changed:
            self.num_passes += 1
            self._is_holding = self.num_passes > self._allowed
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.num_passes <= self._allowed, PATIENCE)
            self._is_holding = False
        return self._forward(*arguments)


class Observations:
    """What an observer has heard."""

    def __init__(self) -> None:
        self._changed = Condition()
        self.events: list[StepEvent] = []

    def __call__(self, event: StepEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for_end(self, reason: FinishReason) -> None:
        with self._changed:
            ended = lambda: any(reason in event.finished for event in self.events)  # noqa: E731
            assert self._changed.wait_for(ended, PATIENCE)


class Service:
    """A running app: its engine, its port, and a way to end it."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        config = uvicorn.Config(
            app, lifespan="on", log_level="critical", timeout_graceful_shutdown=0
        )
        self._server = uvicorn.Server(config)
        self._thread = Thread(target=self._server.run, kwargs={"sockets": [self._listener]})

    @property
    def engine(self) -> Engine:
        engine: Engine = self.app.state.engine
        return engine

    def start(self) -> None:
        self._thread.start()
        # The first answer says that the engine is open: the lifespan comes before any request.
        assert self.ask("/no-such-page").status == 404

    def ask(self, path: str = "/generate", **wish: Any) -> HTTPResponse:
        """POST a wish; returns when the status is there."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        body = json.dumps({"prompt": PROMPT, **wish})
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        return connection.getresponse()

    def get(self, path: str) -> str:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        connection.request("GET", path)
        return connection.getresponse().read().decode()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server did not end"


def read_events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The server-sent events of a response, as they come."""
    for line in response:
        if line.strip():
            field, _, value = line.decode().partition(": ")
            assert field == "data"
            yield json.loads(value)


def watch_cancelling(engine: Engine) -> Event:
    """Set when a stream of the engine has been cancelled while it waited for a chunk."""
    cancelled = Event()
    astream = engine.astream

    def watched(*arguments: Any, **options: Any) -> Any:
        stream = astream(*arguments, **options)
        following = stream._items.get

        async def get() -> Any:
            try:
                return await following()
            except asyncio.CancelledError:
                asyncio.get_running_loop().call_soon(cancelled.set)
                raise

        stream._items.get = get  # type: ignore[method-assign]
        return stream

    engine.astream = watched  # type: ignore[method-assign]
    return cancelled


@pytest.fixture
def page(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What the service's and the metrics' blocks define; the bundle they name is a tiny one."""
    module = ModuleType("service")
    monkeypatch.setitem(sys.modules, "service", module)
    blocks = [block for block in find_code_blocks(PAGE) if "create_app" in block.code]
    for block in blocks:
        exec(compile(block.code, str(PAGE), "exec"), vars(module))
    return module


@pytest.fixture
def observed() -> Observations:
    return Observations()


@pytest.fixture
def serve(page: ModuleType, observed: Observations) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def start(app: FastAPI | None = None, **limits: int) -> Service:
        service = Service(app or page.create_app(BUNDLE, observer=observed, **limits))
        services.append(service)
        service.start()
        return service

    yield start
    for service in services:
        service.stop()


@pytest.mark.parametrize(
    "wish",
    [
        {"max_new_tokens": 24},
        {"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 3},
        {"max_new_tokens": 40, "temperature": 1.0, "seed": 1, "stop": ["a", "e"]},
    ],
    ids=["greedy", "sampled", "stopped"],
)
def test_the_streamed_text_is_what_the_engine_generates(
    serve: Callable[..., Service], wish: dict[str, Any]
) -> None:
    service = serve()
    params = SamplingParams(**{**wish, "stop": tuple(wish.get("stop", ()))})
    expected = service.engine.generate(PROMPT, params, chat=True)

    response = service.ask(**wish)
    events = list(read_events(response))

    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert "".join(event["text"] for event in events) == expected.text
    assert [event["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["finish_reason"] == expected.finish_reason


def test_a_dropped_client_cancels_its_request_within_one_step(
    serve: Callable[..., Service], observed: Observations
) -> None:
    service = serve()
    gate, cancelled = Gate(service.engine), watch_cancelling(service.engine)
    gate.hold_after(1)  # prefill gives the first chunk

    response = service.ask(max_new_tokens=100)
    assert next(read_events(response))["finish_reason"] is None
    gate.wait_until_holding()
    response.close()  # the last hold on the socket
    assert cancelled.wait(PATIENCE)
    gate.open()
    observed.wait_for_end(FinishReason.CANCELLED)

    assert gate.num_passes == 2, "none follows the pass that ran when the client went away"
    assert (service.engine.num_running, service.engine.num_waiting) == (0, 0)
    emitted = sum(event.new_tokens for event in observed.events)
    assert emitted < 100
    text = service.engine.generate(PROMPT, chat=True, max_new_tokens=4)
    assert text.finish_reason is not FinishReason.CANCELLED, "the engine goes on"


def test_a_client_that_leaves_the_queue_is_never_read(
    serve: Callable[..., Service], observed: Observations
) -> None:
    service = serve(max_batch=1)
    gate, cancelled = Gate(service.engine), watch_cancelling(service.engine)
    gate.hold_after(0)
    first = service.ask(max_new_tokens=4)
    gate.wait_until_holding()

    second = service.ask(max_new_tokens=4)
    second.close()
    assert cancelled.wait(PATIENCE)
    gate.open()
    list(read_events(first))
    observed.wait_for_end(FinishReason.CANCELLED)

    prefills = [event for event in observed.events if event.kind is PassKind.PREFILL]
    assert len(prefills) == 1


def test_a_full_queue_is_answered_with_503_and_a_clear_line(
    serve: Callable[..., Service],
) -> None:
    service = serve(max_batch=1, max_queue=1)
    expected = service.engine.generate(PROMPT, chat=True, max_new_tokens=6).text
    gate = Gate(service.engine)
    gate.hold_after(0)

    running = service.ask(max_new_tokens=6)
    gate.wait_until_holding()
    waiting = service.ask(max_new_tokens=6)
    refused = service.ask(max_new_tokens=6)
    error = json.loads(refused.read())["error"]
    gate.open()

    assert refused.status == 503
    assert refused.headers["Retry-After"] == "1"
    assert "the queue is full: 1 waiting, at most 1; ask again later" in error
    for response in (running, waiting):
        assert "".join(event["text"] for event in read_events(response)) == expected


@pytest.mark.parametrize(
    ("wish", "status", "line"),
    [
        ({"temperature": -1}, 400, "temperature must be at least 0, got -1.0"),
        ({"max_new_tokens": 0}, 400, "max_new_tokens must be at least 1, got 0"),
        ({"stop": [""]}, 400, "a stop string is empty; leave it out"),
        ({"prompt": ""}, 400, "the prompt is empty; give at least one character"),
        ({"prompt": "x " * 1100}, 400, "context of 1024 leaves room for prompts of at most 1023"),
        ({"temperature": "warm"}, 422, "Input should be a valid number"),
        ({"tempreature": 1}, 422, "Extra inputs are not permitted"),
    ],
)
def test_impossible_wishes_are_refused_with_a_clear_line(
    serve: Callable[..., Service], wish: dict[str, Any], status: int, line: str
) -> None:
    response = serve().ask(**wish)

    assert response.status == status
    assert line in response.read().decode()


def test_a_failure_after_the_response_began_comes_as_an_event(
    serve: Callable[..., Service],
) -> None:
    service = serve()
    forward = service.engine.backend.forward
    passes = iter(range(100))

    def fail_in_the_second(*arguments: Any) -> Any:
        if next(passes) == 1:
            raise NonFiniteScoreError("planted")
        return forward(*arguments)

    service.engine.backend.forward = fail_in_the_second  # type: ignore[method-assign]

    events = list(read_events(service.ask(max_new_tokens=24)))

    assert events[-1] == {"error": "planted"}


def test_shutting_down_closes_the_engine(serve: Callable[..., Service]) -> None:
    service = serve()
    list(read_events(service.ask(max_new_tokens=4)))

    service.stop()

    with pytest.raises(UsageError, match="the engine is closed; open the bundle again"):
        service.engine.generate(PROMPT, max_new_tokens=1)


def test_shutting_down_ends_what_runs(serve: Callable[..., Service]) -> None:
    service = serve()
    gate = Gate(service.engine)
    gate.hold_after(1)
    response = service.ask(max_new_tokens=100)
    next(read_events(response))
    gate.wait_until_holding()
    worker = service.engine._scheduler._thread
    assert worker is not None
    join = worker.join

    def open_and_join() -> None:
        gate.open()
        join()

    # An engine that closes waits for its worker, once that has been told.
    worker.join = open_and_join  # type: ignore[method-assign, assignment]
    service.stop()

    assert gate.num_passes == 2, "none follows the pass that ran"
    with pytest.raises(UsageError, match="the engine is closed"):
        service.engine.generate(PROMPT, max_new_tokens=1)


def test_the_metrics_count_what_was_generated(
    serve: Callable[..., Service], page: ModuleType
) -> None:
    service = serve(page.app)
    expected = service.engine.generate(PROMPT, chat=True, max_new_tokens=12)

    metrics = service.get("/metrics/")

    figures = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[:1] != "#")
    assert float(figures["lookahead_tokens_total"]) == len(expected.token_ids)
    assert float(figures["lookahead_accepted_total"]) == sum(expected.stats.accepted)
    ended = f'lookahead_requests_total{{how="{expected.finish_reason}"}}'
    assert float(figures[ended]) == 1
    assert float(figures['lookahead_rows_total{of="sequences"}']) == expected.stats.rows
    passes = sum(
        float(figures[f'lookahead_pass_seconds_count{{kind="{kind}"}}'])
        for kind in ("prefill", "step")
    )
    assert passes == expected.stats.passes
