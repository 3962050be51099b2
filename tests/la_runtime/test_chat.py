from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from la_runtime.chat import ChatTemplate
from la_runtime.errors import BundleError, UsageError

NOW = datetime(2026, 3, 5, 7, 8, 9)

# SmolLM2-Instruct's own.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# In the manner of Llama 3.1: the date, block trimming, tools inside the first user message.
LLAMA3_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{% for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception("Unknown role " + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# In the manner of Qwen 3: namespaces, reversed loops, reasoning, tool calls, a switch.
QWEN3_LIKE = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
last: {{ ns.last_query_index }}
{% for message in messages %}
    {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if reasoning %}{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{% endif %}
    {%- if message.content is defined %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n' }}{{ call.function.arguments | tojson }}{{ '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
{{ dict(a=1)['a'] }}{{ eos_token }}{{ pad_token }}"""

TEMPLATES = {"smollm2": SMOLLM2, "llama3": LLAMA3_LIKE, "qwen3": QWEN3_LIKE}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "What is <b>2 & 2</b>?"}],
    "system first": [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "你好 👩‍👩‍👧"},
    ],
    "several turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "thinking": "hm 'quoted'"},
        {"role": "user", "content": "c\n\n", "name": None},
    ],
    "tool call": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "get", "arguments": {"city": "Zürich <x>"}}}],
        },
        {"role": "tool", "content": '{"t": 3}'},
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get", "description": "wetter für 'x' & <y>", "parameters": {"n": 1}},
    }
]


def _make_theirs(template: str) -> PreTrainedTokenizerFast:
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1, "<pad>": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer


class _FixedDatetime(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return NOW


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False, "date_string": "today"}])
def test_rendering_equals_transformers(
    source: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    variables: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", _FixedDatetime)
    theirs = _make_theirs(source)
    ours = ChatTemplate(
        {"default": source},
        special_tokens={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
        now=lambda: NOW,
    )

    text = ours.render(
        messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
    )

    assert text == theirs.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        **variables,
    )


@pytest.mark.parametrize("legacy", [False, True], ids=["jinja file", "in the configuration"])
def test_a_saved_template_is_loaded_with_its_special_tokens(tmp_path: Path, legacy: bool) -> None:
    theirs = _make_theirs(LLAMA3_LIKE)
    theirs.save_pretrained(tmp_path, save_jinja_files=not legacy)
    assert (tmp_path / "chat_template.jinja").is_file() is not legacy
    messages = [{"role": "user", "content": "hi"}]

    text = ChatTemplate.load(tmp_path).render(messages, variables={"date_string": "today"})

    assert text == theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, date_string="today"
    )


def test_tools_choose_the_template_made_for_them(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = ChatTemplate.load(tmp_path)
    messages = [{"role": "user", "content": "hi"}]

    assert template.render(messages) == "plain"
    assert template.render(messages, tools=TOOLS) == "1 tools"


def test_given_special_tokens_replace_the_bundle_s_own() -> None:
    template = _make("{{ bos_token }}{{ eos_token }}", special_tokens={"bos_token": "<s>"})

    text = template.render([{"role": "user", "content": ""}], eos_token="<end>")

    assert text == "<s><end>"


def _make(source: str, *, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens=special_tokens or {})


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''['__class__']['__subclasses__']() }}",
        "{{ (''|attr('__class__')).mro() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages).x.y }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__dict__ = 1 %}",
        "{{ messages.append(1) }}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{% include 'secret' %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(attack: str) -> None:
    template = _make("{% if true %}" + attack + "{% endif %}")

    with pytest.raises(BundleError, match=r"chat template (tries what is forbidden|fails)"):
        template.render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "attack",
    ["{{ strftime_now.__globals__ }}", "{{ '{0.__class__.__init__}'.format(messages) }}"],
)
def test_what_the_sandbox_hides_prints_as_nothing(attack: str) -> None:
    assert _make(attack).render([{"role": "user", "content": "hi"}]) == ""


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", print])
def test_values_that_are_not_json_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match=r"message 0, content holds a \w+; expected JSON values"):
        _make("x").render([{"role": "user", "content": value}])


def test_subclasses_of_text_lose_their_methods() -> None:
    class Secret(str):
        def leak(self) -> str:
            return "secret"

    template = _make("{{ messages[0].content.leak is defined }} {{ messages[0].content }}")

    assert template.render([{"role": "user", "content": Secret("x")}]) == "False x"


def test_refusing_messages_is_the_caller_s_mistake() -> None:
    messages = [{"role": "robot", "content": "hi"}]

    with pytest.raises(UsageError, match="refuses these messages: Unknown role robot"):
        _make(LLAMA3_LIKE).render(messages)


@pytest.mark.parametrize("messages", [[], ()])
def test_an_empty_conversation_is_refused(messages: Sequence[dict[str, str]]) -> None:
    with pytest.raises(UsageError, match="conversation is empty"):
        _make("x").render(messages)


def test_a_message_that_is_no_object_is_refused() -> None:
    with pytest.raises(UsageError, match="message 1 is 'hi', expected an object"):
        _make("x").render([{"role": "user", "content": ""}, "hi"])  # type: ignore[list-item]


def test_a_faulty_template_is_named() -> None:
    with pytest.raises(BundleError, match="fails on these messages: TypeError"):
        _make("{{ 1 + 'a' }}").render([{"role": "user", "content": ""}])


def test_a_template_that_is_no_jinja_is_named() -> None:
    with pytest.raises(BundleError, match=r"'default' is not valid Jinja: .* \(line 2\)"):
        _make("ok\n{% if %}")


def test_a_bundle_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")

    with pytest.raises(UsageError, match=r"has no chat template.*plain text without --chat"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "configured",
    [
        5,
        {"default": "x"},
        ["x"],
        [{"name": "default"}],
        [{"name": "default", "template": 5}],
        [{"name": "default", "template": None}],
        [{"name": ["default"], "template": "x"}],
    ],
)
def test_a_malformed_template_entry_is_named(tmp_path: Path, configured: object) -> None:
    config = json.dumps({"chat_template": configured})
    (tmp_path / "tokenizer_config.json").write_text(config)

    with pytest.raises(BundleError, match="expected text or a list of objects with texts 'name'"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "'default' is nested too deeply"),
        (
            "{% for x in y %}" * 30 + "{% endfor %}" * 30,
            "'default' cannot be compiled: SyntaxError: too many statically nested blocks",
        ),
    ],
)
def test_a_template_beyond_the_compiler_s_limits_is_refused(source: str, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        _make(source)


@pytest.mark.parametrize("kind", ["list", "object"])
def test_messages_that_are_nested_too_deeply_are_refused(kind: str) -> None:
    def nest(depth: int) -> object:
        content: object = "x"
        for _ in range(depth):
            content = [content] if kind == "list" else {"x": content}
        return content

    def render(depth: int) -> str:
        messages = [{"role": "user", "content": nest(depth)}]
        return _make("{{ messages[0].content | tojson }}").render(messages)

    assert render(60) == json.dumps(nest(60))
    with pytest.raises(UsageError, match=r"message 0, content.* nested more than 64 deep"):
        render(5000)


def test_templates_without_a_default_are_named() -> None:
    template = ChatTemplate({"rag": "x"}, special_tokens={})

    with pytest.raises(BundleError, match="are named rag; expected one named 'default'"):
        template.render([{"role": "user", "content": ""}])


def test_a_template_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")

    with pytest.raises(BundleError, match="is not UTF-8"):
        ChatTemplate.load(tmp_path)
