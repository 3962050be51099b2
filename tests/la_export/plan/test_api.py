from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from la_export.plan import api
from la_export.plan.api import COMMON, RTX_ONLY, list_members
from la_export.plan.namespace import TensorRT

RTX = importlib.import_module("tensorrt_rtx")


def _members() -> Iterator[tuple[str, str]]:
    for protocols in (COMMON, RTX_ONLY):
        for name, protocol in protocols.items():
            for member in list_members(protocol):
                yield name, member


@pytest.mark.parametrize(("name", "member"), list(_members()))
def test_what_is_used_is_in_the_genuine_module(name: str, member: str) -> None:
    assert hasattr(getattr(RTX, name), member)


@pytest.mark.parametrize("name", list_members(TensorRT))
def test_classes_that_are_used_are_in_the_genuine_module(name: str) -> None:
    assert hasattr(RTX, name)


def test_every_class_of_the_module_that_is_used_is_spelled_out() -> None:
    """`Severity` has no class of its own there; `IAttention` and the like are handed out."""
    assert set(list_members(TensorRT)) <= {*COMMON, *RTX_ONLY}


def test_every_protocol_is_compared() -> None:
    protocols = {
        name
        for name, found in inspect.getmembers(api, inspect.isclass)
        if found.__module__ == api.__name__
    }

    assert protocols - {"Severity", "RtxBuilderConfig"} == {*COMMON, "ComputeCapability"}


def _signature(function: Any) -> list[str]:
    """Names of the parameters that a binding's own documentation gives."""
    first_line = (function.__doc__ or "").splitlines()[0]
    inside = first_line.partition("(")[2].rpartition(")")[0]
    return [part.partition(":")[0].strip() for part in inside.split(", ")]


@pytest.mark.parametrize(
    ("name", "member"),
    [
        (n, m)
        for n, m in _members()
        if inspect.isfunction(getattr({**RTX_ONLY, **COMMON}[n], m, None))
    ],
)
def test_methods_take_what_the_genuine_ones_take(name: str, member: str) -> None:
    ours = getattr({**RTX_ONLY, **COMMON}[name], member)

    assert list(inspect.signature(ours).parameters) == _signature(
        getattr(getattr(RTX, name), member)
    )
