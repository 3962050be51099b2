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
from collections.abc import Callable
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
from la_runtime.contract import RowPlaces
from la_runtime.errors import BundleError, CertificateError, HostError
from la_runtime.plans import PLANS_FOLDER

__all__ = [
    "SELF_REFERENCE",
    "TORCH_REFERENCE",
    "certified_digests",
    "change_manifest",
    "check_certificate",
    "check_unchanged",
    "describe_voidness",
    "hash_facts",
    "processor_name",
    "read_backend_version",
    "withdraw_certificates",
    "write_certificate",
]

TORCH_REFERENCE: Final = "torch"
SELF_REFERENCE: Final = "self"

_CPU_FACTS: Final = Path("/proc/cpuinfo")
# By the kernel's names of them, those that ONNX Runtime would choose first.
_INSTRUCTIONS: Final = {
    "amx_int8": "AMX",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}
_PLANS: Final = f"{PLANS_FOLDER}/"
_GOOD_STATUSES: Final = frozenset({"passed", "skipped"})
# What may have brought a backend's library, the likeliest first.
_DISTRIBUTIONS: Final = {
    "ort-cpu": ("onnxruntime", "onnxruntime-gpu"),
    "ort-cuda": ("onnxruntime-gpu",),
    "trt": (
        "tensorrt",
        "tensorrt-cu13",
        "tensorrt-cu12",
        "tensorrt-lean",
        "tensorrt-lean-cu13",
        "tensorrt-lean-cu12",
    ),
    "trt-rtx": ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
}
_FREE_FIELDS: Final = frozenset(
    {
        "files",
        "certificates",
        "built_with",
        "created_utc",
        "checks",
        "plans",
        "perplexity",
        "step_times",
    }
)


def certified_digests(manifest: Manifest, backend: str) -> dict[str, str]:
    """SHA-256 by path of everything that decides what the bundle says on a backend.

    Those are the graphs and their weights, the lookahead vectors, the tokenizer's files, and the
    plans of this backend; other plans may come and go.
    """
    plans = {plan.path for plan in manifest.plans if plan.target == backend}
    return {
        path: entry.sha256
        for path, entry in sorted(manifest.files.items())
        if path in plans or not path.startswith(_PLANS)
    }


