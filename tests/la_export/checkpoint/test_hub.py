from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants, errors

from la_export.checkpoint import hub
from la_export.checkpoint.hub import download_configuration, download_model
from la_runtime.errors import CheckpointError, HostError, UnknownModelError, UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Hub:
    """Stands in for the hub: what it answers and what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answer: Callable[[], object] = lambda: None
        self.files = ["config.json", "model.safetensors", "modeling_custom.py"]
        self.cached = False
        self.downloads: list[dict[str, Any]] = []
        self.on_disk = ["config.json", "model.safetensors", "tokenizer.json"]
        self.on_disk.append("tokenizer_config.json")

    def model_info(self, *_: object, **__: object) -> object:
        self.answer()
        siblings = [SimpleNamespace(rfilename=name) for name in self.files]
        return SimpleNamespace(sha=COMMIT, siblings=siblings)

    def snapshot_download(self, _: str, **options: Any) -> str:
        if options.get("local_files_only"):
            if not self.cached:
                raise errors.LocalEntryNotFoundError("not cached")
        else:
            self.downloads.append(options)
        folder = self.folder / COMMIT
        folder.mkdir(exist_ok=True)
        for name in self.on_disk:
            (folder / name).touch()
        return str(folder)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Hub:
    fake = _Hub(tmp_path)
    monkeypatch.setattr(hub, "HfApi", lambda: fake)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "snapshot_download", fake.snapshot_download)
    return fake


def _raise(kind: type[Exception], message: str = "refused") -> Callable[[], object]:
    def answer() -> object:
        if issubclass(kind, errors.HfHubHTTPError):
            response: Any = SimpleNamespace(headers={}, request=None, status_code=404, text=message)
            raise kind(message, response=response)
        raise kind(message)

    return answer


def test_only_configuration_tokenizer_and_weights_are_fetched(fake_hub: _Hub) -> None:
    snapshot = download_model("owner/name", "main", allow_bin=False)
    assert snapshot.commit == COMMIT
    (options,) = fake_hub.downloads
    assert options["revision"] == COMMIT
    assert "model*.safetensors" in options["allow_patterns"]
    assert not [pattern for pattern in options["allow_patterns"] if pattern.endswith(".py")]


def test_pinned_snapshot_on_disk_needs_no_network(fake_hub: _Hub) -> None:
    fake_hub.cached = True
    fake_hub.answer = lambda: pytest.fail("the hub was asked")
    assert download_model("owner/name", COMMIT, allow_bin=False).commit == COMMIT


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_pinned_snapshot_without_a_small_file_is_completed(fake_hub: _Hub, missing: str) -> None:
    fake_hub.cached = True
    fake_hub.on_disk.remove(missing)
    assert download_model("owner/name", COMMIT, allow_bin=False).commit == COMMIT
    assert [options["revision"] for options in fake_hub.downloads] == [COMMIT]


@pytest.fixture
def interrupted(fake_hub: _Hub) -> _Hub:
    """A pinned model of two shards whose download ended behind the first."""
    shards = [f"model-0000{place}-of-00002.safetensors" for place in (1, 2)]
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    fake_hub.files = ["config.json", *shards, "model.safetensors.index.json"]
    fake_hub.on_disk = ["config.json", "tokenizer.json", "tokenizer_config.json", shards[0]]
    fake_hub.cached = True
    folder = fake_hub.folder / COMMIT
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return fake_hub


def test_interrupted_download_of_a_pinned_model_is_resumed(interrupted: _Hub) -> None:
    download_model("owner/name", COMMIT, allow_bin=False)
    assert [options["revision"] for options in interrupted.downloads] == [COMMIT]


def test_interrupted_download_does_not_serve_without_the_network(interrupted: _Hub) -> None:
    interrupted.answer = _raise(ConnectionError)
    with pytest.raises(HostError, match="hub cannot be reached"):
        download_model("owner/name", COMMIT, allow_bin=False)


def test_cached_branch_serves_when_the_network_is_away(fake_hub: _Hub) -> None:
    fake_hub.cached = True
    fake_hub.answer = _raise(ConnectionError)
    assert download_model("owner/name", "main", allow_bin=False).commit == COMMIT
    assert fake_hub.downloads == []


@pytest.mark.parametrize(
    ("answer", "raised", "message"),
    [
        (ConnectionError, HostError, r"hub cannot be reached \(.*refused"),
        (TimeoutError, HostError, "hub cannot be reached"),
        (errors.RepositoryNotFoundError, UnknownModelError, "the hub has no model 'owner/name'"),
        (errors.GatedRepoError, CheckpointError, "asks you to accept its terms"),
        (errors.RevisionNotFoundError, UsageError, "has no revision 'main'"),
    ],
)
def test_refusal_of_the_hub_is_one_clear_line(
    fake_hub: _Hub, answer: type[Exception], raised: type[Exception], message: str
) -> None:
    fake_hub.answer = _raise(answer)
    with pytest.raises(raised, match=message) as error:
        download_model("owner/name", "main", allow_bin=False)
    assert "\n" not in str(error.value)


def test_pickle_only_repository_is_refused_before_the_download(fake_hub: _Hub) -> None:
    fake_hub.files = ["config.json", "pytorch_model-00001-of-00002.bin"]
    with pytest.raises(CheckpointError, match="--allow-bin"):
        download_model("owner/name", "main", allow_bin=False)
    assert fake_hub.downloads == []
    download_model("owner/name", "main", allow_bin=True)
    assert "pytorch_model*.bin" in fake_hub.downloads[0]["allow_patterns"]


def test_of_a_configuration_alone_nothing_else_is_downloaded(fake_hub: _Hub) -> None:
    snapshot = download_configuration("owner/name", "main")

    (options,) = fake_hub.downloads
    assert options["allow_patterns"] == ["config.json"]
    assert options["revision"] == COMMIT
    assert snapshot.commit == COMMIT


def test_a_cached_configuration_of_a_pinned_commit_asks_nobody(fake_hub: _Hub) -> None:
    fake_hub.cached = True
    fake_hub.on_disk = ["config.json"]
    fake_hub.answer = _raise(OSError)

    assert download_configuration("owner/name", COMMIT).commit == COMMIT
    assert fake_hub.downloads == []


def test_a_cached_configuration_serves_without_a_network(fake_hub: _Hub) -> None:
    fake_hub.cached = True
    fake_hub.on_disk = ["config.json"]
    fake_hub.answer = _raise(OSError)

    assert (download_configuration("owner/name", "main").folder / "config.json").is_file()
