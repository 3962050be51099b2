"""Imports the modules it is given, one after the other, and prints each one's version."""

from __future__ import annotations

import importlib
import json
import sys

__all__: list[str] = []

if __name__ == "__main__":
    for name in sys.argv[1:]:
        module = importlib.import_module(name)
        version = getattr(module, "__version__", "")
        sys.stdout.write(json.dumps({"module": name, "version": str(version)}) + "\n")
