"""The `la-runtime` command.

This module imports next to nothing: from here on Ctrl-C ends the program in one line, however
much there still is to import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from la_runtime.errors import ExitCode

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and end the program.

    Args:
        arguments: what follows the program's name; None takes those it was started with.
    """
    try:
        from la_runtime.cli.group import commands

        commands(arguments)
    except BaseException as error:
        if not _is_interruption(error):
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)


def _is_interruption(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind it; libraries turn one during their import into an ImportError."""
    if isinstance(error, SystemExit):
        return False
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
