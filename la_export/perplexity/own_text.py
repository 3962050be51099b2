"""Text that a model wrote itself: it asks a question, and answers it.

Both are sampled at temperature 1 with all filters off, so that the text is what the model's own
distribution is like, and no loop; only the answers count. It is written once for each model: what
is measured later, in whatever precision, reads the same tokens. SmolLM2's came with this package;
others stay in the user's cache folder.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from la_export.perplexity.windows import WINDOW, Window, count_scored
from la_export.question_frame import QuestionFrame, read_frame
from la_runtime.bundle import Manifest
from la_runtime.digests import Sha256, digest_cache_path
from la_runtime.errors import HostError, UsageError
from la_runtime.generation import Engine
from la_runtime.records import Record
from la_runtime.sampling import SamplingParams

__all__ = ["OwnText", "find_own_text", "keep_own_text", "own_text_path", "write_own_text"]

logger = logging.getLogger(__name__)

_SHIPPED: Final = Path(__file__).parent / "data" / "own_texts"
_FOLDER: Final = "own_texts"
_NAME_DIGITS: Final = 16
_ROUND: Final = 32
_QUESTION_TOKENS: Final = 64
# Rounds without a single token, after which a model is taken to write nothing.
_MOST_EMPTY_ROUNDS: Final = 4

Progress = Callable[[int], None]


class OwnText(Record):
    """What a model wrote.

    Args:
        source_digest: of the weights of the model that wrote it.
        written_by: precision of the bundle that ran the model.
        num_begun: how many answers were begun, so that more can be written behind them.
        windows: an answer each, with what it answers.
    """

    source_digest: Sha256
    written_by: str
    num_begun: int
    windows: tuple[Window, ...]


def find_own_text(manifest: Manifest) -> OwnText | None:
    """What this bundle's model wrote earlier, shipped or cached; None if it is still to write."""
    digest = manifest.model.source_digest
    for path in (_SHIPPED / _file_name(digest), own_text_path(digest)):
        try:
            found = OwnText.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValidationError) as error:
            logger.warning("%s cannot be read and is written anew: %s", path, error)
            continue
        if found.source_digest == digest:
            return found
    return None


def own_text_path(source_digest: str) -> Path:
    """Where the text of a model that is not shipped is kept."""
    return digest_cache_path().parent / _FOLDER / _file_name(source_digest)


def _file_name(source_digest: str) -> str:
    return f"{source_digest[:_NAME_DIGITS]}.json"


def keep_own_text(text: OwnText) -> None:
    """Put it into the user's cache folder in one step.

    Raises:
        HostError: the folder is not writable.
    """
    path = own_text_path(text.source_digest)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text.model_dump_json() + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise HostError(
            f"could not keep the text that the model wrote in {path}: {error.strerror or error}; "
            "set XDG_CACHE_HOME to a folder that is writable"
        ) from error


def write_own_text(
    engine: Engine, num_tokens: int, *, begun: OwnText | None, progress: Progress
) -> OwnText:
    """Let the model write until so many tokens of answers are there.

    Answer number i has seed i, so a text that is written on is the one that a longer wish would
    have given at once.

    Args:
        engine: runs the model.
        num_tokens: tokens that count, at least.
        begun: what there is already.
        progress: is told how many tokens there are, now and then.

    Raises:
        UsageError: the model writes nothing but end tokens.
    """
    manifest = engine.bundle.manifest
    windows = list(begun.windows) if begun is not None else []
    num_begun = begun.num_begun if begun is not None else 0
    frame = _read_frame(engine)
    empty = 0
    while count_scored(windows) < num_tokens:
        written = _write_round(engine, frame, range(num_begun, num_begun + _ROUND))
        num_begun += _ROUND
        windows += written
        empty = 0 if written else empty + 1
        if empty == _MOST_EMPTY_ROUNDS:
            raise UsageError(
                f"the model writes no text: {empty * _ROUND} answers of it are empty; its "
                "perplexity on text of its own cannot be taken"
            )
        progress(count_scored(windows))
    return OwnText(
        source_digest=manifest.model.source_digest,
        written_by=manifest.precision if begun is None else begun.written_by,
        num_begun=num_begun,
        windows=tuple(windows),
    )


def _write_round(engine: Engine, frame: QuestionFrame, seeds: range) -> list[Window]:
    size = min(WINDOW, engine.bundle.manifest.model.context)
    prompts: dict[int, tuple[int, ...]] = dict.fromkeys(seeds, frame.before)
    if frame.behind is not None:
        most = min(_QUESTION_TOKENS, size // 4)
        questions = _sample(engine, prompts, size=len(frame.before) + most)
        prompts = {
            seed: (*frame.before, *question, *frame.behind)
            for seed, question in questions.items()
            if question
        }
    answers = _sample(engine, prompts, size=size)
    return [
        Window(token_ids=(*prompts[seed], *answer), scored_from=len(prompts[seed]))
        for seed, answer in answers.items()
        if answer
    ]


def _sample(
    engine: Engine, prompts: dict[int, tuple[int, ...]], *, size: int
) -> dict[int, Sequence[int]]:
    """What the model writes behind each prompt, by its seed, without end tokens.

    With the prompt it has at most `size` tokens.
    """
    if not prompts:
        return {}
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_new_tokens=size - len(prompt), k=0)
        for seed, prompt in prompts.items()
    ]
    results = engine.generate(list(prompts.values()), params)
    ends = frozenset(engine.bundle.manifest.model.eos_token_ids)
    return {
        seed: [token for token in result.token_ids if token not in ends]
        for seed, result in zip(prompts, results, strict=True)
    }


def _read_frame(engine: Engine) -> QuestionFrame:
    model = engine.bundle.manifest.model
    return read_frame(
        engine.bundle.root,
        engine.tokenizer,
        bos_token_id=model.bos_token_id,
        eos_token_ids=model.eos_token_ids,
        length=min(WINDOW, model.context),
    )
