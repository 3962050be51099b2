"""Files of lookahead weights: what is written is what is read, and nothing else is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from la_export.adapter import Adapter, AdapterPair
from la_export.lookahead import (
    LookaheadWeights,
    make_untuned_vectors,
    read_lookaheads,
    write_lookaheads,
)
from la_runtime.errors import UsageError
from la_runtime.layout import GroupMask

DIGEST = "ab" * 32


def halves(*shape: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=shape)
    return values.astype(np.float16).astype(np.float32)


def make_weights() -> LookaheadWeights:
    pairs = (
        AdapterPair(layers=("a.q", "a.k"), sizes=(4, 2), reduce=halves(3, 5), expand=halves(6, 3)),
        AdapterPair(layers=("a.o",), sizes=(5,), reduce=halves(3, 4), expand=halves(5, 3)),
    )
    return LookaheadWeights(
        vectors=np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32),
        adapter=Adapter(pairs=pairs),
        group_mask=GroupMask.CAUSAL,
        model_digest=DIGEST,
        origin="tuned",
        tuning={"steps": "7"},
    )


def test_untuned_vectors_are_the_mean_embedding_repeated() -> None:
    table = np.array([[1.0, 2.0], [3.0, 6.0], [5.0, 1.0]], np.float32)
    expected = np.array([[3.0, 3.0], [3.0, 3.0]], np.float32)
    np.testing.assert_array_equal(make_untuned_vectors(table, 2), expected)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    weights, path = make_weights(), tmp_path / "lookahead.safetensors"
    write_lookaheads(path, weights)

    found = read_lookaheads(path)

    np.testing.assert_array_equal(found.vectors, weights.vectors)
    assert (found.group_mask, found.model_digest, found.origin, found.tuning) == (
        GroupMask.CAUSAL,
        DIGEST,
        "tuned",
        {"steps": "7"},
    )
    for pair, truth in zip(found.adapter.pairs, weights.adapter.pairs, strict=True):
        assert (pair.layers, pair.sizes) == (truth.layers, truth.sizes)
        np.testing.assert_array_equal(pair.reduce, truth.reduce)
        np.testing.assert_array_equal(pair.expand, truth.expand)


def test_vectors_alone_are_a_plain_safetensors_file(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    path = tmp_path / "lookahead.safetensors"
    write_lookaheads(path, LookaheadWeights(vectors=vectors, model_digest=DIGEST, origin="untuned"))
    with safe_open(path, framework="np") as stored:
        assert list(stored.keys()) == ["lookahead_embeddings"]
        np.testing.assert_array_equal(stored.get_tensor("lookahead_embeddings"), vectors)
        assert stored.metadata() == {
            "model_digest": DIGEST,
            "k_max": "3",
            "group_mask": "strict",
            "origin": "untuned",
        }


def test_equal_weights_give_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        write_lookaheads(tmp_path / name, make_weights())

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_fewer_vectors_are_the_first() -> None:
    weights = make_weights()

    np.testing.assert_array_equal(weights.first(2).vectors, weights.vectors[:2])
    assert weights.first(2).adapter is weights.adapter


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.safetensors is no file of lookaheads"):
        read_lookaheads(tmp_path / "none.safetensors")


GOOD = {"model_digest": DIGEST, "k_max": "2", "group_mask": "strict", "origin": "tuned"}
VECTORS = {"lookahead_embeddings": np.ones((2, 4), np.float32)}
PAIR = '[{"layers": ["q"], "sizes": [3]}]'


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        (VECTORS, {}),
        (VECTORS, GOOD | {"k_max": "3"}),
        (VECTORS, GOOD | {"k_max": "0"}),
        (VECTORS, GOOD | {"group_mask": "loose"}),
        (VECTORS, GOOD | {"more": "than is known"}),
        (VECTORS, GOOD | {"adapter": "{"}),
        (VECTORS, GOOD | {"adapter": PAIR}),
        ({"other": np.ones(3, np.float32)}, GOOD),
        (VECTORS | {"other": np.ones(3, np.float32)}, GOOD),
        ({"lookahead_embeddings": np.full((2, 4), np.nan, np.float32)}, GOOD),
        ({"lookahead_embeddings": np.ones(2, np.float32)}, GOOD),
        (
            VECTORS
            | {
                "adapter.0.reduce": np.ones((2, 4), np.float16),
                "adapter.0.expand": np.ones((4, 2), np.float16),
            },
            GOOD | {"adapter": PAIR},
        ),
        (
            VECTORS
            | {
                "adapter.0.reduce": np.full((2, 4), np.inf, np.float16),
                "adapter.0.expand": np.ones((3, 2), np.float16),
            },
            GOOD | {"adapter": PAIR},
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, tensors: dict, metadata: dict) -> None:
    path = tmp_path / "other.safetensors"
    save_file(tensors, path, metadata=metadata)

    with pytest.raises(UsageError, match=r"is no file of lookaheads .*expected one that la-export"):
        read_lookaheads(path)


@pytest.mark.parametrize("content", [b"", b"no such file at all", b"\xff" * 64])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.safetensors"
    path.write_bytes(content)

    with pytest.raises(UsageError, match="is no file of lookaheads"):
        read_lookaheads(path)
