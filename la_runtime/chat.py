"""Chat messages to the text a model was trained on, with the bundle's own template.

Owns the sandbox the template runs in: a template is a program that came with the weights, so it
sees plain values only and can reach nothing else. It does not know tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from la_runtime.errors import BundleError, UsageError
from la_runtime.tokenizer import read_special_tokens, read_tokenizer_config

__all__ = ["CHAT_TEMPLATE_NAME", "ChatTemplate"]

CHAT_TEMPLATE_NAME: Final = "chat_template.jinja"

_DEFAULT: Final = "default"
_TOOL_USE: Final = "tool_use"
_MOST_NESTING: Final = 64
_NO_VARIABLES: Final[Mapping[str, object]] = {}

# Names under which a message's reasoning is passed; templates read the first.
_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The chat template of one bundle, compiled.

    Renders what `apply_chat_template(tokenize=False)` of transformers renders.

    Args:
        sources: template text by name: ``default``, and ``tool_use`` if tools have their own.
        special_tokens: text of the special tokens by role, visible to the template.
        now: the clock behind the template's `strftime_now`.

    Raises:
        BundleError: a template is not valid Jinja.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = _make_environment(now)
        self._templates = {
            name: _compile(environment, source, name=name) for name, source in sources.items()
        }
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """Load the template from `chat_template.jinja`, else from `tokenizer_config.json`.

        Raises:
            UsageError: the bundle has no chat template.
            BundleError: a file is malformed.
        """
        return cls(_read_sources(folder), special_tokens=read_special_tokens(folder))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        variables: Mapping[str, object] = _NO_VARIABLES,
    ) -> str:
        """Text of a conversation.

        Args:
            messages: one or more, each with `role`, `content` and whatever the template reads;
                JSON values only. Fields that are None count as absent.
            add_generation_prompt: end with the header of the assistant's answer.
            tools: JSON schemas of the functions the model may call.
            bos_token: replaces the bundle's own.
            eos_token: replaces the bundle's own.
            variables: further names for the template, such as ``enable_thinking``.

        Raises:
            UsageError: the messages are empty or not JSON, or the template refuses them.
            BundleError: the template is faulty or tries what the sandbox forbids.
        """
        if not messages:
            raise UsageError("the conversation is empty; give at least one message")
        replaced = {"bos_token": bos_token, "eos_token": eos_token}
        names = {
            **self._special_tokens,
            **{role: token for role, token in replaced.items() if token is not None},
            **{name: _plain(value, place=name) for name, value in variables.items()},
            "messages": [
                _plain_message(message, place=f"message {index}")
                for index, message in enumerate(messages)
            ],
            "tools": None if tools is None else _plain(tools, place="tools"),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return _render(self._choose(has_tools=tools is not None), names)

    def _choose(self, *, has_tools: bool) -> jinja2.Template:
        if has_tools and _TOOL_USE in self._templates:
            return self._templates[_TOOL_USE]
        if _DEFAULT not in self._templates:
            raise BundleError(
                f"the bundle's chat templates are named {', '.join(sorted(self._templates))}; "
                f"expected one named {_DEFAULT!r}"
            )
        return self._templates[_DEFAULT]


def _read_sources(folder: Path) -> Mapping[str, str]:
    path = folder / CHAT_TEMPLATE_NAME
    if path.is_file():
        try:
            return {_DEFAULT: path.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise BundleError(f"{path} is not UTF-8 ({error}); rebuild the bundle") from error
    configured = read_tokenizer_config(folder).get("chat_template")
    if not configured:
        raise UsageError(
            f"bundle {folder} has no chat template, so it cannot take chat messages; give the "
            "prompt as plain text without --chat"
        )
    if isinstance(configured, str):
        return {_DEFAULT: configured}
    if not isinstance(configured, list) or not all(map(_is_named_template, configured)):
        raise BundleError(
            f"the chat_template of {folder} is malformed: expected text or a list of objects with "
            f"texts 'name' and 'template', got {configured!r:.60}"
        )
    return {entry["name"]: entry["template"] for entry in configured}


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(field), str) for field in ("name", "template")
    )


def _compile(
    environment: ImmutableSandboxedEnvironment, source: str, *, name: str
) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise BundleError(
            f"the bundle's chat template {name!r} is not valid Jinja: {error.message} "
            f"(line {error.lineno})"
        ) from error
    except RecursionError as error:
        raise BundleError(f"the bundle's chat template {name!r} is nested too deeply") from error
    except Exception as error:  # Python compiles what Jinja made of it, and has limits of its own
        raise BundleError(
            f"the bundle's chat template {name!r} cannot be compiled: "
            f"{type(error).__name__}: {error}"
        ) from error


def _render(template: jinja2.Template, names: Mapping[str, object]) -> str:
    try:
        return template.render(names)
    except _RefusedMessagesError as error:
        raise UsageError(f"the chat template refuses these messages: {error.message}") from error
    except SecurityError as error:
        raise BundleError(
            f"the bundle's chat template tries what is forbidden to templates: {error}"
        ) from error
    except Exception as error:  # a template can raise whatever its expressions raise
        raise BundleError(
            f"the bundle's chat template fails on these messages: {type(error).__name__}: {error}"
        ) from error


def _plain_message(message: Mapping[str, Any], *, place: str) -> dict[str, object]:
    """A message of plain values, its reasoning under every name that templates read."""
    if not isinstance(message, Mapping):
        raise UsageError(
            f"{place} is {message!r:.60}, expected an object with 'role' and 'content'"
        )
    plain: dict[str, object] = {
        str(field): _plain(value, place=f"{place}, {field}")
        for field, value in message.items()
        if value is not None
    }
    for field in _REASONING_FIELDS:
        if field in plain:
            return {"thinking": plain[field], **plain, "reasoning_content": plain[field]}
    return plain


def _plain(value: object, *, place: str, depth: int = 0) -> object:
    """A deep copy made of exact JSON types, whose methods are known to be harmless."""
    if value is None or type(value) in {str, int, float, bool}:
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if depth > _MOST_NESTING:
        raise UsageError(f"{place:.40}... is nested more than {_MOST_NESTING} deep; flatten it")
    if isinstance(value, Mapping):
        return {
            str(key): _plain(item, place=f"{place}.{key}", depth=depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _plain(item, place=f"{place}[{index}]", depth=depth + 1)
            for index, item in enumerate(value)
        ]
    raise UsageError(f"{place} holds a {type(value).__name__}; expected JSON values only")


class _RefusedMessagesError(TemplateError):
    """The template called `raise_exception`."""


def _raise_exception(message: str) -> None:
    raise _RefusedMessagesError(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it; jinja2's own filter would escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _PlainDict:
    """Stands for `dict` in templates, without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _GuardedNamespace(Namespace):
    """A namespace without names that begin with an underscore, which lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` stays out of the signature, so that a template may name a field so.
        self, *positional = args
        fields = dict(*positional, **kwargs)
        for name in fields:
            _check_field(name)
        Namespace.__init__(self, fields)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_field(name)
        super().__setitem__(name, value)


def _check_field(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace field may not begin with an underscore, got {name!r}")


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only shows them."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _make_environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """The sandbox, with the names that transformers gives to templates.

    Source: huggingface/transformers, `utils/chat_template_utils.py`.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, LoopControlExtension],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    environment.globals["dict"] = _PlainDict()
    environment.globals["namespace"] = _GuardedNamespace
    return environment
