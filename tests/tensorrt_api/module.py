"""A module like `tensorrt`, made from the signatures of the genuine one.

Its classes have the genuine members and no others, and take the genuine arguments and no others.
What they do comes from the behaviours given for them; a member without one says so when it is used,
and a behaviour of something that the genuine class has not is refused.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Signature", "make_module"]

_PARAMETER = re.compile(r"^(?P<name>\w+)(?:: (?P<type>.*?))?(?: = (?P<default>.*))?$")


class Parameter:
    def __init__(self, text: str) -> None:
        match = _PARAMETER.match(text)
        assert match is not None, text
        self.name = match["name"]
        self.type = match["type"] or ""
        self.is_optional = match["default"] is not None


class Signature:
    """One overload, such as ``(self: X, name: str, shape: tuple) -> bool``."""

    def __init__(self, text: str) -> None:
        inside = text[1 : text.rindex(")")]
        parts = re.split(r", (?=\w+(?::|$))", inside)
        self.text = text
        self.parameters = [Parameter(part) for part in parts if part and part != "*"][1:]

    def bind(
        self, module: ModuleType, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """The arguments by name, or None where they do not fit."""
        names = [parameter.name for parameter in self.parameters]
        if len(given) > len(names) or not named.keys() <= set(names[len(given) :]):
            return None
        bound = dict(zip(names, given, strict=False)) | dict(named)
        for parameter in self.parameters:
            if parameter.name not in bound:
                if not parameter.is_optional:
                    return None
            elif not _accepts(module, parameter.type, bound[parameter.name]):
                return None
        return bound


def _accepts(module: ModuleType, kind: str, value: Any) -> bool:
    """Whether the bindings convert a value to this type."""
    match kind:
        case "str":
            return isinstance(value, str)
        case "bool":
            return isinstance(value, bool)
        case "tuple":
            return isinstance(value, tuple)
        case "list":
            return isinstance(value, list)
        case "typing.SupportsInt":
            return isinstance(value, int) or hasattr(value, "__index__")
        case "typing_extensions.Buffer":
            return isinstance(value, bytes | bytearray | memoryview)
    expected = getattr(module, kind, None)
    if isinstance(expected, type):
        return isinstance(value, expected)
    # Of a class that is not here, there are no objects either.
    return not (kind.isidentifier() and type(value).__module__ == "builtins")


def make_module(
    signatures: Path, behaviours: Mapping[str, type], *, used: Mapping[str, type] | None = None
) -> ModuleType:
    """Make the module.

    Args:
        signatures: a file of `signatures`.
        behaviours: classes by name; each implements members of the genuine class of that name.
        used: only these classes are there; all of the file by default.
    """
    record = json.loads(signatures.read_text(encoding="utf-8"))
    module = ModuleType("tensorrt")
    module.__dict__["__version__"] = record["version"]
    known = {name for name, members in record["classes"].items() if members is not None}
    assert behaviours.keys() <= known, sorted(behaviours.keys() - known)
    for name in known:
        members = record["classes"][name]
        if "members" in members:
            kind: type = enum.IntEnum(name, members["members"])
        else:
            kind = _make_class(module, name, members, behaviours.get(name, object))
        if used is None or name in used:
            setattr(module, name, kind)
    return module


def _make_class(module: ModuleType, name: str, members: Mapping[str, Any], behaviour: type) -> type:
    genuine = {*members["methods"], *members["properties"], *members["constants"]}
    own = {member for member in vars(behaviour) if not member.startswith("_")}
    assert own <= genuine, f"{name} has no {sorted(own - genuine)}"
    namespace: dict[str, Any] = {"__setattr__": _refuse_unknown(name, members["properties"])}
    for constant, value in members["constants"].items():
        namespace[constant] = value
    for method, texts in members["methods"].items():
        namespace[method] = _checked(module, name, method, texts, getattr(behaviour, method, None))
    for attribute, access in members["properties"].items():
        namespace[attribute] = _property(name, attribute, access)
    kind = type(name, (behaviour,), namespace)
    # Where the genuine class has no constructor, only behaviours make objects of it.
    if "__init__" not in members["methods"]:
        kind.__init__ = _refuse_making(name)  # type: ignore[misc]
        kind.make = classmethod(lambda cls, *args: _made(cls, behaviour, *args))  # type: ignore[attr-defined]
    return kind


def _made(kind: type, behaviour: type, *arguments: Any) -> Any:
    made = object.__new__(kind)
    behaviour.__init__(made, *arguments)
    return made


def _refuse_making(name: str) -> Callable[..., None]:
    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise TypeError(f"{name}: No constructor defined!")

    return refuse


def _refuse_unknown(name: str, properties: Mapping[str, str]) -> Callable[..., None]:
    """Bound classes take no new attributes; classes derived from them in Python do."""

    def refuse(self: Any, attribute: str, value: Any) -> None:
        is_known = attribute.startswith("_") or properties.get(attribute) == "rw"
        if type(self).__name__ == name and not is_known:
            raise AttributeError(f"{name!r} object has no attribute {attribute!r} to set")
        object.__setattr__(self, attribute, value)

    return refuse


def _property(name: str, attribute: str, access: str) -> property:
    def read(self: Any) -> Any:
        if not hasattr(self, f"_{attribute}"):
            raise NotImplementedError(f"the fake {name} has no {attribute}")
        return getattr(self, f"_{attribute}")

    def write(self: Any, value: Any) -> None:
        object.__setattr__(self, f"_{attribute}", value)

    return property(read, write if access == "rw" else None)


def _checked(
    module: ModuleType, name: str, method: str, texts: list[str], behaviour: Any
) -> Callable[..., Any]:
    signatures = [Signature(text) for text in texts]

    def call(self: Any, *given: Any, **named: Any) -> Any:
        for signature in signatures:
            bound = signature.bind(module, given, named)
            if bound is not None:
                break
        else:
            raise TypeError(
                f"{name}.{method}(): incompatible function arguments {given} {dict(named)}; "
                f"supported: {texts}"
            )
        if behaviour is None:
            raise NotImplementedError(f"the fake {name} does not {method}")
        return behaviour(self, **bound)

    return call
