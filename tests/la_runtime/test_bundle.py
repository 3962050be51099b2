"""Opening and writing bundles; the files inside are arbitrary bytes."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

import la_runtime.bundle as bundle_module
from la_runtime.bundle import (
    GRAPH_PATH,
    LOOKAHEAD_PATH,
    MANIFEST_NAME,
    GraphVariant,
    LookaheadFacts,
    Manifest,
    ModelFacts,
    PerplexityFacts,
    RopeFacts,
    open_bundle,
    seal_bundle,
    write_bundle,
)
from la_runtime.contract import CacheForm, Contract, KvOrder
from la_runtime.digests import DigestCheck, digest_cache_path
from la_runtime.errors import (
    BundleError,
    BundleVersionError,
    DigestError,
    ExitCode,
    HostError,
    UsageError,
)
from la_runtime.layout import GroupMask

GRAPH_BYTES = b"graph" * 1000


def make_manifest() -> Manifest:
    return Manifest(
        schema_version="1.0",
        contract=Contract(
            num_layers=1,
            num_kv_heads=1,
            head_dim=2,
            hidden_size=2,
            vocab_size=9,
            k_max=2,
            top_c=8,
        ),
        model=ModelFacts(
            name="toy",
            family="llama",
            source="toy",
            revision="none",
            source_quantization="none",
            source_digest="0" * 64,
            num_parameters=1,
            num_attention_heads=1,
            context=16,
            rope=RopeFacts(kind="default", theta=10_000.0),
            sliding_window=None,
            tied_embeddings=True,
            bos_token_id=None,
            eos_token_ids=(2,),
        ),
        precision="fp32",
        lookahead_lengths=(2,),
        graph=GRAPH_PATH,
        lookahead=LookaheadFacts(
            path=LOOKAHEAD_PATH, origin="untuned", group_mask=GroupMask.STRICT
        ),
        recipe={},
        built_with={},
        created_utc="2026-01-01T00:00:00Z",
        checks=(),
        files={},
    )


def seal_bundle_of(work: Path, graph: bytes = GRAPH_BYTES) -> None:
    (work / GRAPH_PATH).parent.mkdir()
    (work / GRAPH_PATH).write_bytes(graph)
    (work / LOOKAHEAD_PATH).write_bytes(b"vectors")
    seal_bundle(work, make_manifest())


def write_toy_bundle(destination: Path, graph: bytes = GRAPH_BYTES) -> Path:
    with write_bundle(destination) as work:
        seal_bundle_of(work, graph)
    return destination


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_toy_bundle(tmp_path / "toy")


def edit_manifest(bundle: Path, edit) -> None:
    path = bundle / MANIFEST_NAME
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))


def test_a_written_bundle_opens_with_what_was_written(bundle):
    opened = open_bundle(bundle)

    files = {GRAPH_PATH, LOOKAHEAD_PATH}
    assert set(opened.manifest.files) == files
    assert opened.manifest.model_copy(update={"files": {}}) == make_manifest()
    assert opened.path(GRAPH_PATH).read_bytes() == GRAPH_BYTES
    assert not list(bundle.parent.glob(".*")), "nothing is left beside it"


@pytest.mark.parametrize("digests", DigestCheck)
@pytest.mark.parametrize("place", [0, 2500, -1])
def test_a_flipped_byte_is_found(bundle, place, digests, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    open_bundle(bundle, digests=digests)
    graph = bytearray(GRAPH_BYTES)
    graph[place] ^= 1
    (bundle / GRAPH_PATH).write_bytes(graph)

    with pytest.raises(DigestError, match=r"onnx/model.onnx has sha256 \w{12}") as caught:
        open_bundle(bundle, digests=digests)
    assert caught.value.exit_code == ExitCode.FAILED


def test_cached_digests_are_not_computed_again(bundle, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    open_bundle(bundle, digests=DigestCheck.CACHED)

    def refuse(path):
        raise AssertionError(f"{path} was hashed again")

    monkeypatch.setattr("la_runtime.digests.hash_file", refuse)

    open_bundle(bundle, digests=DigestCheck.CACHED)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"x": 1}', b"[" * 100_000])
def test_an_unreadable_digest_cache_is_ignored(bundle, monkeypatch, tmp_path, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest_cache_path().parent.mkdir(parents=True)
    digest_cache_path().write_bytes(content)

    open_bundle(bundle, digests=DigestCheck.CACHED)


@pytest.mark.parametrize("remembered", ["zz", "0" * 63, 7, None])
def test_a_remembered_digest_that_is_none_is_computed_again(
    bundle, monkeypatch, tmp_path, remembered
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    open_bundle(bundle, digests=DigestCheck.CACHED)
    cache = json.loads(digest_cache_path().read_text())
    spoilt = {path: [*entry[:-1], remembered] for path, entry in cache.items()}
    digest_cache_path().write_text(json.dumps(spoilt))

    open_bundle(bundle, digests=DigestCheck.CACHED)

    assert json.loads(digest_cache_path().read_text()) == cache


def test_a_missing_file_is_named(bundle):
    (bundle / LOOKAHEAD_PATH).unlink()

    with pytest.raises(BundleError, match=r"incomplete: lookahead.safetensors is missing"):
        open_bundle(bundle)


@pytest.mark.parametrize("place", [("schema_version",), ("contract", "version")])
def test_a_newer_major_version_is_refused_before_its_keys_are_read(bundle, place):
    def edit(record):
        target = record
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = "2.0"
        record["a key of version 2"] = True

    edit_manifest(bundle, edit)

    with pytest.raises(BundleVersionError, match=r"version 2.0.*reads version 1\.x: upgrade"):
        open_bundle(bundle)


def test_a_newer_minor_version_opens(bundle):
    edit_manifest(bundle, lambda record: record.update(schema_version="1.7"))

    open_bundle(bundle)


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "onnx/../../secret", "C:/secret", "a\\b", "a\0b", ""]
)
def test_a_path_outside_the_bundle_is_refused(bundle, path):
    def edit(record):
        record["files"][path] = {"sha256": "0" * 64, "bytes": 1}

    edit_manifest(bundle, edit)

    with pytest.raises(BundleError, match=r"malformed: files.*stay inside the bundle"):
        open_bundle(bundle)


def test_a_link_out_of_the_bundle_is_refused(bundle, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(GRAPH_BYTES)
    (bundle / GRAPH_PATH).unlink()
    (bundle / GRAPH_PATH).symlink_to(outside)

    with pytest.raises(BundleError, match=r"unsafe: onnx/model.onnx links to .*outside"):
        open_bundle(bundle)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda record: record.update(extra=1), "extra: Extra inputs are not permitted"),
        (lambda record: record["contract"].update(extra=1), "contract.extra: Unexpected"),
        (lambda record: record.pop("model"), "model: Field required"),
        (lambda record: record["contract"].update(k_max=0), "k_max must be at least 1, got 0"),
        (lambda record: record.update(schema_version="one"), "schema version is 'one'"),
        (lambda record: record.update(schema_version="1" * 5000), "schema version is '1111"),
        *(
            (
                lambda record, lengths=lengths: record.update(lookahead_lengths=lengths),
                rf"lookahead_lengths: .* from 0 to 2, got {re.escape(str(lengths))}",
            )
            for lengths in ([], [-1, 2], [3], [2, 1], [1, 1])
        ),
        (lambda record: record.pop("contract"), "contract version is None"),
        (
            lambda record: record["files"][GRAPH_PATH].update(sha256="short"),
            "sha256: String should match pattern",
        ),
    ],
)
def test_a_malformed_manifest_is_refused_with_its_place(bundle, edit, message):
    edit_manifest(bundle, edit)

    with pytest.raises(BundleError, match=message):
        open_bundle(bundle)


def test_files_the_manifest_refers_to_must_be_among_those_it_digests(bundle):
    edit_manifest(bundle, lambda record: record["files"].pop(GRAPH_PATH))

    with pytest.raises(BundleError, match=r"onnx/model.onnx is not among the listed files"):
        open_bundle(bundle)


def test_what_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no bundle at"):
        open_bundle(tmp_path / "absent")
    with pytest.raises(BundleError, match=r"has no manifest\.json"):
        open_bundle(tmp_path)
    (tmp_path / MANIFEST_NAME).write_text("{")
    with pytest.raises(BundleError, match="not valid JSON"):
        open_bundle(tmp_path)
    (tmp_path / MANIFEST_NAME).write_text("[" * 100_000)
    with pytest.raises(BundleError, match="not valid JSON"):
        open_bundle(tmp_path)
    (tmp_path / MANIFEST_NAME).write_text("[]")
    with pytest.raises(BundleError, match="expected a JSON object"):
        open_bundle(tmp_path)


def test_a_name_that_is_too_long_is_refused(bundle):
    name = "x" * 300
    with pytest.raises(UsageError, match=r"no bundle at x+: File name too long"):
        open_bundle(name)

    edit_manifest(
        bundle, lambda record: record["files"].update({name: record["files"][GRAPH_PATH]})
    )
    with pytest.raises(BundleError, match=r"cannot be read at .*x: File name too long"):
        open_bundle(bundle)


def test_a_file_that_cannot_be_read_is_named(bundle, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("la_runtime.bundle.hash_file", refuse)

    with pytest.raises(BundleError, match=r"cannot be read at .*safetensors: Permission denied"):
        open_bundle(bundle)


def make_stray(place: Path, elsewhere: Path, kind: str) -> None:
    place.parent.mkdir(exist_ok=True)
    if kind == "file":
        place.write_text("evil")
        return
    target = elsewhere / kind
    if kind == "folder":
        target.mkdir()
    else:
        target.write_text("evil")
    place.symlink_to(target)


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
@pytest.mark.parametrize("stray", ["chat_template.jinja", "onnx/model.onnx.data", "reports"])
def test_files_that_the_manifest_does_not_list_are_refused(bundle, tmp_path, stray, kind):
    make_stray(bundle / stray, tmp_path, kind)

    with pytest.raises(BundleError, match=rf"unsafe: it holds '{stray}', which its manifest does"):
        open_bundle(bundle)


def test_reports_may_lie_beside_the_listed_files(bundle):
    make_stray(bundle / "reports" / "verify-1.json", bundle, "file")

    open_bundle(bundle)


def test_a_manifest_below_the_top_is_a_file_like_others(tmp_path):
    with write_bundle(tmp_path / "toy") as work:
        (work / "extra").mkdir()
        (work / "extra" / MANIFEST_NAME).write_text("{}")
        seal_bundle_of(work)

    assert open_bundle(tmp_path / "toy").has(f"extra/{MANIFEST_NAME}")


def test_reading_a_bundle_needs_no_posix(bundle):
    program = (
        "import sys; sys.modules['fcntl'] = None\n"
        "from la_runtime.bundle import open_bundle\n"
        f"open_bundle({str(bundle)!r})"
    )

    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("version", ["1.0", "9.0"])
def test_a_rebuild_replaces_the_old_bundle_whole(bundle, version):
    edit_manifest(bundle, lambda record: record.update(schema_version=version))
    for report in ("reports/verify-1.json", "trt/k2.plan"):
        make_stray(bundle / report, bundle, "file")

    write_toy_bundle(bundle, graph=b"new")

    assert open_bundle(bundle).path(GRAPH_PATH).read_bytes() == b"new"
    assert not (bundle / "reports").exists()
    assert not list(bundle.parent.glob(".*"))


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
@pytest.mark.parametrize("stray", ["photo.png", "onnx/photo.png"])
def test_a_bundle_that_holds_other_files_is_not_replaced(bundle, tmp_path, stray, kind):
    make_stray(bundle / stray, tmp_path, kind)

    with pytest.raises(UsageError, match=f"exists and holds '{stray}', which is not the bundle's"):
        write_toy_bundle(bundle, graph=b"new")

    assert (bundle / stray).exists()
    assert (bundle / GRAPH_PATH).read_bytes() == GRAPH_BYTES


def test_files_that_arrive_during_a_build_are_not_lost(bundle, tmp_path):
    def build_while_files_arrive(destination):
        with write_bundle(destination) as work:
            seal_bundle_of(work)
            make_stray(destination / "photo.png", tmp_path, "file")

    for destination in (bundle, tmp_path / "new"):
        with pytest.raises(UsageError, match=r"choose another --out or move that away"):
            build_while_files_arrive(destination)
        assert (destination / "photo.png").read_text() == "evil"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "manifest",
    [
        '{"name": "a web app"}',
        '{"schema_version": "1.0"}',
        '{"contract": {}}',
        "[]",
        "{",
        "[" * 100_000,
    ],
)
def test_a_folder_with_a_manifest_of_another_kind_is_no_bundle(tmp_path, manifest):
    (tmp_path / MANIFEST_NAME).write_text(manifest)

    with pytest.raises(UsageError, match="exists and is a folder that is no bundle"):
        write_toy_bundle(tmp_path)

    assert (tmp_path / MANIFEST_NAME).read_text() == manifest


def test_a_manifest_without_a_list_of_files_makes_none_the_bundles(bundle):
    edit_manifest(bundle, lambda record: record.update(files=None))

    with pytest.raises(UsageError, match=r"holds 'lookahead.safetensors', which is not"):
        write_toy_bundle(bundle)


@pytest.mark.parametrize(
    ("error", "seen"),
    [(OSError(errno.ENOSPC, "No space left on device"), HostError)]
    + [(error, type(error)) for error in (KeyboardInterrupt(), BundleError("failed check"))],
)
def test_a_failed_build_leaves_the_old_bundle_and_nothing_else(bundle, error, seen):
    def fail():
        with write_bundle(bundle) as work:
            (work / "half").write_text("written")
            raise error

    with pytest.raises(seen):
        fail()

    assert open_bundle(bundle).path(GRAPH_PATH).read_bytes() == GRAPH_BYTES
    assert [path.name for path in bundle.parent.iterdir()] == [bundle.name]


def test_a_full_disk_says_so(bundle):
    with (
        pytest.raises(HostError, match=r"No space left on device; nothing was changed") as caught,
        write_bundle(bundle),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.exit_code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_rebuild_works_where_folders_cannot_be_exchanged(bundle, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr("la_runtime.bundle._exchange", lambda one, other: False)

    write_toy_bundle(bundle, graph=b"new")

    assert open_bundle(bundle).path(GRAPH_PATH).read_bytes() == b"new"
    assert [path.name for path in bundle.parent.iterdir()] == [bundle.name]


def test_the_old_bundle_is_at_its_place_at_every_moment_of_a_rebuild(bundle, monkeypatch):
    """The exchange is one step of the kernel: no rename ever moves the old bundle away."""

    def refuse(source, target):
        assert Path(source) != bundle, "the old bundle was moved away"
        return rename(source, target)

    rename = os.replace
    monkeypatch.setattr("os.replace", refuse)

    write_toy_bundle(bundle, graph=b"new")

    assert open_bundle(bundle).path(GRAPH_PATH).read_bytes() == b"new"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_the_old_bundle_comes_back_when_the_second_rename_fails(bundle, monkeypatch, error):
    def fail_into_place(source, target):
        if Path(target) == bundle and Path(source).suffix == ".partial":
            raise error
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr("la_runtime.bundle._exchange", lambda one, other: False)
    monkeypatch.setattr("os.replace", fail_into_place)

    with pytest.raises((HostError, KeyboardInterrupt)):
        write_toy_bundle(bundle, graph=b"new")

    assert open_bundle(bundle).path(GRAPH_PATH).read_bytes() == GRAPH_BYTES
    assert [path.name for path in bundle.parent.iterdir()] == [bundle.name]


def test_the_next_build_removes_what_a_killed_one_left_but_not_a_running_one(bundle):
    abandoned = bundle.parent / f".{bundle.name}.dead.partial"
    abandoned.mkdir()
    (abandoned / "half").write_text("written")

    with write_bundle(bundle) as running:
        write_toy_bundle(bundle, graph=b"other")
        assert running.is_dir()
        assert not abandoned.exists()
        seal_bundle_of(running)

    assert open_bundle(bundle).path(GRAPH_PATH).read_bytes() == GRAPH_BYTES


def test_an_output_that_is_no_bundle_is_refused_and_left_alone(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.png").write_bytes(b"cat")
    file = tmp_path / "file"
    file.write_bytes(b"cat")

    for destination, what in ((folder, "a folder that is no bundle"), (file, "a file")):
        with (
            pytest.raises(UsageError, match=f"exists and is {what}"),
            write_bundle(destination),
        ):
            pass

    assert (folder / "cat.png").read_bytes() == file.read_bytes() == b"cat"


def test_an_output_that_is_a_link_updates_what_it_points_to(bundle, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(bundle)

    write_toy_bundle(link, graph=b"new")

    assert link.is_symlink()
    assert open_bundle(bundle).path(GRAPH_PATH).read_bytes() == b"new"
    assert not list(tmp_path.glob(".*"))


def test_a_dangling_link_becomes_a_bundle_where_it_points(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")

    open_bundle(write_toy_bundle(link))

    assert open_bundle(tmp_path / "target").has(GRAPH_PATH)


def test_the_current_folder_may_become_a_bundle_if_it_is_empty(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    write_toy_bundle(Path())

    open_bundle(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_an_output_name_that_is_too_long_is_refused(tmp_path):
    with (
        pytest.raises(UsageError, match="cannot be used: File name too long"),
        write_bundle(tmp_path / ("x" * 300)),
    ):
        pass


def test_an_error_of_reading_the_source_is_not_blamed_on_the_output(tmp_path):
    source = tmp_path / "source" / "absent"
    with pytest.raises(FileNotFoundError), write_bundle(tmp_path / "out" / "toy"):
        source.read_bytes()

    def write_badly():
        with write_bundle(tmp_path / "out" / "toy") as work:
            (work / "no" / "such" / "folder").write_bytes(b"")

    with pytest.raises(HostError, match="could not write the bundle"):
        write_badly()


def test_an_empty_folder_may_become_a_bundle(tmp_path):
    (tmp_path / "toy").mkdir()

    open_bundle(write_toy_bundle(tmp_path / "toy"))


@pytest.mark.parametrize(("capacity", "is_good"), [(16, False), (18, False), (19, True)])
def test_a_cache_of_fixed_capacity_has_room_behind_the_context(tmp_path, capacity, is_good):
    """For a token and its lookaheads: context 16 and k_max 2."""
    record = make_manifest().model_dump(mode="json")
    record["contract"] |= {"cache_form": "scatter", "capacity": capacity}

    if is_good:
        assert Manifest.model_validate(record).contract.capacity == capacity
    else:
        with pytest.raises(ValidationError, match="expected a cache capacity of 19 or more behind"):
            Manifest.model_validate(record)


@pytest.mark.parametrize(
    "change", [{"cache_form": "scatter"}, {"kv_order": "sequence-major"}], ids=["form", "order"]
)
def test_the_portable_graph_s_cache_is_one_that_every_backend_knows(change):
    record = make_manifest().model_dump(mode="json")
    record["contract"] |= change

    with pytest.raises(ValidationError, match="other forms are for variants of the graph"):
        Manifest.model_validate(record)


@pytest.mark.parametrize("form", [{}, {"cache_form": CacheForm.SCATTER, "capacity": 19}])
def test_a_variant_has_the_portable_contract_but_for_what_it_names(form):
    portable = replace(make_manifest().contract, **form)
    plain = GraphVariant(path="onnx/lean.onnx", backend="ort-cpu", omits=("logsumexp",))
    in_place = plain.model_copy(
        update={"kv_order": KvOrder.SEQUENCE_MAJOR, "cache_form": CacheForm.SCATTER}
    )

    assert plain.contract_of(portable) == portable
    assert in_place.contract_of(portable) == replace(
        portable,
        kv_order=KvOrder.SEQUENCE_MAJOR,
        cache_form=CacheForm.SCATTER,
        capacity=None,
    )


def test_a_variant_says_what_is_different_and_nothing_else():
    """So that manifests from before there were other forms are what they were."""
    record = {"path": "onnx/lean.onnx", "backend": "ort-cpu", "omits": ["logsumexp"]}
    different = {"kv_order": "sequence-major", "cache_form": "scatter"}

    for written in (record, record | different):
        variant = GraphVariant.model_validate(written)
        assert variant.model_dump(mode="json") == written
        assert GraphVariant.model_validate_json(variant.model_dump_json()) == variant


def test_a_backend_is_served_by_its_own_variant():
    lean = GraphVariant(path="onnx/lean.onnx", backend="ort-cpu", omits=())
    manifest = make_manifest().model_copy(update={"variants": (lean,)})

    assert manifest.variant_for("ort-cpu") == lean
    assert manifest.variant_for("ort-cuda") is None


def test_a_manifest_is_refused_before_any_digest_is_computed(bundle, monkeypatch):
    monkeypatch.setattr(bundle_module, "hash_file", lambda path: pytest.fail("it was hashed"))

    def refuse(manifest):
        raise HostError(f"{manifest.precision} is not for us")

    with pytest.raises(HostError, match="fp32 is not for us"):
        open_bundle(bundle, check=refuse)


def test_perplexity_of_all_texts_weighs_every_token_and_needs_every_source():
    half = {"text": "a", "num_tokens": 100, "perplexity": 2.0, "source_perplexity": 2.0}
    rest = {"text": "b", "num_tokens": 300, "perplexity": 16.0, "source_perplexity": 8.0}
    facts = {"utc": "", "backend": "b", "source": "x", "window": 512, "own_written_by": "fp32"}

    overall = PerplexityFacts(**facts, texts=(half, rest)).overall
    alone = PerplexityFacts(**facts, texts=(half, {**rest, "source_perplexity": None})).overall

    assert overall.num_tokens == 400
    assert overall.perplexity == pytest.approx(2 ** (0.25 + 0.75 * 4))
    assert overall.ratio == pytest.approx(2**0.75)
    assert alone.ratio is None
