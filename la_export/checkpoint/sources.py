"""Turns what the user typed for `--model` into files on this machine.

Knows folders, GGUF files, hub ids and known names; knows nothing of what is in the files.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Final

from la_export.checkpoint.hub import download_configuration, download_model
from la_export.checkpoint.known_models import (
    KNOWN_MODELS,
    HubModel,
    KnownModel,
    PackagedModel,
    find_known_model,
)
from la_export.checkpoint.weight_files import (
    SAFETENSORS_PATTERN,
    WeightFormat,
    find_weight_files,
)
from la_runtime.errors import CheckpointError, HostError, UnknownModelError, UsageError

__all__ = ["ModelSource", "WeightFormat", "find_configuration", "find_model", "name_place"]

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LOCAL_REVISION: Final = "local"
_HUB: Final = "hub:"
_HASH_CHUNK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model's files are.

    Args:
        name: short name, for the bundle's folder.
        origin: what the manifest records as the source; holds no path of this machine.
        revision: commit, package version, or `local`.
        folder: the folder with configuration and weights.
        weight_format: how the weights are stored.
        weight_files: the weight files, sorted by name; none where only the configuration was
            looked for, but for a GGUF file, which holds both.
    """

    name: str
    origin: str
    revision: str
    folder: Path
    weight_format: WeightFormat
    weight_files: tuple[Path, ...]

    @property
    def gguf_name(self) -> str | None:
        """File name of a GGUF source, as transformers' `gguf_file` wants it."""
        return self.weight_files[0].name if self.weight_format is WeightFormat.GGUF else None

    def digest(self) -> str:
        """SHA-256 over the bytes of the weight files in the order of their names."""
        digest = hashlib.sha256()
        for path in self.weight_files:
            with path.open("rb") as stream:
                while chunk := stream.read(_HASH_CHUNK_BYTES):
                    digest.update(chunk)
        return digest.hexdigest()


class _Wanted(Enum):
    """Which of a model's files are looked for: the configuration, or weights of these kinds too."""

    CONFIGURATION = auto()
    SAFETENSORS = auto()
    PICKLES_TOO = auto()


def find_model(model: str, *, revision: str | None, allow_bin: bool) -> ModelSource:
    """Find a model's files, downloading from the hub when that is where they are.

    Args:
        model: known name, folder, `.gguf` file or hub id, tried in this order.
        revision: hub revision; the known name's pinned commit or `main` when not given.
        allow_bin: whether pickle-based `.bin` weights may be read (weights only).

    Raises:
        UnknownModelError: none of those.
        UsageError: a path that does not exist, or a revision for something not on the hub.
        CheckpointError: no weights of an allowed kind.
        HostError: the hub cannot be reached, or a package is not installed.
    """
    wanted = _Wanted.PICKLES_TOO if allow_bin else _Wanted.SAFETENSORS
    return _find(model, revision, wanted)


def find_configuration(model: str, *, revision: str | None) -> ModelSource:
    """Find a model's configuration; its weights need not be there, and none is downloaded.

    Args:
        model: see `find_model`.
        revision: see `find_model`.

    Raises:
        UnknownModelError: nothing of that name.
        UsageError: a path that does not exist, or a revision for something not on the hub.
        CheckpointError: a folder without configuration.
        HostError: the hub cannot be reached, or a package is not installed.
    """
    return _find(model, revision, _Wanted.CONFIGURATION)


def name_place(origin: str, revision: str) -> tuple[str, str | None] | None:
    """Name and revision, as `find_model` takes them, of what a manifest records as the source.

    Args:
        origin: see `ModelSource`.
        revision: see `ModelSource`.

    Returns:
        None for a place on the machine that built the bundle.
    """
    repository = origin.removeprefix(_HUB)
    for known in KNOWN_MODELS:
        match known.place:
            case HubModel(repository=known_repository):
                if origin.startswith(_HUB) and repository == known_repository:
                    return known.name, revision
            case PackagedModel() as place:
                if origin == _packaged_origin(place):
                    return known.name, None
    return (repository, revision) if origin.startswith(_HUB) else None


def _find(model: str, revision: str | None, wanted: _Wanted) -> ModelSource:
    known = find_known_model(model)
    if known is not None:
        return _find_known(known, revision, wanted)
    path = _find_path(model)
    if path is not None:
        if revision is not None:
            raise UsageError(f"--revision {revision} is only for the hub; {model} is a local path")
        return _find_local(path, wanted)
    if _looks_like_path(model):
        raise UsageError(f"--model {model}: no such file or folder")
    if _HUB_ID.fullmatch(model):
        return _find_on_hub(model, revision or "main", wanted)
    raise _unknown(model)


