"""Certificates: what they cover, how they are written, and when they hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from la_runtime import certificate as module
from la_runtime.bundle import (
    GRAPH_PATH,
    LOOKAHEAD_PATH,
    MANIFEST_NAME,
    Bundle,
    Certificate,
    Manifest,
    open_bundle,
    seal_bundle,
)
from la_runtime.certificate import (
    certified_digests,
    check_certificate,
    check_unchanged,
    describe_voidness,
    hash_facts,
    processor_name,
    read_backend_version,
    withdraw_certificates,
    write_certificate,
)
from la_runtime.errors import BundleError, CertificateError, ExitCode, HostError
from tests.la_runtime.test_bundle import make_manifest

HERE = {"backend": "ort-cpu", "backend_version": "1.32.0", "processor": "cpu A", "threads": 2}


@pytest.fixture
def bundle(tmp_path) -> Bundle:
    root = tmp_path / "bundle"
    for name, content in (
        (GRAPH_PATH, b"graph"),
        (GRAPH_PATH + ".data", b"weights"),
        (LOOKAHEAD_PATH, b"vectors"),
        ("tokenizer.json", b"{}"),
        ("trt/x/k2.plan", b"plan"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    seal_bundle(root, make_manifest())
    return open_bundle(root)


def make_certificate(bundle: Bundle, **changes) -> Certificate:
    fields = {
        "utc": "2026-01-01T00:00:00+00:00",
        "reference": "torch",
        "epsilon": 1e-5,
        "lookahead_lengths": (2,),
        "digests": certified_digests(bundle.manifest, "ort-cpu"),
        "facts_sha256": hash_facts(bundle.manifest),
        "rungs": {"logits": "passed"},
        "report": "reports/verify-1.json",
    }
    return Certificate(**(HERE | fields | changes))


def test_facts_of_a_manifest_from_before_keep_their_hash():
    """Fields that came later are no part of it where they are not given."""
    data = Path(__file__).parents[1] / "data" / "manifest-1.3.json"
    manifest = Manifest.model_validate_json(data.read_bytes())

    assert manifest.contract.version == "1.3"
    assert [c.facts_sha256 for c in manifest.certificates] == [hash_facts(manifest)]
    written = json.loads(manifest.model_dump_json())
    assert written["contract"].keys() == json.loads(data.read_bytes())["contract"].keys()
    assert written["model"] == json.loads(data.read_bytes())["model"]
    assert written["step_times"] == json.loads(data.read_bytes())["step_times"]


def reopen(bundle: Bundle) -> Bundle:
    return open_bundle(bundle.root)


def test_graphs_weights_vectors_and_tokenizer_are_certified_and_plans_are_not(bundle):
    assert set(certified_digests(bundle.manifest, "ort-cpu")) == {
        GRAPH_PATH,
        GRAPH_PATH + ".data",
        LOOKAHEAD_PATH,
        "tokenizer.json",
    }


def test_a_certified_bundle_holds_where_it_was_verified(bundle):
    write_certificate(bundle, make_certificate(bundle))

    assert check_certificate(reopen(bundle), **HERE) == ()


def test_a_bundle_without_a_certificate_for_the_backend_is_refused(bundle):
    with pytest.raises(CertificateError, match=r"no certificate for backend 'ort-cpu'; make one"):
        check_certificate(bundle, **HERE)
    write_certificate(bundle, make_certificate(bundle, backend="trt"))
    with pytest.raises(CertificateError, match=r"la-export verify") as caught:
        check_certificate(reopen(bundle), **HERE)
    assert caught.value.exit_code == ExitCode.FAILED


@pytest.mark.parametrize("name", [GRAPH_PATH, GRAPH_PATH + ".data", LOOKAHEAD_PATH])
def test_a_file_that_changed_since_makes_the_certificate_void(bundle, name):
    manifest = write_certificate(bundle, make_certificate(bundle))
    (bundle.root / name).write_bytes(b"other")
    seal_bundle(bundle.root, manifest)

    with pytest.raises(
        CertificateError, match=rf"not the one that was verified on 2026-.*: {name} changed since"
    ):
        check_certificate(reopen(bundle), **HERE)


def test_a_file_that_was_added_makes_it_void_unless_it_is_a_plan(bundle):
    manifest = write_certificate(bundle, make_certificate(bundle))
    (bundle.root / "trt" / "x" / "k4.plan").write_bytes(b"plan")
    manifest = seal_bundle(bundle.root, manifest)
    assert check_certificate(reopen(bundle), **HERE) == ()

    (bundle.root / "generation_config.json").write_bytes(b"{}")
    seal_bundle(bundle.root, manifest)

    with pytest.raises(CertificateError, match=r"generation_config\.json changed since"):
        check_certificate(reopen(bundle), **HERE)


def test_other_end_tokens_in_the_manifest_make_it_void(bundle):
    manifest = write_certificate(bundle, make_certificate(bundle))
    model = manifest.model.model_copy(update={"eos_token_ids": (3,)})
    seal_bundle(bundle.root, manifest.model_copy(update={"model": model}))

    with pytest.raises(CertificateError, match="the manifest's facts changed since"):
        check_certificate(reopen(bundle), **HERE)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"backend_version": "1.31.0"},
            "the bundle was verified with ort-cpu version 1.31.0, and runs with 1.32.0",
        ),
        (
            {"processor": "cpu B"},
            "the bundle was verified with processor cpu B, and runs with cpu A",
        ),
        ({"threads": 0}, "the bundle was verified with threads 0, and runs with 2"),
        (
            {"reference": "self"},
            "the bundle was verified against its own plain decoding only, never against PyTorch",
        ),
        (
            {"lookahead_lengths": (1,)},
            "the bundle was not verified for lookahead length 2",
        ),
    ],
)
def test_another_machine_is_a_warning(bundle, changes, line):
    write_certificate(bundle, make_certificate(bundle, **changes))

    assert check_certificate(reopen(bundle), **HERE) == (line,)


def test_the_certificate_against_pytorch_goes_first(bundle):
    write_certificate(bundle, make_certificate(bundle, reference="self"))
    write_certificate(reopen(bundle), make_certificate(bundle))

    assert check_certificate(reopen(bundle), **HERE) == ()


def test_a_void_certificate_against_pytorch_is_no_obstacle(bundle):
    stale = make_certificate(bundle, digests={LOOKAHEAD_PATH: "0" * 64})
    write_certificate(bundle, stale)
    write_certificate(reopen(bundle), make_certificate(bundle, reference="self"))

    (line,) = check_certificate(reopen(bundle), **HERE)

    assert line.startswith("the bundle was verified against its own plain decoding only")
    assert describe_voidness(bundle.manifest, stale) == f"{LOOKAHEAD_PATH} changed since"
    assert describe_voidness(bundle.manifest, make_certificate(bundle)) == ""


@pytest.mark.parametrize(
    ("rungs", "reason"),
    [
        ({"logits": "passed", "epsilon": "failed"}, "has rungs that say 'failed'"),
        ({"logits": "could_not_run"}, "has rungs that say 'could_not_run'"),
        ({}, "nothing was checked"),
    ],
)
def test_a_certificate_whose_rungs_did_not_pass_is_none(bundle, rungs, reason):
    write_certificate(bundle, make_certificate(bundle, rungs=rungs))

    with pytest.raises(CertificateError, match=reason):
        check_certificate(reopen(bundle), **HERE)


def test_certificates_of_one_backend_are_withdrawn_together(bundle):
    for backend, reference in (("ort-cpu", "torch"), ("trt", "torch"), ("ort-cpu", "self")):
        write_certificate(
            reopen(bundle), make_certificate(bundle, backend=backend, reference=reference)
        )

    assert withdraw_certificates(reopen(bundle), backend="ort-cpu") == 2

    before = (bundle.root / MANIFEST_NAME).read_bytes()
    assert [entry.backend for entry in reopen(bundle).manifest.certificates] == ["trt"]
    assert withdraw_certificates(reopen(bundle), backend="ort-cpu") == 0
    assert (bundle.root / MANIFEST_NAME).read_bytes() == before


def test_nothing_is_withdrawn_from_another_bundle(bundle):
    manifest = write_certificate(bundle, make_certificate(bundle))
    (bundle.root / LOOKAHEAD_PATH).write_bytes(b"tuned")
    seal_bundle(bundle.root, manifest)

    with pytest.raises(BundleError, match=r"changed in the meantime, so nothing is"):
        withdraw_certificates(bundle, backend="ort-cpu")

    assert len(reopen(bundle).manifest.certificates) == 1


def test_a_manifest_that_cannot_be_read_again_is_one_error(bundle, monkeypatch):
    def fail(root):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "read_manifest", fail)

    with pytest.raises(HostError, match=r"could not read the manifest of .* again: Input/output"):
        check_unchanged(bundle)


def test_a_newer_certificate_takes_the_place_of_its_kind(bundle):
    for utc, reference in (("1", "torch"), ("2", "self"), ("3", "torch")):
        write_certificate(reopen(bundle), make_certificate(bundle, utc=utc, reference=reference))

    found = reopen(bundle).manifest.certificates

    assert [(entry.utc, entry.reference) for entry in found] == [("2", "self"), ("3", "torch")]


def test_a_bundle_rebuilt_in_the_meantime_gets_no_certificate(bundle):
    (bundle.root / LOOKAHEAD_PATH).write_bytes(b"tuned")
    seal_bundle(bundle.root, bundle.manifest)

    with pytest.raises(BundleError, match=r"changed in the meantime, so nothing is written"):
        write_certificate(bundle, make_certificate(bundle))

    assert reopen(bundle).manifest.certificates == ()


def test_a_manifest_that_cannot_be_replaced_stays_as_it_was(bundle, monkeypatch):
    before = (bundle.root / MANIFEST_NAME).read_bytes()

    def fail(root: Path, manifest, *, partial: Path) -> None:
        partial.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "replace_manifest", fail)

    with pytest.raises(HostError, match=r"No space left on device; its manifest is as it was"):
        write_certificate(bundle, make_certificate(bundle))

    assert (bundle.root / MANIFEST_NAME).read_bytes() == before
    assert list((bundle.root / "reports").iterdir()) == []


def test_what_a_killed_writer_leaves_does_not_spoil_the_bundle(bundle):
    (bundle.root / "reports").mkdir()
    (bundle.root / "reports" / ".manifest.1.partial").write_text("half")

    assert reopen(bundle).manifest == bundle.manifest


def test_a_manifest_without_certificates_can_still_be_read(bundle):
    path = bundle.root / MANIFEST_NAME
    record = json.loads(path.read_text())
    del record["certificates"]
    path.write_text(json.dumps(record))

    assert reopen(bundle).manifest.certificates == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [("facts_sha256", "abc"), ("digests", {"../x": "0" * 64}), ("epsilon", -1), ("extra", 1)],
)
def test_a_malformed_certificate_is_refused(bundle, field, value):
    write_certificate(bundle, make_certificate(bundle))
    path = bundle.root / MANIFEST_NAME
    record = json.loads(path.read_text())
    record["certificates"][0][field] = value
    path.write_text(json.dumps(record))

    with pytest.raises(BundleError, match=rf"is malformed: certificates\.0\.{field}"):
        reopen(bundle)


def test_this_machine_has_a_processor_and_a_backend():
    assert processor_name()
    assert read_backend_version("ort-cpu")[0].isdigit()


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("fma avx avx2", "Some CPU (AVX2)"),
        ("avx2 avx512f avx512_vnni", "Some CPU (AVX-512 VNNI)"),
        ("avx2 avx512f avx512_vnni amx_int8", "Some CPU (AMX)"),
        ("avx2 avx_vnni", "Some CPU (AVX-VNNI)"),
        ("sse4_2", "Some CPU"),
    ],
)
def test_processors_of_one_name_are_told_apart_by_their_instructions(tmp_path, flags, name):
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu {flags}\n")
    assert processor_name(facts) == name


def test_a_machine_that_tells_nothing_still_has_a_name(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_CPU_FACTS", tmp_path / "none")
    monkeypatch.setattr(module.platform, "processor", lambda: "")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(module, "_DISTRIBUTIONS", {"ort-cpu": ("no-such-distribution",)})

    assert processor_name() == "x86_64"
    assert read_backend_version("ort-cpu") == "not installed"
