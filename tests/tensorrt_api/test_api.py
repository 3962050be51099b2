"""What our code touches of TensorRT is in the genuine bindings; the fake has nothing else.

mypy holds the code to the protocols of `trt_api` and `plan.api`; here the protocols are held to the
signatures in `signatures`, and those to the bindings themselves.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any, get_overloads

import pytest

from la_export.plan import api as plan_api
from la_export.plan import namespace as plan_namespace
from la_runtime.backends import trt_api
from tests.la_runtime.backends.numpy_device import NumpyDevice
from tests.tensorrt_api.engine import make_tensorrt
from tests.tensorrt_api.genuine import BINDINGS, SIGNATURES, used_classes
from tests.tensorrt_api.module import Signature, make_module

FULL = [name for name in BINDINGS if name.startswith("tensorrt-")]
LEAN = [name for name in BINDINGS if name.startswith("tensorrt_lean")]
RTX = [name for name in BINDINGS if name.startswith("tensorrt_rtx")]
PROMISES = [
    *((trt_api.COMMON, names) for names in (FULL, LEAN, RTX)),
    (trt_api.FULL_ONLY, FULL),
    (trt_api.RTX_ONLY, RTX),
    (plan_api.COMMON, FULL),
    (plan_api.COMMON, RTX),
    (plan_api.RTX_ONLY, RTX),
]
USES = [
    pytest.param(name, kind, protocol, id=f"{name}-{kind}")
    for protocols, names in PROMISES
    for name in names
    for kind, protocol in protocols.items()
]


@cache
def read(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((SIGNATURES / f"{name}.json").read_text("utf-8"))
    return record


def members_of(protocol: type) -> Iterator[str]:
    """What a protocol itself declares."""
    names = {*vars(protocol), *vars(protocol).get("__annotations__", ())}
    yield from sorted(name for name in names if not name.startswith("_"))


def test_both_supported_versions_are_there():
    assert [read(name)["version"] for name in FULL] == ["10.16.1.11", "11.4.0.106"]
    assert [read(name)["version"] for name in LEAN] == ["10.16.1.11", "11.4.0.106"]


@pytest.mark.parametrize("name", BINDINGS)
def test_the_signatures_are_those_of_the_genuine_bindings(name):
    """If this fails for a class that is used since, run `python -m tests.tensorrt_api.genuine`."""
    assert BINDINGS[name].read(used_classes()) == read(name)


@pytest.mark.parametrize(("name", "kind", "protocol"), USES)
def test_everything_used_of_a_class_is_in_the_bindings(name, kind, protocol):
    members = read(name)["classes"][kind]
    assert members is not None, f"{name} has no {kind}"
    if "members" in members:
        used = set(members_of(protocol)) - {"value"}
        assert used <= set(members["members"])
        return
    for member in members_of(protocol):
        declared = getattr(protocol, member, None)
        if callable(declared):
            signatures = [Signature(text) for text in members["methods"][member]]
            for overload in get_overloads(declared) or [declared]:
                assert any(takes(s, overload) for s in signatures), f"{kind}.{member} takes others"
        else:
            assert member in {*members["properties"], *members["constants"]}, f"{kind}.{member}"


def takes(signature: Signature, declared: Callable[..., Any]) -> bool:
    """Whether an overload of the bindings takes what a method of a protocol declares."""
    given = list(inspect.signature(declared).parameters.values())[1:]
    names = [parameter.name for parameter in signature.parameters]
    named = {p.name for p in given if p.kind is inspect.Parameter.KEYWORD_ONLY}
    positional = len(given) - len(named)
    required = {p.name for p in signature.parameters if not p.is_optional}
    return (
        positional <= len(names)
        and named <= set(names[positional:])
        and required <= {*names[:positional], *named}
    )


@pytest.mark.parametrize(
    ("protocol", "names"),
    [
        (trt_api.TensorRT, [*FULL, *LEAN, *RTX]),
        (trt_api.FullTensorRT, FULL),
        (trt_api.RtxTensorRT, RTX),
    ],
)
def test_everything_used_of_the_module_is_among_the_classes(protocol, names):
    used = set(members_of(protocol))
    assert used
    for name in names:
        classes = read(name)["classes"]
        assert used <= {kind for kind, members in classes.items() if members is not None}


def test_everything_used_of_the_module_in_a_build_is_among_the_classes():
    used = set(members_of(plan_namespace.TensorRT))
    for name in FULL:
        assert used - set(plan_api.RTX_ONLY) <= set(read(name)["classes"])
    for name in RTX:
        assert used <= {kind for kind, members in read(name)["classes"].items() if members}


def test_what_is_gone_from_tensorrt_11_is_seen_to_be_gone():
    """Positive control: names that the bindings of 10.16 have and those of 11.4 have not."""
    gone = {"device_memory_size", "create_execution_context_without_device_memory"}
    old, new = (read(name)["classes"]["ICudaEngine"] for name in FULL)

    assert gone <= {*old["methods"], *old["properties"]}
    assert not gone & {*new["methods"], *new["properties"]}


# The fake made from them


@pytest.fixture
def module() -> ModuleType:
    return make_tensorrt(NumpyDevice()).module


def test_an_unknown_attribute_is_no_attribute(module):
    runtime = module.Runtime(module.ILogger())

    with pytest.raises(AttributeError):
        runtime.no_such_thing()
    with pytest.raises(AttributeError, match="no attribute 'no_such_switch' to set"):
        runtime.no_such_switch = True
    with pytest.raises(AttributeError):
        runtime.logger = None  # which is read only
    with pytest.raises(AttributeError):
        module.NoSuchClass  # noqa: B018


@pytest.mark.parametrize(
    "call",
    [
        lambda runtime: runtime.deserialize_cuda_engine(),
        lambda runtime: runtime.deserialize_cuda_engine(b"", b""),
        lambda runtime: runtime.deserialize_cuda_engine(plan=b""),
        lambda runtime: runtime.deserialize_cuda_engine("a path"),
        lambda runtime: type(runtime)(),
    ],
)
def test_arguments_that_the_bindings_do_not_take_are_refused(module, call):
    with pytest.raises(TypeError, match="incompatible function arguments"):
        call(module.Runtime(module.ILogger()))


def test_what_only_tensorrt_makes_cannot_be_made(module):
    with pytest.raises(TypeError, match="IExecutionContext: No constructor defined"):
        module.IExecutionContext()


def test_what_the_fake_does_not_do_is_said_when_it_is_used(module):
    with pytest.raises(NotImplementedError, match="the fake Runtime does not load_runtime"):
        module.Runtime(module.ILogger()).load_runtime("here")
    with pytest.raises(NotImplementedError, match="the fake Runtime has no max_threads"):
        _ = module.Runtime(module.ILogger()).max_threads


def test_a_behaviour_that_the_bindings_have_not_is_refused():
    class Runtime:
        def load_plan(self) -> None:
            """No such method."""

    with pytest.raises(AssertionError, match=r"Runtime has no \['load_plan'\]"):
        make_module(SIGNATURES / "tensorrt-11.4.0.106.json", {"Runtime": Runtime})


def test_a_logger_derived_in_python_takes_attributes(module):
    class Log(module.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.messages: list[str] = []

        def log(self, severity: object, msg: str) -> None:
            self.messages.append(msg)

    log = Log()
    log.log(module.ILogger.ERROR, "a message")

    assert log.messages == ["a message"]
    assert module.Runtime(log)
