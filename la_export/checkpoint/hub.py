"""Downloads a model from the Hugging Face hub, or says in one line why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from la_export.checkpoint.weight_files import (
    BIN_PATTERN,
    SAFETENSORS_PATTERN,
    has_all_weights,
)
from la_runtime.errors import CheckpointError, HostError, UnknownModelError, UsageError

__all__ = ["Snapshot", "download_configuration", "download_model"]

_TIMEOUT_S: Final = 10.0
# A pinned snapshot with these and every weight file is taken as it is, without the network.
_REQUIRED_FILES: Final = ("config.json", "tokenizer.json", "tokenizer_config.json")
_CONFIGURATION: Final = "config.json"
_SMALL_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "*.index.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A downloaded repository: its folder and the commit it is of."""

    folder: Path
    commit: str


def download_model(repository: str, revision: str, *, allow_bin: bool) -> Snapshot:
    """Bring a repository's configuration, tokenizer and weights onto this machine.

    Nothing but those files is fetched; repository code never is. Without a network, a snapshot
    downloaded earlier is used.

    Raises:
        UnknownModelError: the hub has no such repository, or it is private.
        UsageError: the repository has no such revision.
        CheckpointError: it asks for its licence to be accepted first, or has only `.bin`
            weights while those are not allowed.
        HostError: the hub cannot be reached and nothing is cached.
    """
    cached = _find_cached(repository, revision, has_all_weights)
    if cached is not None and cached.commit == revision and _is_complete(cached):
        return cached
    return _download(
        repository,
        revision,
        cached=cached,
        choose=lambda files: [
            *_SMALL_FILES,
            _choose_weights(repository, files, allow_bin=allow_bin),
        ],
    )


def download_configuration(repository: str, revision: str) -> Snapshot:
    """Bring a repository's `config.json` alone onto this machine.

    Raises:
        UnknownModelError: the hub has no such repository, or it is private.
        UsageError: the repository has no such revision.
        CheckpointError: it asks for its licence to be accepted first.
        HostError: the hub cannot be reached and nothing is cached.
    """
    cached = _find_cached(repository, revision, _has_configuration)
    if cached is not None and cached.commit == revision:
        return cached
    return _download(repository, revision, cached=cached, choose=lambda _: [_CONFIGURATION])


def _download(
    repository: str,
    revision: str,
    *,
    cached: Snapshot | None,
    choose: Callable[[Sequence[str]], list[str]],
) -> Snapshot:
    """Bring files of a repository here.

    Args:
        repository: hub id.
        revision: branch, tag or commit.
        cached: what is taken when the hub cannot be reached.
        choose: patterns of the wanted files, of the names that the repository has.
    """
    try:
        found = HfApi().model_info(repository, revision=revision, timeout=_TIMEOUT_S)
        commit = found.sha or revision
        patterns = choose([sibling.rfilename for sibling in found.siblings or ()])
        folder = snapshot_download(
            repository, revision=commit, allow_patterns=patterns, etag_timeout=_TIMEOUT_S
        )
    except GatedRepoError as error:
        raise CheckpointError(
            f"model {repository} asks you to accept its terms: do so on its hub page, "
            "then run 'hf auth login'"
        ) from error
    except RepositoryNotFoundError as error:
        raise UnknownModelError(
            f"the hub has no model {repository!r}, or it is private; check the spelling"
        ) from error
    except RevisionNotFoundError as error:
        raise UsageError(f"model {repository} has no revision {revision!r}") from error
    except HFValidationError as error:
        raise UnknownModelError(f"{repository!r} is no valid hub id") from error
    except (CheckpointError, KeyboardInterrupt):
        raise
    except Exception as error:
        if cached is not None:
            return cached
        raise HostError(
            f"model {repository} is neither a local folder nor downloaded, and the hub cannot "
            f"be reached ({_reason(error)}); connect, or give --model a local folder"
        ) from error
    return Snapshot(folder=Path(folder), commit=commit)


def _find_cached(
    repository: str, revision: str, is_whole: Callable[[Path], bool]
) -> Snapshot | None:
    """A snapshot downloaded earlier that holds what is wanted."""
    try:
        folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Snapshot(folder=folder, commit=folder.name) if is_whole(folder) else None


def _has_configuration(folder: Path) -> bool:
    return (folder / _CONFIGURATION).is_file()


def _is_complete(snapshot: Snapshot) -> bool:
    """An interrupted download may have left out the small files too; the hub completes it."""
    return all((snapshot.folder / name).is_file() for name in _REQUIRED_FILES)


def _choose_weights(repository: str, files: Sequence[str], *, allow_bin: bool) -> str:
    if any(fnmatchcase(name, SAFETENSORS_PATTERN) for name in files):
        return SAFETENSORS_PATTERN
    if any(fnmatchcase(name, BIN_PATTERN) for name in files):
        if allow_bin:
            return BIN_PATTERN
        raise CheckpointError(
            f"{repository} has only pickle weights (.bin), which can run code when loaded "
            "carelessly; choose another repository, or pass --allow-bin to read them weights-only"
        )
    raise CheckpointError(f"{repository} has no weights: expected {SAFETENSORS_PATTERN}")


def _reason(error: Exception) -> str:
    if constants.HF_HUB_OFFLINE:
        return "offline mode is set"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