def hash_facts(manifest: Manifest) -> str:
    """SHA-256 of the manifest's facts: contract, model, end tokens, lengths, graph variants.

    Files, plans, checks, certificates and what was measured are no part of it.
    """
    facts = manifest.model_dump(mode="json", exclude=set(_FREE_FIELDS))
    if manifest.contract.row_places is RowPlaces.BEHIND:
        del facts["contract"]["row_places"]  # which facts from before there was such a field lack
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def processor_name(facts: Path | None = None) -> str:
    """What this machine calls its processor, and the widest instructions that kernels may use.

    Rented machines often give a family's name alone, over processors whose kernels sum otherwise.

    Args:
        facts: the kernel's table; this machine's when not given.
    """
    try:
        lines = (facts or _CPU_FACTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    name = found.get("model name") or platform.processor() or platform.machine()
    flags = set(found.get("flags", "").split())
    kind = next((shown for flag, shown in _INSTRUCTIONS.items() if flag in flags), "")
    return f"{name} ({kind})" if kind else name


def read_backend_version(backend: str) -> str:
    """Version of the library behind a backend, ``not installed`` if there is none.

    Args:
        backend: one of `backends.BACKENDS`.
    """
    for distribution in _DISTRIBUTIONS[backend]:
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

    Of several that hold, one against PyTorch goes before one of the bundle against itself.

    Args:
        bundle: opened, so that its files are those its manifest lists.
        backend: what will run the graph.
        backend_version: of its library.
        processor: what it will run on, see `backends.read_processor`.
        threads: of one pass; 0 if the library chooses.

    Returns:
        One line for each thing that differs without making the certificate void.

    Raises:
        CertificateError: no certificate for the backend, or every one is void: of another graph,
            other weights, other lookahead vectors, another tokenizer or other facts, or with a
            rung that did not pass.
    """
    manifest = bundle.manifest
    found = [entry for entry in manifest.certificates if entry.backend == backend]
    if not found:
        raise CertificateError(
            f"bundle {bundle.root} has no certificate for backend {backend!r}; "
            f"make one with 'la-export verify {bundle.root}'"
        )
    found.sort(key=lambda entry: entry.reference != TORCH_REFERENCE)
    reasons = [describe_voidness(manifest, entry) for entry in found]
    if all(reasons):
        raise CertificateError(
            f"bundle {bundle.root} is not the one that was verified on {found[0].utc}: "
            f"{reasons[0]}; verify it again with 'la-export verify {bundle.root}'"
        )
    certificate = found[reasons.index("")]
    return tuple(_differences(manifest, certificate, backend_version, processor, threads))


def describe_voidness(manifest: Manifest, certificate: Certificate) -> str:
    """Why a certificate does not hold for the bundle of this manifest; empty if it does."""
    bad = sorted({*certificate.rungs.values()} - _GOOD_STATUSES)
    if bad or not certificate.rungs:
        return f"its certificate has rungs that say {bad[0]!r}" if bad else "nothing was checked"
    current = certified_digests(manifest, certificate.backend)
    changed = sorted(
        path
        for path in {*current, *certificate.digests}
        if current.get(path) != certificate.digests.get(path)
    )
    if changed:
        return f"{changed[0]} changed since"
    is_same = hash_facts(manifest) == certificate.facts_sha256
    return "" if is_same else "the manifest's facts changed since"


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


def check_unchanged(bundle: Bundle) -> Manifest:
    """Require that what lies in the folder is still the bundle that was opened.

    Returns:
        The manifest as it is now; certificates may have come or gone.

    Raises:
        BundleError: the bundle was rebuilt in the meantime, or is gone.
        HostError: its manifest cannot be read.
    """
    try:
        current = read_manifest(bundle.root)
    except OSError as error:
        raise HostError(
            f"could not read the manifest of {bundle.root} again: {error.strerror or error}; "
            "check its permissions and its disk"
        ) from error
    if _identity(current) != _identity(bundle.manifest):
        raise BundleError(
            f"bundle {bundle.root} changed in the meantime, so nothing is written into it; "
            "run the command again"
        )
    return current


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
    kind = (certificate.backend, certificate.reference)

    def replace_its_kind(found: tuple[Certificate, ...]) -> tuple[Certificate, ...]:
        return (*(c for c in found if (c.backend, c.reference) != kind), certificate)

    return _change_certificates(bundle, replace_its_kind)


def withdraw_certificates(bundle: Bundle, *, backend: str) -> int:
    """Take every certificate for a backend out of a bundle's manifest: a verification failed.

    Args:
        bundle: as it was verified.
        backend: what ran the graph.

    Returns:
        How many there were; with none the manifest is left alone.

    Raises:
        BundleError: the bundle was rebuilt in the meantime.
        HostError: the folder is not writable.
    """
    before = check_unchanged(bundle).certificates
    staying = tuple(c for c in before if c.backend != backend)
    if len(staying) < len(before):
        _change_certificates(bundle, lambda found: tuple(c for c in found if c.backend != backend))
    return len(before) - len(staying)


def _change_certificates(
    bundle: Bundle, change: Callable[[tuple[Certificate, ...]], tuple[Certificate, ...]]
) -> Manifest:
    """Replace the certificates of a bundle in one step; returns the manifest as written."""

    def change_them(manifest: Manifest) -> Manifest:
        return manifest.model_copy(update={"certificates": change(manifest.certificates)})

    return change_manifest(bundle, change_them, what="certificates")


def change_manifest(
    bundle: Bundle, change: Callable[[Manifest], Manifest], *, what: str
) -> Manifest:
    """Replace the manifest of a bundle in one step by one that describes the same bundle.

    Args:
        bundle: as it was opened.
        change: makes the new manifest of the one that is there now.
        what: is changed, for the message when it cannot be.

    Returns:
        The manifest as written.

    Raises:
        BundleError: the bundle was rebuilt in the meantime.
        HostError: the folder is not writable.
    """
    try:
        manifest = change(check_unchanged(bundle))
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
            f"could not change the {what} of {bundle.root}: {error.strerror or error}; "
            "its manifest is as it was"
        ) from error
    return manifest


def _identity(manifest: Manifest) -> tuple[str, dict[str, str]]:
    return hash_facts(manifest), {path: entry.sha256 for path, entry in manifest.files.items()}
