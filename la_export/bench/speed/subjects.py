"""The bundles of a run, opened side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx

from la_export.bench.speed.record import BundleRun
from la_runtime.bundle import Manifest
from la_runtime.certificate import read_backend_version
from la_runtime.errors import UsageError
from la_runtime.generation import Engine

__all__ = ["BACKEND", "Subject", "name_bundles", "open_subjects"]

BACKEND: Final = "ort-cpu"
# The entry of a weight's external data that says how many bytes it has.
_LENGTH: Final = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One bundle of a run.

    Args:
        name: its folder's name, unique among the subjects.
        folder: where it is.
        engine: over it.
    """

    name: str
    folder: Path
    engine: Engine

    @property
    def manifest(self) -> Manifest:
        """What the bundle says of itself."""
        return self.engine.bundle.manifest

    @property
    def context(self) -> int:
        """Positions that the model has."""
        return self.manifest.model.context

    @property
    def graph(self) -> str:
        """Path of the graph that the backend runs."""
        variant = self.manifest.variant_for(BACKEND)
        return self.manifest.graph if variant is None else variant.path

    @property
    def weight_bytes(self) -> int:
        """What a step has to read of the weights.

        Of an embedding table that the head does not share hardly anything is read; it is taken
        to hold as many bytes a parameter as the rest.
        """
        manifest = self.manifest
        graph = onnx.load(self.folder / self.graph, load_external_data=False).graph
        # The file may hold packed forms of the same weights beside them.
        stored = sum(
            int(entry.value)
            for tensor in graph.initializer
            for entry in tensor.external_data
            if entry.key == _LENGTH
        )
        if manifest.model.tied_embeddings:
            return stored
        table = manifest.contract.vocab_size * manifest.contract.hidden_size
        return round(stored * (1 - table / manifest.model.num_parameters))

    def describe(self) -> BundleRun:
        """The record of a bundle of which nothing was measured yet."""
        manifest, contract = self.manifest, self.engine.backend.contract
        found = manifest.perplexity
        return BundleRun(
            name=self.name,
            model=manifest.model.name,
            precision=manifest.precision,
            cache_form=contract.cache_form.value,
            kv_order=contract.kv_order.value,
            graph=self.graph,
            graph_sha256=manifest.files[self.graph].sha256,
            vectors=manifest.lookahead.origin,
            backend=BACKEND,
            backend_version=read_backend_version(BACKEND),
            weight_bytes=self.weight_bytes,
            perplexity=None if found is None else found.overall.perplexity,
        )


def name_bundles(folders: Sequence[Path]) -> tuple[str, ...]:
    """What results call these bundles: the names of their folders.

    Raises:
        UsageError: two of them have the same name.
    """
    names = tuple(folder.resolve().name for folder in folders)
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"two bundles are called {name!r}; results are told apart by the names of the "
                "folders: rename one of them"
            )
    return names


@contextmanager
def open_subjects(folders: Sequence[Path], *, threads: int) -> Iterator[tuple[Subject, ...]]:
    """Open bundles, every digest checked, and run each once.

    Args:
        folders: of the bundles.
        threads: for one pass.

    Raises:
        UsageError: two of them have the same name.
        LookaheadError: one cannot be opened.
    """
    with ExitStack() as opened:
        subjects = []
        for name, folder in zip(name_bundles(folders), folders, strict=True):
            engine = opened.enter_context(Engine.open(folder, backend=BACKEND, threads=threads))
            engine.warmup()
            subjects.append(Subject(name=name, folder=folder, engine=engine))
        yield tuple(subjects)
