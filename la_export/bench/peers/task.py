"""What all are asked: prompts and texts as token ids, the same ones for every program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from la_export.bench.peers.entries import Need
from la_export.bench.peers.race import AskedPrompt, Report, Texts
from la_export.bench.speed.questions import Question, hash_questions, load_questions
from la_export.perplexity import load_texts
from la_runtime.bundle import Manifest
from la_runtime.errors import UsageError
from la_runtime.generation import Engine

__all__ = ["Bundle", "Task", "encode_questions", "load_task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle of ours that takes part."""

    folder: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a race is about.

    Args:
        bundles: of ours, all built from the same weights.
        prompts: in order.
        prompts_sha256: of their texts.
        texts: whose perplexity is taken.
        need: of every process.
    """

    bundles: tuple[Bundle, ...]
    prompts: tuple[AskedPrompt, ...]
    prompts_sha256: str
    texts: Texts
    need: Need

    @property
    def longest(self) -> AskedPrompt:
        """The prompt of the most tokens."""
        return max(self.prompts, key=lambda prompt: len(prompt.token_ids))


def load_task(
    folders: Sequence[Path],
    *,
    per_category: int,
    new_tokens: int,
    perplexity_tokens: int,
    threads: int,
    report: Report,
) -> Task:
    """Encode prompts and texts with the tokenizer and the chat template of the first bundle.

    Args:
        folders: of the bundles.
        per_category: prompts of each category.
        new_tokens: most of an answer.
        perplexity_tokens: tokens of texts that count; 0 for no texts.
        threads: for one pass.
        report: told in a line what takes long.

    Raises:
        UsageError: the bundles are of different models.
    """
    bundles = []
    for folder in folders[1:]:
        with Engine.open(folder, threads=threads) as engine:
            bundles.append(Bundle(folder=folder, manifest=engine.bundle.manifest))
    with Engine.open(folders[0], threads=threads) as engine:
        bundles.insert(0, Bundle(folder=folders[0], manifest=engine.bundle.manifest))
        _check_one_source(bundles)
        model = engine.bundle.manifest.model
        questions = load_questions(
            None,
            per_category=per_category,
            fits=lambda text: len(engine.encode(text, chat=True)) + new_tokens <= model.context,
        )
        prompts = encode_questions(engine, questions)
        texts = Texts(own=(), pages=())
        if perplexity_tokens:
            found = load_texts(
                engine,
                num_tokens=perplexity_tokens,
                progress=lambda count: report(f"the model has written {count} tokens of text"),
            )
            texts = Texts(own=found.own, pages=found.pages)
    return Task(
        bundles=tuple(bundles),
        prompts=prompts,
        prompts_sha256=hash_questions(questions),
        texts=texts,
        need=Need(
            threads=threads,
            context=_longest(prompts, texts, new_tokens),
            eos_token_ids=model.eos_token_ids,
        ),
    )


def encode_questions(engine: Engine, questions: Sequence[Question]) -> tuple[AskedPrompt, ...]:
    """Questions as the first message of a chat."""
    return tuple(
        AskedPrompt(
            name=question.name,
            category=question.category,
            token_ids=engine.encode(question.text, chat=True),
        )
        for question in questions
    )


def _check_one_source(bundles: Sequence[Bundle]) -> None:
    if len({bundle.manifest.model.source_digest for bundle in bundles}) > 1:
        raise UsageError(
            "the bundles were built from different weights; give --bundle folders of one model"
        )


def _longest(prompts: Sequence[AskedPrompt], texts: Texts, new_tokens: int) -> int:
    """Positions that anything asked takes."""
    answers = [len(prompt.token_ids) + new_tokens for prompt in prompts]
    windows = [len(window.token_ids) for window in (*texts.own, *texts.pages)]
    return max(*answers, *windows)
