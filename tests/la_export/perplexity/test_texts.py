from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from la_export.perplexity import own_text
from la_export.perplexity.own_text import OwnText, find_own_text, own_text_path, write_own_text
from la_export.perplexity.texts import PAGES_FOLDER, load_texts
from la_export.perplexity.windows import Window, count_scored
from la_export.pipeline import BuildReport
from la_runtime.errors import HostError, UsageError
from la_runtime.generation import Engine

SHIPPED = Path(own_text.__file__).parent / "data" / "own_texts"
VARIANT = ("llama", True)


@pytest.fixture(scope="module")
def engine(report_of: Callable[..., BuildReport]) -> Iterator[Engine]:
    with Engine.open(report_of(VARIANT).bundle, threads=1) as engine:
        yield engine


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few answers at a time are enough."""
    monkeypatch.setattr(own_text, "_ROUND", 4)


def _silently(num_tokens: int) -> None:
    del num_tokens


def test_texts_are_a_fifth_pages_and_the_rest_the_models_own(engine: Engine) -> None:
    texts = load_texts(engine, num_tokens=1000)

    assert (count_scored(texts.pages), count_scored(texts.own)) == (200, 800)
    assert [len(windows) > 0 for _, windows in texts.kinds] == [True, True]
    assert texts.own_written_by == "fp32"


def test_pages_are_read_in_the_order_of_their_names(engine: Engine) -> None:
    first = sorted(PAGES_FOLDER.glob("*.txt"))[0].read_text("utf-8")

    pages = load_texts(engine, num_tokens=1000).pages

    expected = engine.tokenizer.encode(first, add_special_tokens=False)
    read = [token for window in pages for token in window.token_ids]
    assert read == expected[: len(read)]


def test_only_answers_count_and_they_stand_behind_the_template(engine: Engine) -> None:
    window = write_own_text(engine, 1, begun=None, progress=_silently).windows[0]

    given = window.token_ids[: window.scored_from]
    header = engine.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    beginning = engine.tokenizer.encode("<|im_start|>user\n", add_special_tokens=False)
    assert list(given[: len(beginning)]) == beginning
    assert list(given[-len(header) :]) == header
    assert len(given) > len(beginning) + len(header)
    assert not {*window.token_ids[window.scored_from :]} & {
        *engine.bundle.manifest.model.eos_token_ids
    }


def test_what_was_written_is_read_again_and_written_on_as_at_once(engine: Engine) -> None:
    short = load_texts(engine, num_tokens=500)
    kept = own_text_path(engine.bundle.manifest.model.source_digest)
    assert kept.is_file()
    before = OwnText.model_validate_json(kept.read_bytes())
    more = count_scored(before.windows) + 100

    again = load_texts(engine, num_tokens=500)
    longer = write_own_text(engine, more, begun=before, progress=_silently)

    assert again == short
    assert longer == write_own_text(engine, more, begun=None, progress=_silently)
    assert longer.windows[: len(before.windows)] == before.windows


def test_a_kept_text_that_is_damaged_is_written_anew(engine: Engine) -> None:
    first = load_texts(engine, num_tokens=200)
    kept = own_text_path(engine.bundle.manifest.model.source_digest)
    kept.write_text(kept.read_text()[:-20])

    assert find_own_text(engine.bundle.manifest) is None
    assert load_texts(engine, num_tokens=200) == first


def test_progress_is_told_while_the_model_writes(engine: Engine) -> None:
    told: list[int] = []

    load_texts(engine, num_tokens=500, progress=told.append)
    load_texts(engine, num_tokens=500, progress=told.append)

    assert told == sorted({*told})
    assert told[-1] >= 400


def test_a_folder_that_cannot_be_written_is_named(engine: Engine, cache: Path) -> None:
    cache.write_text("a file")

    with pytest.raises(HostError, match="could not keep the text that the model wrote"):
        load_texts(engine, num_tokens=200)


def test_a_model_that_writes_nothing_is_an_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        own_text, "_sample", lambda engine, prompts, size: dict.fromkeys(prompts, ())
    )

    with pytest.raises(UsageError, match="the model writes no text: 16 answers"):
        load_texts(engine, num_tokens=200)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.name)
def test_shipped_texts_are_named_by_their_model_and_long_enough(path: Path) -> None:
    text = OwnText.model_validate_json(path.read_bytes())

    assert path.stem == text.source_digest[:16]
    assert text.written_by == "fp32"
    assert count_scored(text.windows) >= 40_000
    assert all(isinstance(window, Window) for window in text.windows)
