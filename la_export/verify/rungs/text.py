"""Rung 13: the runtime's tokenizer and chat template say what transformers' say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from la_export.verify.findings import Figure, Finding
from la_export.verify.ladder import Ladder
from la_export.verify.prompts import CHATS, PROMPTS
from la_export.verify.reference import SourceModel
from la_runtime.chat import ChatTemplate
from la_runtime.errors import UsageError
from la_runtime.tokenizer import IncrementalDecoder, Tokenizer

__all__ = ["check_text"]

_TEXTS: Final = (
    *(prompt.text for prompt in PROMPTS),
    " leading and trailing  spaces ",
    "tabs\tand\nnew lines\r\n\n\nand 1234567890 0.1e-5",
    "Ünïcödé ﬁ ﬂ ½ ＡＢＣ e\u0301 \u200b\u00a0",
    "हिन्दी ภาษาไทย 한국어 日本語 עברית Ελληνικά",
    "👨‍👩‍👧‍👦🏳️‍🌈🇩🇪",
)


def check_text(ladder: Ladder) -> Finding:
    """Texts to tokens, tokens to texts, and conversations to texts."""
    if ladder.source is None:
        return Finding(skipped="needs transformers and the checkpoint (--reference torch)")
    texts = (*_TEXTS, *_special_texts(ladder.engine.tokenizer))
    problems = [
        *_compare_tokenizers(ladder.engine.tokenizer, ladder.source, texts),
        *_compare_templates(ladder, ladder.source),
    ]
    return Finding(
        figures=(
            Figure(name="texts", value=len(texts)),
            Figure(name="chats", value=2 * len(CHATS) if ladder.has_chat_template else 0),
        ),
        problems=tuple(problems),
        detail=f"{len(texts)} texts both ways and "
        + (f"{2 * len(CHATS)} chats" if ladder.has_chat_template else "no chat template"),
    )


def _special_texts(tokenizer: Tokenizer) -> list[str]:
    return [f"before{token}after {token}" for token in tokenizer.special_tokens.values()]


def _compare_tokenizers(
    tokenizer: Tokenizer, source: SourceModel, texts: Sequence[str]
) -> list[str]:
    problems = []
    for text in texts:
        for add in (False, True):
            found = tokenizer.encode(text, add_special_tokens=add)
            expected = source.encode(text, add_special_tokens=add)
            if found != expected:
                place = next(
                    (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
                    min(len(found), len(expected)),
                )
                problems.append(
                    f"text {text!r:.40}: token {place} is {found[place : place + 1]}, expected "
                    f"{expected[place : place + 1]}"
                )
        token_ids = source.encode(text, add_special_tokens=False)
        expected_text = source.decode(token_ids)
        incremental = IncrementalDecoder(tokenizer)
        pieces = incremental.push(tuple(token_ids)) + incremental.flush()
        for how, decoded in (
            ("whole", tokenizer.decode(token_ids)),
            ("piece by piece", pieces),
        ):
            if decoded != expected_text:
                problems.append(
                    f"tokens of {text!r:.40} decoded {how} give {decoded!r:.60}, expected "
                    f"{expected_text!r:.60}"
                )
    return problems


def _compare_templates(ladder: Ladder, source: SourceModel) -> list[str]:
    try:
        template = ChatTemplate.load(ladder.bundle.root)
    except UsageError:
        template = None
    problems = []
    for index, chat in enumerate(CHATS):
        for prompted in (False, True):
            found = _render(template, ladder.engine.tokenizer, chat, prompted)
            expected = source.render(chat, add_generation_prompt=prompted)
            if found != expected:
                problems.append(f"chat {index} gives {found!r:.80}, expected {expected!r:.80}")
    return problems


def _render(
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    chat: Sequence[Mapping[str, Any]],
    prompted: bool,
) -> str | None:
    """Text of a chat; None when there is no template, or when the template refuses the chat."""
    if template is None:
        return None
    try:
        return template.render(
            chat,
            add_generation_prompt=prompted,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
        )
    except UsageError:
        return None
