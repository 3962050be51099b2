"""Certificates: what a bundle was verified to be, and whether that holds on this machine.

Owns what a certificate covers, putting one into a manifest, and the comparison with what a bundle
is about to run on. It does not know how a bundle is verified.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path, PurePosixPath
from typing import Final

from la_runtime.bundle import (
    REPORTS_FOLDER,
    Bundle,
    Certificate,
    Manifest,
    read_manifest,
    replace_manifest,
)
from la_runtime.errors import BundleError, CertificateError, HostError

__all__ = [
    "SELF_REFERENCE",
    "TORCH_REFERENCE",
    "certified_digests",
    "check_certificate",
    "hash_facts",
    "processor_name",
    "read_backend_version",
    "write_certificate",
]

TORCH_REFERENCE: Final = "torch"
SELF_REFERENCE: Final = "self"

_CPU_FACTS: Final = Path("/proc/cpuinfo")
_PLANS: Final = "trt/"
_CPU_DISTRIBUTIONS: Final = ("onnxruntime", "onnxruntime-gpu")
_FREE_FIELDS: Final = frozenset({"files", "certificates", "built_with", "created_utc", "checks"})


def certified_digests(manifest: Manifest) -> dict[str, str]:
    """SHA-256 by path of everything that decides what the bundle says.

    Those are the graphs and their weights, the lookahead vectors and the tokenizer's files; plans
    for other backends may come and go.
    """
    return {
        path: entry.sha256
        for path, entry in sorted(manifest.files.items())
        if not path.startswith(_PLANS)
    }


def hash_facts(manifest: Manifest) -> str:
    """SHA-256 of the manifest's facts: contract, model, end tokens, lengths, graph variants.

    Files, checks and certificates are no part of it.
    """
    facts = manifest.model_dump(mode="json", exclude=set(_FREE_FIELDS))
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def processor_name() -> str:
    """What this machine calls its processor."""
    try:
        lines = _CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def read_backend_version(backend: str) -> str:
    """Version of the library behind a backend, ``not installed`` if there is none.

    Args:
        backend: one of `backends.BACKENDS`; all of them are ONNX Runtime's.
    """
    del backend
    for distribution in _CPU_DISTRIBUTIONS:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def check_certificate(
    bundle: Bundle,
    *,
    backend: str,
    backend_version: str,
    processor: str,
    threads: int,
) -> tuple[str, ...]:
    """Require that this bundle, byte for byte, was verified on this backend.

    A certificate against PyTorch goes before one of the bundle against itself.

    Args:
        bundle: opened, so that its files are those its manifest lists.
        backend: what will run the graph.
        backend_version: of its library.
        processor: what it will run on, see `processor_name`.
        threads: of one pass; 0 if the library chooses.

    Returns:
        One line for each thing that differs without making the certificate void.

    Raises:
        CertificateError: no certificate for the backend, or it is of another graph, other weights,
            other lookahead vectors, another tokenizer or other facts.
    """
    manifest = bundle.manifest
    found = [entry for entry in manifest.certificates if entry.backend == backend]
    if not found:
        raise CertificateError(
            f"bundle {bundle.root} has no certificate for backend {backend!r}; "
            f"make one with 'la-export verify {bundle.root}'"
        )
    certificate = min(found, key=lambda entry: entry.reference != TORCH_REFERENCE)
    _check_digests(bundle, certificate)
    return tuple(_differences(manifest, certificate, backend_version, processor, threads))


def _check_digests(bundle: Bundle, certificate: Certificate) -> None:
    current = certified_digests(bundle.manifest)
    changed = sorted(
        path
        for path in {*current, *certificate.digests}
        if current.get(path) != certificate.digests.get(path)
    )
    what = changed[0] if changed else "the manifest's facts"
    if changed or hash_facts(bundle.manifest) != certificate.facts_sha256:
        raise CertificateError(
            f"bundle {bundle.root} is not the one that was verified on {certificate.utc}: {what} "
            f"changed since; verify it again with 'la-export verify {bundle.root}'"
        )


def _differences(
    manifest: Manifest, certificate: Certificate, backend_version: str, processor: str, threads: int
) -> list[str]:
    """What is not as it was, in one line each."""
    compared = (
        (f"{certificate.backend} version", certificate.backend_version, backend_version),
        ("processor", certificate.processor, processor),
        ("threads", certificate.threads, threads),
    )
    lines = [
        f"the bundle was verified with {what} {before}, and runs with {now}"
        for what, before, now in compared
        if before != now
    ]
    if certificate.reference != TORCH_REFERENCE:
        lines.append(
            "the bundle was verified against its own plain decoding only, never against PyTorch"
        )
    unverified = sorted({*manifest.lookahead_lengths} - {0, *certificate.lookahead_lengths})
    if unverified:
        lengths = ", ".join(map(str, unverified))
        lines.append(f"the bundle was not verified for lookahead length {lengths}")
    return lines


def write_certificate(bundle: Bundle, certificate: Certificate) -> Manifest:
    """Put a certificate into a bundle's manifest, in the place of an older one of its kind.

    There is one for each backend and reference. The manifest is replaced in one step; whatever
    happens, a whole one is there.

    Args:
        bundle: as it was verified.
        certificate: what was found.

    Returns:
        The manifest as written.

    Raises:
        BundleError: the bundle was rebuilt in the meantime.
        HostError: the folder is not writable.
    """
    try:
        current = read_manifest(bundle.root)
        if _identity(current) != _identity(bundle.manifest):
            raise BundleError(
                f"bundle {bundle.root} changed while it was verified, so it gets no certificate; "
                "verify it again"
            )
        kind = (certificate.backend, certificate.reference)
        others = [c for c in current.certificates if (c.backend, c.reference) != kind]
        manifest = current.model_copy(update={"certificates": (*others, certificate)})
        # A name there is not taken for a file of the bundle, should this process be killed.
        reports = bundle.root / PurePosixPath(REPORTS_FOLDER)
        reports.mkdir(exist_ok=True)
        partial = reports / f".manifest.{os.getpid()}.partial"
        try:
            replace_manifest(bundle.root, manifest, partial=partial)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise HostError(
            f"could not write the certificate into {bundle.root}: {error.strerror or error}; "
            "its manifest is as it was"
        ) from error
    return manifest


def _identity(manifest: Manifest) -> tuple[str, dict[str, str]]:
    return hash_facts(manifest), {path: entry.sha256 for path, entry in manifest.files.items()}
