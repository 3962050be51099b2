"""For the tests of whoever ships a bundle: one assertion that its decoding is lossless.

Torch-free: the bundle is compared with its own plain decoding.

    from la_export.verify.testing import assert_lossless

    def test_our_bundle_is_lossless():
        assert_lossless("engines/smollm2-135m", prompts=["Why is the sky blue?"])
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from la_export.verify.decoding import Decoded, decode
from la_export.verify.epsilon import measure_epsilon
from la_export.verify.probes import GivenProposals
from la_export.verify.prompts import PROMPTS
from la_export.verify.tokens import Comparisons, Verdict
from la_export.verify.tolerance import tolerance_of
from la_runtime.backends.base import Backend
from la_runtime.errors import UsageError
from la_runtime.generation import Engine
from la_runtime.layout import Layout
from la_runtime.sampling import SamplingParams, Select

__all__ = ["assert_lossless"]

_DEFAULT_PROMPTS: Final = tuple(prompt.text for prompt in PROMPTS)
_EPSILON_TOKENS: Final = 128


def assert_lossless(
    bundle: str | os.PathLike[str],
    *,
    prompts: Sequence[str | Sequence[int]] = _DEFAULT_PROMPTS,
    k: int | Sequence[int] | None = None,
    layouts: Sequence[Layout | str] = tuple(Layout),
    max_new_tokens: int = 32,
    sampling: SamplingParams | None = None,
    threads: int = 0,
    backend: str = "ort-cpu",
) -> None:
    """Fail unless lookahead decoding of every prompt gives the tokens of plain decoding.

    Each prompt is decoded with the bundle's own proposals, and once more with proposals that
    mostly stand, so that accepted drafts are compared whatever the vectors are. A difference is
    excused only where the two best tokens are a near-tie, as `tokens.compare_tokens` says.

    Args:
        bundle: the bundle's folder.
        prompts: texts, or token ids.
        k: lookahead lengths; None takes those the bundle was built for.
        layouts: where lookaheads stand.
        max_new_tokens: tokens of each prompt.
        sampling: how tokens are chosen; None is greedy. Its `k`, `layout` and `max_new_tokens` are
            replaced.
        threads: threads for one pass; 0 lets the backend choose.
        backend: what runs the graph.

    Raises:
        AssertionError: a token differs; the message says where, and which tokens.
        UsageError: there is nothing to compare, or an argument is out of range.
        BundleError: the bundle cannot be opened.
    """
    if isinstance(prompts, str):
        raise UsageError("prompts is one text, whose characters would be prompts; give a list")
    prompts = tuple(prompts)
    places = [_parse_layout(layout) for layout in layouts]
    params = replace(sampling or SamplingParams(), k=0, max_new_tokens=max_new_tokens)
    if params.select is not Select.EXACT:
        raise UsageError("select 'threshold' is lossy; leave it out of sampling")
    with Engine.open(bundle, backend=backend, threads=threads) as engine:
        built = engine.bundle.manifest.lookahead_lengths
        lengths = built if k is None else (k,) if isinstance(k, int) else tuple(k)
        ways = [
            replace(params, k=length, layout=layout)
            for length, layout in product(sorted({*lengths} - {0}), places)
        ]
        if not ways or not prompts:
            raise UsageError(
                "nothing to compare: give at least one prompt, one layout and one k above 0"
            )
        _compare(engine, [engine.encode(prompt) for prompt in prompts], params, ways)


def _parse_layout(layout: Layout | str) -> Layout:
    try:
        return Layout(layout)
    except ValueError as error:
        known = ", ".join(f"'{member}'" for member in Layout)
        raise UsageError(f"each of layouts must be one of {known}, got {layout!r:.40}") from error


def _compare(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    ways: Sequence[SamplingParams],
) -> None:
    plain = [_decode(engine, engine.backend, prompt, params) for prompt in prompts]
    comparisons = Comparisons(
        tolerance=tolerance_of(engine.bundle.manifest.precision),
        epsilon=_measure_epsilon(engine, prompts, ways),
    )
    for index, (prompt, expected) in enumerate(zip(prompts, plain, strict=True)):
        text = (*prompt, *expected.token_ids)
        proposing = {"own": engine.backend, "given": GivenProposals(engine.backend, [text])}
        for way, (whose, backend) in product(ways, proposing.items()):
            found = _decode(engine, backend, prompt, way)
            how = f"k={way.k} {way.layout} with {whose} proposals"
            verdict = comparisons.compare(
                f"prompt {index}", how, expected.token_ids, expected.margins, found.token_ids
            )
            # Behind a near-tie the texts are different ones, and may end for different reasons.
            is_same_text = verdict is Verdict.EQUAL
            if is_same_text and found.finish_reason is not expected.finish_reason:
                comparisons.differences.append(
                    f"prompt {index}, {how}: finish reason '{found.finish_reason}', expected "
                    f"'{expected.finish_reason}'"
                )
            if comparisons.differences:
                raise AssertionError(f"not lossless: {comparisons.differences[0]}")
    if comparisons.problems:
        raise AssertionError(f"not lossless: {'; '.join(comparisons.problems)}")


def _decode(
    engine: Engine, backend: Backend, prompt: tuple[int, ...], params: SamplingParams
) -> Decoded:
    (decoded,) = decode(backend, engine.bundle.manifest, [prompt], [params])
    return decoded


def _measure_epsilon(
    engine: Engine, prompts: Sequence[tuple[int, ...]], ways: Sequence[SamplingParams]
) -> float:
    """Over the prompts' own tokens."""
    context = engine.bundle.manifest.model.context
    tokens = [token for prompt in prompts for token in prompt]
    widths = {way.layout.max_rows(way.k) for way in ways if way.layout is not None and way.k}
    measured = measure_epsilon(
        engine.backend,
        tokens[: min(_EPSILON_TOKENS, context)],
        widths=sorted(widths),
        context=context,
    )
    return min(measured, tolerance_of(engine.bundle.manifest.precision).epsilon)
