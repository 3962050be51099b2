"""The command group, and how exceptions become one line and an exit code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from la_runtime.cli.generate import generate
from la_runtime.errors import ExitCode, LookaheadError

__all__ = ["commands"]


class _Commands(click.Group):
    """A click group whose user errors end in one line on stderr and their exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run; a `LookaheadError`, `OSError` or Ctrl-C becomes a message and an exit code."""
        standalone = kwargs.pop("standalone_mode", True)
        kwargs["standalone_mode"] = False
        _escape_what_cannot_be_printed()
        try:
            result = super().main(*args, **kwargs)
        except click.ClickException as error:
            if not standalone:
                raise
            with _giving_up_on_failing_streams():
                error.show()
            sys.exit(error.exit_code)
        except LookaheadError as error:
            if not standalone:
                raise
            _say(f"error: {error}")
            sys.exit(error.exit_code)
        except OSError as error:  # a pipe whose reader went away is click's to end
            if not standalone:
                raise
            _say(f"error: {_describe(error)}")
            sys.exit(ExitCode.ENVIRONMENT)
        except (click.Abort, KeyboardInterrupt):
            _say("interrupted")
            sys.exit(ExitCode.INTERRUPTED)
        if standalone:
            sys.exit(result if isinstance(result, int) else ExitCode.DONE)
        return result


def _escape_what_cannot_be_printed() -> None:
    """Let characters that stdout's encoding lacks come as escapes: a model writes any character."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _say(message: str) -> None:
    with _giving_up_on_failing_streams():
        click.echo(" ".join(message.split()), err=True)


def _describe(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.filename is None:  # whatever else is written or read here has a name
        return f"could not write the output: {reason}"
    return f"{os.fsdecode(error.filename)}: {reason}"


@contextmanager
def _giving_up_on_failing_streams() -> Iterator[None]:
    """Lose what a full stdout or stderr cannot take: else exiting fails, with another code."""
    with suppress(OSError):
        yield
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


@click.group(
    name="la-runtime",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="lookahead-attention", prog_name="la-runtime")
def commands() -> None:
    """Run compiled bundles with Lookahead Attention."""


commands.add_command(generate)
