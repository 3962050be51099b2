"""Rung 12: a text ends where it should, also in the middle of an accepted block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from la_export.verify.decoding import Decoded, decode
from la_export.verify.findings import Figure, Finding
from la_export.verify.ladder import Configuration, EncodedPrompt, Ladder, Proposals
from la_export.verify.tokens import Verdict, compare_tokens, refuse_near_ties
from la_runtime.bundle import Bundle
from la_runtime.generation import Engine
from la_runtime.results import GenerationResult
from la_runtime.sampling import SamplingParams
from la_runtime.stopping import FinishReason

__all__ = ["check_endings"]

_STOP_LENGTH: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """One way to end a text.

    Args:
        name: what messages call it.
        params: plain greedy decoding with this ending.
        expected: the tokens up to the end; None when only plain decoding knows.
        reason: the finish reason.
        eos_token_id: an end token of the model's own, in the place of its real ones.
    """

    name: str
    params: SamplingParams
    expected: tuple[int, ...] | None
    reason: FinishReason
    eos_token_id: int | None = None


def check_endings(ladder: Ladder) -> Finding:
    """Forced ends against plain decoding: tokens, text and reason; end tokens against the model."""
    problems = _check_end_tokens(ladder)
    endings = 0
    near_ties: dict[int, str] = {}
    prompt = ladder.prompts[0]
    plain = ladder.plain_runs[prompt.name]
    places = _inner_places(ladder, prompt)
    if not places and ladder.has_room_for_blocks:
        problems.append("no proposal stood, so that no end lies inside a block")
    for ending in _endings(ladder, plain, places or [len(plain.token_ids) // 2]):
        expected = _generate(ladder, prompt, ending, None)
        problems += _check_plain(prompt, ending, expected)
        for configuration in ladder.chosen_configurations:
            endings += 1
            found = _generate(ladder, prompt, ending, configuration)
            verdict, place, line = _compare(plain, ending, expected, found, ladder.epsilon)
            line = f"prompt {prompt.name}, {ending.name}, {configuration}: {line}"
            if verdict is Verdict.EXCUSED:
                near_ties.setdefault(place, line)
            elif verdict is Verdict.DIFFERENT:
                problems.append(line)
    allowed = ladder.tolerance.excuse_allowance(len(plain.token_ids))
    problems += refuse_near_ties(tuple(near_ties.values()), allowed)
    return Finding(
        figures=(
            Figure(name="endings", value=endings),
            Figure(name="near-ties", value=len(near_ties)),
        ),
        problems=tuple(problems),
        detail=f"{endings} forced endings by end token, stop id, stop text and length"
        + ("" if ladder.source is None else "; end tokens are those of the checkpoint"),
    )


def _check_end_tokens(ladder: Ladder) -> list[str]:
    """The manifest's end tokens against those that the checkpoint names anywhere."""
    if ladder.source is None:
        return []
    origins: Mapping[str, tuple[int, ...]] = ladder.source.end_token_ids()
    named = {token for tokens in origins.values() for token in tokens}
    found = set(ladder.manifest.model.eos_token_ids)
    if found == named:
        return []
    said = ", ".join(f"{origin} {list(tokens)}" for origin, tokens in origins.items())
    return [f"the manifest's end tokens are {sorted(found)}, the checkpoint's {said or 'none'}"]


