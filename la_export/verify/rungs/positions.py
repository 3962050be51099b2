"""Rung 14: the last positions of the context, and running into its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_export.verify.decoding import decode
from la_export.verify.findings import Figure, Finding, Suspect
from la_export.verify.ladder import Configuration, EncodedPrompt, Ladder
from la_export.verify.passes import read_text
from la_export.verify.probes import ShiftedPositions
from la_export.verify.rungs.logits import LogitDifferences
from la_export.verify.tokens import Comparisons
from la_runtime.backends.base import CacheSizing, Outputs
from la_runtime.block import Part, make_step_inputs
from la_runtime.layout import make_rows
from la_runtime.stopping import FinishReason

__all__ = ["check_last_positions"]

_LAST: Final = 40
_CHUNK: Final = 16
_ROOM: Final = 10


def check_last_positions(ladder: Ladder) -> Finding:
    """Logits at the last positions against the reference, and generation that fills the context.

    A short text stands at the last positions, once whole and once behind a beginning at the first
    ones, so that the rotations of the largest positions and distances are compared. The generation
    then runs at the very last positions, too.
    """
    differences = LogitDifferences(tolerance=ladder.tolerance)
    shifted = ladder.long_text[: min(_LAST, ladder.context)]
    shift = ladder.context - len(shifted)
    found = read_text(
        ShiftedPositions(ladder.backend, shift), shifted, width=_CHUNK, context=ladder.context
    )
    positions = range(shift, ladder.context)
    truth = ladder.reference.scores(shifted, position_ids=positions)
    differences.add(
        f"text at positions {shift} to {ladder.context - 1}",
        found,
        truth,
        Suspect(token_ids=shifted, position_ids=tuple(positions)),
    )
    half = len(shifted) // 2
    split = [*range(half), *range(ladder.context - (len(shifted) - half), ladder.context)]
    differences.add(
        f"text at positions 0 to {half - 1} and {split[half]} to {split[-1]}",
        _read_at(ladder, shifted, split),
        ladder.reference.scores(shifted, position_ids=split),
        Suspect(token_ids=shifted, position_ids=tuple(split)),
    )
    problems, num_tokens = _fill_context(ladder)
    return Finding(
        figures=(*differences.figures, Figure(name="tokens up to the end", value=num_tokens)),
        problems=(*differences.problems, *problems),
        detail=f"{differences.rows} rows at the last positions of {ladder.context} "
        f"{'against PyTorch' if ladder.source else 'against the graph itself'}; generation that "
        "fills the context ends with 'context'",
        suspect=differences.suspect,
    )


def _read_at(
    ladder: Ladder, token_ids: tuple[int, ...], positions: list[int]
) -> NDArray[np.float32]:
    """[tokens, vocab_size] of a text at these positions, read in as few passes as can be."""
    backend = ladder.backend
    state = backend.allocate(1, CacheSizing.STEPPED)
    found = []
    step = min(len(token_ids), ladder.most_scored)
    for start in range(0, len(token_ids), step):
        part = token_ids[start : start + step]
        inputs = make_step_inputs(
            [Part(rows=make_rows(len(part), (), ()), token_ids=part, scored_from=0)],
            state,
            backend.contract,
            context=ladder.context,
            widths=(),
            outputs=Outputs.LOGITS,
        )
        inputs = replace(
            inputs, position_ids=np.asarray([positions[start : start + step]], dtype=np.int64)
        )
        found.append(backend.forward(state, inputs).logits()[0].copy())
        backend.commit(state, [range(len(part))])
    state.close()
    return np.concatenate(found)


def _fill_context(ladder: Ladder) -> tuple[list[str], int]:
    """Decode until the context is full, plainly and with lookaheads, at its last positions."""
    prompt = min(ladder.prompts, key=lambda entry: len(entry.token_ids))
    room = min(_ROOM, ladder.context - len(prompt.token_ids))
    context = len(prompt.token_ids) + room
    shift = ladder.context - context
    plain = _decode_to_end(ladder, prompt, None, context, shift)
    comparisons = Comparisons(tolerance=ladder.tolerance, epsilon=ladder.epsilon)
    problems: list[str] = []
    for configuration in (None, *ladder.chosen_configurations):
        found = plain
        if configuration is not None:
            found = _decode_to_end(ladder, prompt, configuration, context, shift, plain[0])
            comparisons.compare(
                f"prompt {prompt.name} at the end of the context",
                str(configuration),
                plain[0],
                plain[1],
                found[0],
            )
        if found[2] is not FinishReason.CONTEXT:
            problems.append(
                f"{configuration or 'plain'}: a context of {context} ends with '{found[2]}' after "
                f"{len(found[0])} tokens, expected 'context' after {room}"
            )
    return [*problems, *comparisons.problems], comparisons.num_tokens


def _decode_to_end(
    ladder: Ladder,
    prompt: EncodedPrompt,
    configuration: Configuration | None,
    context: int,
    shift: int,
    future: list[int] | None = None,
) -> tuple[list[int], list[float], FinishReason | None]:
    text = (*prompt.token_ids, *(future or ()))
    backend = ShiftedPositions(ladder.backend, shift)
    proposing = ladder.proposing(configuration, text, backend=backend) if configuration else backend
    params = replace(ladder.greedy(configuration), max_new_tokens=2 * _ROOM)
    (found,) = decode(proposing, ladder.manifest, [prompt.token_ids], [params], context=context)
    return found.token_ids, found.margins, found.finish_reason
