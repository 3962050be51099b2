"""Recipe files: options of `la-export build` in TOML.

A key is an option without its dashes: which there are, and of what kind, is read from the command.
The values take the place of the options' defaults, so that what is typed beside a recipe overrides
it.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from la_runtime.errors import UsageError

__all__ = ["load_recipe", "recipe_option"]

# Options that say nothing of the bundle.
_NO_KEYS: Final = frozenset({"recipe", "as_json", "quiet", "verbose"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What TOML values an option takes, and what they are called."""

    one: str
    several: str
    accepts: Callable[[Any], bool]


def recipe_option(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--recipe FILE``, read before its other options."""
    return click.option(
        "--recipe",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_set_defaults,
        metavar="FILE",
        help="TOML file of these options, such as engines/recipes/smollm2-135m-fp32.toml; those "
        "given beside it override it.",
    )(command)


def _set_defaults(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is not None:
        context.default_map = load_recipe(path, context.command)


def load_recipe(path: Path, command: click.Command) -> dict[str, Any]:
    """Read a recipe for a command.

    Args:
        path: the file.
        command: whose options the keys are.

    Returns:
        The values by the names of the command's parameters.

    Raises:
        UsageError: the file cannot be read or is no TOML, a key is no option, or a value is not of
            its kind.
    """
    options = {_key(option): option for option in command.params if _may_be_key(option)}
    defaults = {}
    for key, value in _parse(path).items():
        option = options.get(key)
        if option is None:
            raise UsageError(
                f"recipe {path} has the unknown key {key!r}: {_hint(key, options)}known keys are "
                f"{', '.join(sorted(options))}"
            )
        expected = _describe_unless_right(option, value)
        if expected is not None:
            raise UsageError(f"recipe {path}: {key} is {value!r}; expected {expected}")
        defaults[str(option.name)] = value
    return defaults


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"recipe {path} cannot be read: {error.strerror or error}; give a TOML file like those "
            "in engines/recipes"
        ) from error
    except ValueError as error:  # no UTF-8, or no TOML: then it names line and column
        raise UsageError(f"recipe {path} is not valid TOML: {error}") from error


def _may_be_key(option: click.Parameter) -> bool:
    return isinstance(option, click.Option) and option.name not in _NO_KEYS


def _key(option: click.Parameter) -> str:
    return option.opts[-1].removeprefix("--")


def _hint(key: str, options: Mapping[str, click.Parameter]) -> str:
    near = difflib.get_close_matches(key.lower(), options, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def _describe_unless_right(option: click.Parameter, value: object) -> str | None:
    """What an option expects, if this value is something else."""
    kind = _kind_of(option)
    if not getattr(option, "multiple", False):
        return None if kind.accepts(value) else kind.one
    is_right = isinstance(value, list) and all(map(kind.accepts, value))
    return None if is_right else f"a list of {kind.several}"


def _kind_of(option: click.Parameter) -> _Kind:
    match option.type:
        case click.Choice(choices=choices):
            known = ", ".join(map(str, choices))
            return _Kind(
                one=f"one of: {known}",
                several=f"these: {known}",
                accepts=tuple(choices).__contains__,
            )
        case click.types.BoolParamType():
            return _Kind(one="true or false", several="true and false", accepts=_is_a(bool))
        case click.types.IntParamType():
            return _Kind(one="a whole number", several="whole numbers", accepts=_is_a(int))
        case _:
            return _Kind(one="text", several="texts", accepts=_is_a(str))


def _is_a(kind: type) -> Callable[[Any], bool]:
    """Whether a value is exactly of a type: true is no number."""
    return lambda value: type(value) is kind
