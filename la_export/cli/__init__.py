"""The `la-export` command. One file a command; heavy imports live in command bodies."""

from __future__ import annotations

from la_export.cli.group import main

__all__ = ["main"]
