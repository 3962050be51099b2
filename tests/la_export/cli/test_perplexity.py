from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from la_export.cli import main
from la_export.perplexity import own_text
from la_export.pipeline import BuildReport
from la_runtime.bundle import MANIFEST_NAME, read_manifest
from la_runtime.certificate import hash_facts
from la_runtime.errors import ExitCode

VARIANT = ("llama", True)
TOKENS = "150"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of these tests: the model writes its text once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def bundle(
    report_of: Callable[..., BuildReport],
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A bundle of one's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(own_text, "_ROUND", 4)
    return shutil.copytree(report_of(VARIANT).bundle, tmp_path / "bundle")


@pytest.fixture
def checkpoint(checkpoint_of: Callable[..., Path]) -> str:
    return str(checkpoint_of(VARIANT))


def _run(bundle: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        main, ["perplexity", str(bundle), "--tokens", TOKENS, "--threads", "1", *arguments]
    )


def test_a_float32_bundle_is_as_perplexed_as_its_source_and_says_so(
    bundle: Path, checkpoint: str
) -> None:
    before = read_manifest(bundle)

    result = _run(bundle, "--model", checkpoint, "--json")

    assert result.exit_code == ExitCode.DONE, result.output
    record = json.loads(result.stdout)
    assert [row["text"] for row in record["texts"]][-1] == "all"
    assert sum(row["num_tokens"] for row in record["texts"][:-1]) == int(TOKENS)
    for row in record["texts"]:
        assert row["ratio"] == pytest.approx(1.0, abs=1e-5)
        assert row["perplexity"] > 1.5
    facts = read_manifest(bundle).perplexity
    assert facts is not None
    assert [row.perplexity for row in facts.texts] == [
        row["perplexity"] for row in record["texts"][:-1]
    ]
    assert hash_facts(read_manifest(bundle)) == hash_facts(before)


def test_inspect_shows_what_was_measured(bundle: Path, checkpoint: str) -> None:
    measured = _run(bundle, "--model", checkpoint)

    shown = CliRunner().invoke(main, ["inspect", str(bundle)])

    assert shown.exit_code == ExitCode.DONE, shown.output
    lines = [line for line in measured.stdout.splitlines() if "pages in the public domain" in line]
    assert len(lines) == 1
    assert lines[0] in shown.stdout


def test_without_its_source_a_bundle_is_measured_alone_and_a_line_says_why(bundle: Path) -> None:
    result = _run(bundle)

    assert result.exit_code == ExitCode.DONE, result.output
    assert "note: the bundle alone is measured: the bundle was made from" in result.stderr
    assert "do without the source's figures" in result.stderr
    facts = read_manifest(bundle).perplexity
    assert facts is not None
    assert (facts.source, facts.overall.ratio) == (None, None)


def test_a_named_source_that_is_another_model_is_refused(
    bundle: Path, checkpoint_of: Callable[..., Path]
) -> None:
    result = _run(bundle, "--model", str(checkpoint_of(("llama", False))))

    assert result.exit_code == ExitCode.COULD_NOT_RUN, result.output
    assert "is not the one the bundle was made from" in result.stderr
    assert read_manifest(bundle).perplexity is None


def test_no_store_leaves_the_manifest_alone(bundle: Path) -> None:
    before = (bundle / MANIFEST_NAME).read_bytes()

    result = _run(bundle, "--no-store", "--json", "--quiet")

    assert result.exit_code == ExitCode.DONE, result.output
    assert json.loads(result.stdout)["stored"] is False
    assert result.stderr == ""
    assert (bundle / MANIFEST_NAME).read_bytes() == before


def test_text_that_a_bundle_of_few_bits_wrote_is_noted(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    manifest = json.loads((bundle / MANIFEST_NAME).read_bytes())
    (bundle / MANIFEST_NAME).write_text(json.dumps({**manifest, "precision": "int8"}))

    result = _run(bundle)

    assert result.exit_code == ExitCode.DONE, result.output
    assert "note: a bundle in int8 wrote the model's own answers" in result.stderr
