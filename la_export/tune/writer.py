"""Lets a model write its own texts: it asks itself a question, and answers it greedily.

The question is sampled behind the chat template's beginning of a user's turn (Magpie, Xu et al.
2024), so no data is needed. Many texts are written side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from transformers import PreTrainedModel

from la_export.question_frame import QuestionFrame
from la_export.tune.attention import hide
from la_export.tune.kv_cache import GrowingCache
from la_export.tune.texts import OwnText

__all__ = ["TextWriter"]

_PAD = 0
# Texts that have ended are carried on until they are more than this share.
_CROWDED = 0.75
_QUESTION_TOKENS = 96
# At 1 a small model asks what nobody would; cooler, its questions are more alike.
_QUESTION_TEMPERATURE = 0.7
_SEED = 20_260

Choice = Callable[[torch.Tensor], torch.Tensor]


class TextWriter:
    """Writes texts in rounds.

    Args:
        model: a causal language model in eval mode.
        frame: around its questions.
        ends: tokens that end a turn.
        length: tokens of a text, at most.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        frame: QuestionFrame,
        *,
        ends: Collection[int],
        length: int,
    ) -> None:
        self._model = model
        self._frame = frame
        self._ends = frozenset(ends)
        self._length = length

    def write(self, seed: int, count: int) -> list[OwnText]:
        """Texts of one round; one whose question or answer is empty is left out.

        Args:
            seed: of the round; equal ones give equal texts.
            count: questions to begin.
        """
        frame = self._frame
        generator = torch.Generator().manual_seed(_SEED + seed)

        def sample(logits: torch.Tensor) -> torch.Tensor:
            shares = torch.softmax(logits / _QUESTION_TEMPERATURE, dim=-1).cpu()
            return torch.multinomial(shares, 1, generator=generator).squeeze(-1)

        most = min(_QUESTION_TOKENS, self._length // 3)
        questions = self._continue([frame.before] * count, [most] * count, sample)
        prompts = [
            (*frame.before, *question, *(frame.behind or ())) for question in questions if question
        ]
        room = [max(1, self._length - len(prompt)) for prompt in prompts]
        answers = self._continue(prompts, room, lambda logits: logits.argmax(dim=-1))
        return [
            OwnText(token_ids=(*prompt, *answer), answered_from=len(prompt))
            for prompt, answer in zip(prompts, answers, strict=True)
            if answer
        ]

    @torch.no_grad()
    def _continue(
        self, prompts: Sequence[tuple[int, ...]], room: Sequence[int], choose: Choice
    ) -> list[tuple[int, ...]]:
        """What is written behind each prompt, without the token that ended it.

        Args:
            prompts: padded on the left, so that all go on in one column.
            room: most tokens for each.
            choose: [texts] tokens of logits [texts, vocab_size].
        """
        if not prompts:
            return []
        width = max(map(len, prompts))
        ids = torch.tensor([[_PAD] * (width - len(p)) + list(p) for p in prompts])
        first = torch.tensor([width - len(p) for p in prompts])  # column of a text's first token
        cache = GrowingCache(width + max(room))
        written: list[list[int]] = [[] for _ in prompts]
        live = list(range(len(prompts)))
        rows = list(range(len(prompts)))  # of the cache, one for each live text
        while True:
            logits = self._score_last(ids, first, cache)
            tokens = choose(logits.float()).tolist()
            going = []
            for text, row in zip(live, rows, strict=True):
                if tokens[row] in self._ends:
                    continue
                written[text].append(tokens[row])
                if len(written[text]) < room[text]:
                    going.append((text, row))
            if not going:
                return [tuple(tokens) for tokens in written]
            live, rows = [text for text, _ in going], [row for _, row in going]
            ids = torch.tensor(tokens).unsqueeze(-1)
            if len(rows) < _CROWDED * len(tokens):
                kept = torch.tensor(rows)
                cache.keep(kept)
                ids, first, rows = ids[kept], first[kept], list(range(len(kept)))

    def _score_last(
        self, ids: torch.Tensor, first: torch.Tensor, cache: GrowingCache
    ) -> torch.Tensor:
        """[texts, vocab_size] logits behind the last of the new columns."""
        start = cache.get_seq_length()
        device = self._model.device
        ids, first = ids.to(device), first.to(device)
        columns = torch.arange(start + ids.shape[1], device=device)
        new = columns[start:]
        is_hidden = (columns > new.unsqueeze(-1)) | (columns < first.view(-1, 1, 1))
        is_hidden &= columns != new.unsqueeze(-1)  # padding sees itself, or nothing
        logits: torch.Tensor = self._model(
            input_ids=ids,
            attention_mask=hide(is_hidden.unsqueeze(1), self._model.dtype),
            position_ids=(new - first.unsqueeze(-1)).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits
