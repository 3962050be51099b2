"""Classes of a TensorRT module as JSON, from what its bindings say of themselves.

A program of its own, so that the genuine bindings are imported in a process of theirs:
`python introspect.py MODULE CLASS...` prints the JSON; a class that is not there is null.
"""

# ruff: noqa: T201 (its output is what it prints)

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import Any

_NUMBERED = re.compile(r"^\s*\d+\.\s")
_PREFIX = re.compile(r"tensorrt\w*_bindings\.tensorrt\w*\.")


def _signatures(function: Any, name: str) -> list[str]:
    """`(self: X, a: T) -> R` of each overload."""
    lines = (function.__doc__ or "").splitlines()
    texts = [_NUMBERED.sub("", line) for line in lines if _NUMBERED.match(line)] or lines[:1]
    return [text.strip().removeprefix(name) for text in texts if text.strip().startswith(name)]


def _describe(kind: type, package: str) -> dict[str, Any]:
    if hasattr(kind, "__members__"):
        return {"members": {name: int(value) for name, value in kind.__members__.items()}}
    methods, properties, constants = {}, {}, {}
    for owner in kind.__mro__:
        if not owner.__module__.startswith(package):
            continue
        for name, value in vars(owner).items():
            if name.startswith("_") and name != "__init__":
                continue
            if isinstance(value, property):
                properties.setdefault(name, "ro" if value.fset is None else "rw")
            elif hasattr(type(value), "__members__"):
                constants.setdefault(name, int(value))
            elif not isinstance(value, type):
                signatures = _signatures(value, name)
                if signatures or name != "__init__":
                    methods.setdefault(name, signatures)
    return {"methods": methods, "properties": properties, "constants": constants}


def main() -> None:
    module_name, *classes = sys.argv[1:]
    module = importlib.import_module(module_name)
    package = module_name.split(".")[0]
    described = {}
    for name in classes:
        kind = getattr(module, name, None)
        described[name] = None if kind is None else _describe(kind, package)
    text = json.dumps(
        {"version": module.__version__, "classes": described}, indent=1, sort_keys=True
    )
    print(_PREFIX.sub("", text))


if __name__ == "__main__":
    main()
