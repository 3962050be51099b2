"""Rung 13: the runtime's tokenizer and chat template say what transformers' say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from la_export.verify.findings import Figure, Finding
from la_export.verify.ladder import Ladder
from la_export.verify.prompts import CHATS, PROMPTS
from la_export.verify.reference import SourceModel
from la_runtime.chat import CHAT_TEMPLATE_NAME, ChatTemplate
from la_runtime.errors import UsageError
from la_runtime.tokenizer import IncrementalDecoder, Tokenizer

__all__ = ["check_text"]

_NUM_SPLITS: Final = 4
_SEED: Final = 13
_SHOWN: Final = 40
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
    ids = _chosen_ids(ladder)
    problems = [
        *_compare_vocabularies(ladder.engine.tokenizer, ladder.source),
        *_compare_single_tokens(ladder.engine.tokenizer, ladder.source, ids),
        *_compare_tokenizers(ladder.engine.tokenizer, ladder.source, texts),
        *_compare_templates(ladder, ladder.source),
    ]
    return Finding(
        figures=(
            Figure(name="texts", value=len(texts)),
            Figure(name="single tokens", value=len(ids)),
            Figure(name="chats", value=2 * len(CHATS) if ladder.has_chat_template else 0),
        ),
        problems=tuple(problems),
        detail=f"the vocabulary, {len(ids)} tokens one by one, {len(texts)} texts both ways and "
        + (f"{2 * len(CHATS)} chats" if ladder.has_chat_template else "no chat template"),
    )


def _chosen_ids(ladder: Ladder) -> list[int]:
    """Ids that mean a token, all of them or some from everywhere."""
    known = sorted(ladder.engine.tokenizer.backend.get_vocab(with_added_tokens=True).values())
    count = min(ladder.settings.vocabulary_texts, len(known))
    return [known[index * len(known) // count] for index in range(count)]


def _compare_vocabularies(tokenizer: Tokenizer, source: SourceModel) -> list[str]:
    found = tokenizer.backend.get_vocab(with_added_tokens=True)
    expected = source.vocabulary()
    unequal = sorted(
        token for token in {*found, *expected} if found.get(token) != expected.get(token)
    )
    return [
        f"token {token!r:.40} is {found.get(token, 'unknown')}, expected "
        f"{expected.get(token, 'none')}"
        for token in unequal
    ]


def _compare_single_tokens(
    tokenizer: Tokenizer, source: SourceModel, ids: Sequence[int]
) -> list[str]:
    return [
        f"token {token_id} alone gives {found!r:.40}, expected {expected!r:.40}"
        for token_id in ids
        if (found := tokenizer.decode([token_id])) != (expected := source.decode([token_id]))
    ]


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
        for how, decoded in (
            ("whole", tokenizer.decode(token_ids)),
            *((how, _decode_in_pieces(tokenizer, pieces)) for how, pieces in _splits(token_ids)),
        ):
            if decoded != expected_text:
                problems.append(
                    f"tokens of {text!r:.40} decoded {how} give {decoded!r:.60}, expected "
                    f"{expected_text!r:.60}"
                )
    return problems


def _splits(token_ids: Sequence[int]) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Ways in which the tokens of a text can come: passes give one token, or several."""
    yield "token by token", [(token_id,) for token_id in token_ids]
    rng = np.random.default_rng(_SEED)
    for _ in range(_NUM_SPLITS):
        cuts = [0, *np.flatnonzero(rng.random(len(token_ids)) < rng.random()), len(token_ids)]
        yield "piece by piece", [tuple(token_ids[a:b]) for a, b in pairwise(cuts)]


def _decode_in_pieces(tokenizer: Tokenizer, pieces: Sequence[tuple[int, ...]]) -> str:
    incremental = IncrementalDecoder(tokenizer)
    return "".join(incremental.push(piece) for piece in pieces) + incremental.flush()


def _compare_templates(ladder: Ladder, source: SourceModel) -> list[str]:
    try:
        template = ChatTemplate.load(ladder.bundle.root)
    except UsageError:
        template = None
    problems = []
    if ladder.has_chat_template and (expected_text := source.template_text()) is not None:
        text = ladder.bundle.path(CHAT_TEMPLATE_NAME).read_text(encoding="utf-8")
        if text != expected_text:
            problems.append(
                f"the template's text is not the checkpoint's: {_first_change(text, expected_text)}"
            )
    for index, chat in enumerate(CHATS):
        for prompted in (False, True):
            found = _render(template, ladder.engine.tokenizer, chat, prompted)
            expected = source.render(chat, add_generation_prompt=prompted)
            if found != expected:
                problems.append(f"chat {index} gives {found!r:.80}, expected {expected!r:.80}")
    return problems


def _first_change(found: str, expected: str) -> str:
    place = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
        min(len(found), len(expected)),
    )
    return (
        f"from character {place} on it is {found[place : place + _SHOWN]!r}, expected "
        f"{expected[place : place + _SHOWN]!r}"
    )


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
