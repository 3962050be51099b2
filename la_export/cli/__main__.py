"""Runs the command as `python -m la_export.cli`."""

from __future__ import annotations

from la_export.cli.group import main

if __name__ == "__main__":
    main(prog_name="la-export")
