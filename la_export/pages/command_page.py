"""What docs/cli.md says of commands, options and exit codes, read from the click objects."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import click

from la_export.cli.group import main as export_commands
from la_export.pages.blocks import make_table, read_meanings
from la_runtime import errors
from la_runtime.cli.group import commands as runtime_commands
from la_runtime.errors import ExitCode, LookaheadError

__all__ = ["COMMANDS", "COMMAND_BLOCKS", "walk_commands"]

COMMANDS: Final[Mapping[str, click.Group]] = {
    "la-export": export_commands,
    "la-runtime": runtime_commands,
}
_DEFAULT_IN_HELP: Final = re.compile(r"\s*\[default: (?P<default>[^\]]+)\]")


def walk_commands(program: str) -> Iterator[tuple[click.Context, click.Command]]:
    """Every command of a program that can be run, each with a context that knows its name."""
    group = COMMANDS[program]
    yield from _walk(group, click.Context(group, info_name=program))


def _walk(
    command: click.Command, context: click.Context
) -> Iterator[tuple[click.Context, click.Command]]:
    if not isinstance(command, click.Group):
        yield context, command
        return
    for name, member in sorted(command.commands.items()):
        yield from _walk(member, click.Context(member, info_name=name, parent=context))


def _render_program(program: str) -> str:
    return "\n\n".join(
        _render_command(context, command) for context, command in walk_commands(program)
    )


def _render_command(context: click.Context, command: click.Command) -> str:
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [f"### `{context.command_path}`", f"`{context.command_path} {usage}`"]
    parts += [
        _as_prose(paragraph)
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n")
        if paragraph
    ]
    rows = [
        _option_row(option, context)
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden
    ]
    return "\n\n".join([*parts, make_table(("Option", "Default", "Meaning"), rows)])


def _as_prose(text: str) -> str:
    """Help on one line; what stands in angle brackets is no HTML."""
    return " ".join(text.split()).replace("<", r"\<")


def _option_row(option: click.Option, context: click.Context) -> tuple[str, str, str]:
    # Short names first, as --help writes them.
    names = sorted([*option.opts, *option.secondary_opts], key=lambda name: name.startswith("--"))
    value = "" if option.is_flag or option.count else f" {option.make_metavar(context)}"
    text = option.help or ""
    said = _DEFAULT_IN_HELP.search(text)
    text = _DEFAULT_IN_HELP.sub("", text)
    default = _show_default(option, said=said["default"] if said else None)
    if option.multiple and "repeat" not in text:
        text = f"{text} May be repeated.".strip()
    shown = ", ".join(f"`{name}{value}`" for name in names)
    return shown, default, _as_prose(text)


def _show_default(option: click.Option, *, said: str | None) -> str:
    """The default: what the help says in words, else the value; flags have none."""
    if option.required:
        return "required"
    default = said or ("" if option.is_flag else option.default)
    values = default if isinstance(default, tuple | list) else (default,)
    shown = [str(value) for value in values if isinstance(value, str | int | float) and value != ""]
    return ", ".join(value if " " in value else f"`{value}`" for value in shown)


def _render_exit_codes() -> str:
    """Exit codes with their meaning and the errors that end in them."""
    meanings = read_meanings(inspect.getdoc(ExitCode))
    rows = []
    for code in ExitCode:
        kinds = [name for name in errors.__all__ if _ends_with(getattr(errors, name), code)]
        rows.append(
            (str(code.value), meanings[code.name], ", ".join(f"`{kind}`" for kind in kinds))
        )
    return make_table(("Code", "Meaning", "Errors"), rows)


def _ends_with(kind: type, code: ExitCode) -> bool:
    return issubclass(kind, LookaheadError) and kind.exit_code == code


COMMAND_BLOCKS: Final[Mapping[str, Callable[[], str]]] = {
    "la-export": lambda: _render_program("la-export"),
    "la-runtime": lambda: _render_program("la-runtime"),
    "exit-codes": _render_exit_codes,
}