def _inner_places(ladder: Ladder, prompt: EncodedPrompt) -> list[int]:
    """Some new tokens that a pass gives together with others behind them."""
    given = [c for c in ladder.chosen_configurations if c.proposals is Proposals.GIVEN]
    if not given:
        return []
    widest = max(given, key=lambda configuration: (not configuration.tree, configuration.k))
    backend = ladder.proposing(widest, ladder.text(prompt))
    (found,) = decode(backend, ladder.manifest, [prompt.token_ids], [ladder.greedy(widest)])
    last_of_blocks = set(accumulate(found.block_lengths, initial=-1))
    tokens = found.token_ids
    inner = [place for place in range(len(tokens)) if place not in last_of_blocks]
    # A token that was there before would end the text there.
    inner = [place for place in inner if tokens.index(tokens[place]) == place] or inner
    count = min(ladder.settings.cuts, len(inner))
    return [inner[index * len(inner) // count] for index in range(count)]


def _endings(ladder: Ladder, plain: Decoded, places: Sequence[int]) -> Iterator[_Ending]:
    """Ends of every kind at these places of what plain decoding gives."""
    tokens = tuple(plain.token_ids)
    base = ladder.greedy()
    for place in places:
        token_id = tokens[place]
        until = tokens[: tokens.index(token_id) + 1]
        yield _Ending(
            name=f"stop id {token_id}",
            params=replace(base, stop_token_ids=(token_id,)),
            expected=until,
            reason=FinishReason.STOP,
        )
        yield _Ending(
            name=f"end token {token_id}",
            params=replace(base, ignore_eos=False),
            expected=until,
            reason=FinishReason.EOS,
            eos_token_id=token_id,
        )
        yield _Ending(
            name=f"length {place + 1}",
            params=replace(base, max_new_tokens=place + 1),
            expected=tokens[: place + 1],
            reason=FinishReason.LENGTH,
        )
        text = ladder.engine.tokenizer.decode(tokens)
        start = len(text) * place // len(tokens)
        stop = text[start : start + _STOP_LENGTH]
        # A character that is not complete yet is no text that anybody waits for.
        if len(stop) == _STOP_LENGTH and "�" not in stop:
            yield _Ending(
                name=f"stop text {stop!r}",
                params=replace(base, stop=stop),
                expected=None,
                reason=FinishReason.STOP,
            )


def _generate(
    ladder: Ladder, prompt: EncodedPrompt, ending: _Ending, configuration: Configuration | None
) -> GenerationResult:
    bundle = ladder.bundle
    if ending.eos_token_id is not None:
        model = ladder.manifest.model.model_copy(update={"eos_token_ids": (ending.eos_token_id,)})
        bundle = Bundle(bundle.root, ladder.manifest.model_copy(update={"model": model}))
    params, backend = ending.params, ladder.borrowed()
    if configuration is not None:
        params = configuration.ask(params)
        backend = ladder.proposing(configuration, ladder.text(prompt), backend=backend)
    with Engine(bundle, backend, k=0) as engine:
        return engine.generate(list(prompt.token_ids), params)


def _check_plain(prompt: EncodedPrompt, ending: _Ending, found: GenerationResult) -> list[str]:
    """Plain decoding ends at the first place where it may."""
    where = f"prompt {prompt.name}, {ending.name}, plain"
    problems = []
    if ending.expected is not None and found.token_ids != ending.expected:
        problems.append(f"{where}: {len(found.token_ids)} tokens, expected {len(ending.expected)}")
    if found.finish_reason is not ending.reason:
        problems.append(f"{where}: finish reason '{found.finish_reason}' for '{ending.reason}'")
    if isinstance(ending.params.stop, str) and ending.params.stop in found.text:
        problems.append(f"{where}: the text goes on behind the stop text")
    return problems


def _compare(
    plain: Decoded,
    ending: _Ending,
    expected: GenerationResult,
    found: GenerationResult,
    epsilon: float,
) -> tuple[Verdict, int, str]:
    """The verdict, the place of the first token that differs, and a line about it."""
    comparison = compare_tokens(expected.token_ids, plain.margins, found.token_ids, epsilon=epsilon)
    if comparison.verdict is not Verdict.EQUAL:
        return (
            comparison.verdict,
            comparison.position,
            (
                f"new token {comparison.position} differs from plain decoding's "
                f"(margin {comparison.margin:.2g}), or one text goes on: {len(found.token_ids)} "
                f"tokens, expected {len(expected.token_ids)}"
            ),
        )
    for what, one, other in (
        ("text", expected.text, found.text),
        ("finish reason", expected.finish_reason, found.finish_reason),
    ):
        if one != other:
            return Verdict.DIFFERENT, -1, f"{what} {other!r}, expected {one!r}"
    return Verdict.EQUAL, -1, ""
