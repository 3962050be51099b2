from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open

from la_export.lookahead import make_untuned_vectors, write_lookahead_vectors


def test_untuned_vectors_are_the_mean_embedding_repeated() -> None:
    table = np.array([[1.0, 2.0], [3.0, 6.0], [5.0, 1.0]], np.float32)
    expected = np.array([[3.0, 3.0], [3.0, 3.0]], np.float32)
    np.testing.assert_array_equal(make_untuned_vectors(table, 2), expected)


def test_file_reads_back_with_its_metadata(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    path = tmp_path / "lookahead.safetensors"
    write_lookahead_vectors(path, vectors, model_digest="ab" * 32, origin="untuned")
    with safe_open(path, framework="np") as stored:
        assert list(stored.keys()) == ["lookahead_embeddings"]
        np.testing.assert_array_equal(stored.get_tensor("lookahead_embeddings"), vectors)
        assert stored.metadata() == {
            "model_digest": "ab" * 32,
            "k_max": "3",
            "group_mask": "strict",
            "origin": "untuned",
        }
