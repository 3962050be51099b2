from __future__ import annotations

import json
from pathlib import Path

import pytest

from la_export.checkpoint.weight_files import WeightFormat, find_weight_files, has_all_weights
from la_runtime.errors import CheckpointError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def _fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def _write_index(folder: Path, weight_map: object, name: str = INDEX) -> None:
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


def _find(folder: Path, kind: WeightFormat = WeightFormat.SAFETENSORS) -> list[str]:
    return [path.name for path in find_weight_files(folder, "it", kind)]


def test_only_files_that_the_index_names_count(tmp_path: Path) -> None:
    _fill(tmp_path, *SHARDS, "model.extra.safetensors")
    _write_index(tmp_path, {"a": SHARDS[1], "b": SHARDS[0], "c": SHARDS[0]})
    assert _find(tmp_path) == list(SHARDS)


def test_without_an_index_only_the_one_file_counts(tmp_path: Path) -> None:
    _fill(tmp_path, "model.safetensors", "model.extra.safetensors")
    assert _find(tmp_path) == ["model.safetensors"]


def test_pickle_shards_have_an_index_of_their_own(tmp_path: Path) -> None:
    _fill(tmp_path, "pytorch_model-1.bin", "pytorch_model-2.bin", "pytorch_model-old.bin")
    shards = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}
    _write_index(tmp_path, shards, "pytorch_model.bin.index.json")
    assert _find(tmp_path) == []
    assert _find(tmp_path, WeightFormat.BIN) == sorted(shards.values())


def test_shards_without_their_index_are_refused(tmp_path: Path) -> None:
    _fill(tmp_path, *SHARDS)
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]}, but neither .* nor {INDEX}"):
        _find(tmp_path)


def test_two_sets_of_weights_are_refused(tmp_path: Path) -> None:
    _fill(tmp_path, *SHARDS, "model.safetensors")
    _write_index(tmp_path, {"a": SHARDS[0], "b": SHARDS[1]})
    with pytest.raises(CheckpointError, match="keep one set of weights"):
        _find(tmp_path)


@pytest.mark.parametrize("weight_map", [{"a": 5}, {}, 5, ["a"], {"a": "../x"}, {"a": ""}, None])
def test_malformed_index_is_refused(tmp_path: Path, weight_map: object) -> None:
    _write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=rf"it: {INDEX} cannot be read"):
        _find(tmp_path)


def test_weights_are_all_there_only_with_every_shard(tmp_path: Path) -> None:
    assert not has_all_weights(tmp_path)
    _write_index(tmp_path, {"a": SHARDS[0], "b": SHARDS[1]})
    _fill(tmp_path, SHARDS[0])
    assert not has_all_weights(tmp_path)
    _fill(tmp_path, SHARDS[1])
    assert has_all_weights(tmp_path)
