"""Perplexity of a bundle beside its source's, over the same windows of tokens.

Two kinds of text: answers that the model wrote itself, which is what it is asked to go on with
when it decodes, and pages in the public domain, which it did not choose.

Whoever else can score tokens takes part with a function of its own:

    texts = load_texts(engine, num_tokens=50_000)
    perplexity_of(score_windows, texts.own)

where `score_windows` is given windows and gives back, for each, the natural log-probabilities of
its tokens from `scored_from` on; see `scoring.ScoreWindows`.
"""

from __future__ import annotations

from la_export.perplexity.measurement import SOURCE_ARITHMETIC, make_facts, measure
from la_export.perplexity.scoring import (
    BackendScorer,
    Perplexity,
    ReferenceScorer,
    ScoreWindows,
    perplexity_of,
    token_log_probs,
)
from la_export.perplexity.texts import DEFAULT_TOKENS, Texts, load_texts
from la_export.perplexity.windows import WINDOW, Window

__all__ = [
    "DEFAULT_TOKENS",
    "SOURCE_ARITHMETIC",
    "WINDOW",
    "BackendScorer",
    "Perplexity",
    "ReferenceScorer",
    "ScoreWindows",
    "Texts",
    "Window",
    "load_texts",
    "make_facts",
    "measure",
    "perplexity_of",
    "token_log_probs",
]