def _find_path(model: str) -> Path | None:
    """The local file or folder of this name, if it can be one at all."""
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a null character
        return None


def _looks_like_path(model: str) -> bool:
    return (
        model.startswith((".", "/", "~"))
        or model.lower().endswith((".gguf", ".safetensors", ".bin"))
        or model.count("/") > 1
        or "\\" in model
    )


def _unknown(model: str) -> UnknownModelError:
    names = [entry.name for entry in KNOWN_MODELS]
    near = difflib.get_close_matches(model.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return UnknownModelError(
        f"unknown model {model!r}: {hint}known names are {', '.join(names)}; "
        "or give a local folder, a .gguf file or a hub id like owner/name"
    )


def _find_known(known: KnownModel, revision: str | None, wanted: _Wanted) -> ModelSource:
    if isinstance(known.place, PackagedModel):
        if revision is not None:
            raise UsageError(f"--revision {revision} is only for the hub; {known.name} is packaged")
        return _find_packaged(known, known.place)
    place: HubModel = known.place
    found = _find_on_hub(place.repository, revision or place.revision, wanted)
    return replace(found, name=known.name)


def _find_packaged(known: KnownModel, place: PackagedModel) -> ModelSource:
    spec = importlib.util.find_spec(place.package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    paths = [Path(folder) / place.file_name for folder in folders]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise HostError(
            f"model {known.name} comes with the package {place.distribution}, which is not "
            f"installed; run: {place.install}"
        )
    return ModelSource(
        name=known.name,
        origin=_packaged_origin(place),
        revision=importlib.metadata.version(place.distribution),
        folder=path.parent,
        weight_format=WeightFormat.GGUF,
        weight_files=(path,),
    )


def _packaged_origin(place: PackagedModel) -> str:
    return f"{place.distribution}/{place.file_name}"


def _find_on_hub(repository: str, revision: str, wanted: _Wanted) -> ModelSource:
    if wanted is _Wanted.CONFIGURATION:
        snapshot = download_configuration(repository, revision)
    else:
        is_any = wanted is _Wanted.PICKLES_TOO
        snapshot = download_model(repository, revision, allow_bin=is_any)
    weight_format, weight_files = _find_weights(snapshot.folder, repository, wanted)
    return ModelSource(
        name=repository.rsplit("/", 1)[1],
        origin=f"{_HUB}{repository}",
        revision=snapshot.commit,
        folder=snapshot.folder,
        weight_format=weight_format,
        weight_files=weight_files,
    )


def _find_local(path: Path, wanted: _Wanted) -> ModelSource:
    if path.is_dir():
        folder = path.resolve()
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{path} has no config.json; expected a Hugging Face model folder"
            )
        weight_format, weight_files = _find_weights(folder, str(path), wanted)
        # A link is called what the user calls it.
        name = folder.name if path.name in ("", "..") else path.name
    elif path.suffix.lower() == ".gguf":
        folder, weight_format, weight_files = (
            path.resolve().parent,
            WeightFormat.GGUF,
            (path.resolve(),),
        )
        name = path.stem
    else:
        raise UsageError(
            f"--model {path} is a file but no .gguf file; give a model folder or a .gguf file"
        )
    return ModelSource(
        name=name,
        origin=f"local:{path.name}" if path.name else f"local:{name}",
        revision=_LOCAL_REVISION,
        folder=folder,
        weight_format=weight_format,
        weight_files=weight_files,
    )


def _find_weights(
    folder: Path, shown: str, wanted: _Wanted
) -> tuple[WeightFormat, tuple[Path, ...]]:
    if wanted is _Wanted.CONFIGURATION:
        return WeightFormat.SAFETENSORS, ()
    safetensors = find_weight_files(folder, shown, WeightFormat.SAFETENSORS)
    if safetensors:
        return WeightFormat.SAFETENSORS, safetensors
    pickled = find_weight_files(folder, shown, WeightFormat.BIN)
    if not pickled:
        raise CheckpointError(f"{shown} has no weights: expected {SAFETENSORS_PATTERN}")
    if wanted is _Wanted.SAFETENSORS:
        raise CheckpointError(
            f"{shown} has only pickle weights ({pickled[0].name}), which can run code when "
            "loaded carelessly; convert them to safetensors, or pass --allow-bin to read them "
            "weights-only"
        )
    return WeightFormat.BIN, pickled
