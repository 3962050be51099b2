from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from la_export import pipeline
from la_export.cli import main
from la_export.options import DEFAULT_PREFILL_CHUNK, BuildOptions, Precision
from la_export.pipeline import BuildReport
from la_export.plan import PlanOptions, PlanSharing, Target
from la_runtime.bundle import open_bundle
from la_runtime.contract import CacheForm
from la_runtime.errors import ExitCode

SHIPPED = sorted((Path(__file__).parents[3] / "engines" / "recipes").glob("*.toml"))


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a build was asked for: its options, then those of its plans; nothing is built."""
    found: list[Any] = []

    def build(options: BuildOptions, _: object, *, plans: PlanOptions) -> BuildReport:
        found.extend((options, plans))
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "build", build)
    return found


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a recipe."""

    def write_recipe(text: str) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_recipe


FULL = """
model = "smollm2-135m"
revision = "abc"
out = "engines/mine"
k = [2, 4]
precision = "bf16"
cache-form = "scatter"
prefill-chunk = 64
context = 128
threads = 2
allow-bin = true
target = "trt-rtx"
plans = "shared"
max-batch = 3
workspace = 5
opt-level = 1
hardware-compatibility = "ampere-plus"
version-compatible = true
strip = true
compute-capability = ["8.9", "SM90"]
timing-cache = "timings"
"""


def test_recipe_asks_for_what_the_options_would(
    write: Callable[[str], Path], asked: list[Any]
) -> None:
    _run("build", "--recipe", write(FULL))
    _run(
        *("build", "--model", "smollm2-135m", "--revision", "abc", "--out", "engines/mine"),
        *("--k", "2", "--k", "4", "--precision", "bf16", "--cache-form", "scatter"),
        *("--prefill-chunk", "64", "--context", "128", "--threads", "2", "--allow-bin"),
        *("--target", "trt-rtx", "--plans", "shared", "--max-batch", "3", "--workspace", "5"),
        *("--opt-level", "1", "--hardware-compatibility", "ampere-plus", "--strip"),
        *("--version-compatible", "--compute-capability", "8.9", "--compute-capability", "9.0"),
        *("--timing-cache", "timings"),
    )

    assert len(asked) == 4
    assert asked[:2] == asked[2:]
    assert asked[1].sharing is PlanSharing.SHARED


def test_what_a_recipe_leaves_out_keeps_its_default(
    write: Callable[[str], Path], asked: list[Any]
) -> None:
    _run("build", "--recipe", write('model = "x"\n'))
    _run("build", "--model", "x")

    assert asked[:2] == asked[2:]
    assert asked[0].lookahead_lengths == (4,)


@pytest.mark.parametrize("recipe_is_first", [True, False])
def test_flags_override_a_recipe_even_with_the_default(
    recipe_is_first: bool, write: Callable[[str], Path], asked: list[Any]
) -> None:
    recipe = ["--recipe", write(FULL)]
    flags: list[str | Path] = ["--k", "4", "--precision", "fp32", "--prefill-chunk", "512"]

    _run("build", *(recipe + flags if recipe_is_first else flags + recipe))

    options, plans = asked
    assert options.lookahead_lengths == plans.lookahead_lengths == (4,)
    assert options.precision is Precision.FP32
    assert options.prefill_chunk == DEFAULT_PREFILL_CHUNK
    assert options.cache_form is CacheForm.SCATTER
    assert plans.target is Target.TRT_RTX


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ('precison = "fp32"', ["unknown key 'precison'", "did you mean 'precision'?", "known"]),
        ('cache_form = "concat"', ["unknown key 'cache_form'", "did you mean 'cache-form'?"]),
        ('zebra = "x"', ["unknown key 'zebra': known keys are allow-bin, cache-form,"]),
        ("json = true", ["unknown key 'json'"]),
        ('recipe = "x.toml"', ["unknown key 'recipe'"]),
        ('k = "4"', ["k is '4'; expected a list of whole numbers"]),
        ("k = 4", ["k is 4; expected a list of whole numbers"]),
        ("k = [2, true]", ["k is [2, True]; expected a list of whole numbers"]),
        ("context = 1.5", ["context is 1.5; expected a whole number"]),
        ("context = true", ["context is True; expected a whole number"]),
        ("model = 7", ["model is 7; expected text"]),
        ("allow-bin = 1", ["allow-bin is 1; expected true or false"]),
        ("compute-capability = [8.9]", ["compute-capability is [8.9]; expected a list of texts"]),
        ('precision = "fp8"', ["precision is 'fp8'; expected one of: fp32, fp16, bf16"]),
        ("precision = [1]", ["precision is [1]; expected one of"]),
        ("[plans]\nsharing = 1", ["plans is {'sharing': 1}; expected one of: per-k, shared"]),
        ('model = "x"\nk = [2', ["not valid TOML", "at end of document"]),
        ('model = "x"\nk == 2\n', ["not valid TOML", "line 2"]),
        ('model = "x"\nk = [17]', ["--k 17 is out of range"]),
        ('model = "x"\nk = []', ["no k was given"]),
    ],
)
def test_wrong_recipe_is_one_line_that_names_key_value_and_remedy(
    text: str, fragments: list[str], write: Callable[[str], Path], asked: list[Any]
) -> None:
    result = _run("build", "--recipe", write(text))

    assert result.exit_code == ExitCode.USAGE, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for fragment in fragments:
        assert fragment in line
    assert not asked


def test_unreadable_recipe_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b'model = "\xe9"')

    missing = _run("build", "--recipe", tmp_path / "none.toml")
    folder = _run("build", "--recipe", tmp_path)
    latin = _run("build", "--recipe", tmp_path / "latin")

    assert {missing.exit_code, folder.exit_code, latin.exit_code} == {ExitCode.USAGE}
    assert "cannot be read: No such file" in missing.stderr
    assert "cannot be read: Is a directory" in folder.stderr
    assert "is not valid TOML" in latin.stderr


def test_recipe_without_a_model_asks_for_it(write: Callable[[str], Path]) -> None:
    result = _run("build", "--recipe", write("k = [2]"))

    assert result.exit_code == ExitCode.USAGE
    assert "Missing option '--model'" in result.stderr


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_can_be_built_and_do_not_overwrite_each_other(
    path: Path, asked: list[Any]
) -> None:
    _run("build", "--recipe", path)

    options, _ = asked
    assert options.out == Path("engines") / path.stem


def test_recipes_are_shipped_for_each_precision_of_the_small_model_and_for_a_gpu() -> None:
    assert {path.stem for path in SHIPPED} >= {
        *("smollm2-135m-fp32", "smollm2-135m-int8", "smollm2-135m-int4"),
        "llama-7b-fp16",
    }


def test_printed_recipe_builds_the_same_bundle_again(
    report_of: Callable[..., BuildReport],
    checkpoint_of: Callable[[tuple[str, bool]], Path],
    tmp_path: Path,
) -> None:
    variant = ("llama", True)
    report = report_of(variant)
    printed = _run("inspect", report.bundle, "--recipe")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(printed.stdout, encoding="utf-8")
    checkpoint = shutil.copytree(checkpoint_of(variant), tmp_path / "checkpoint")

    result = _run(
        *("build", "--recipe", recipe, "-q"),
        *("--model", checkpoint, "--out", tmp_path / "again"),
    )

    assert result.exit_code == ExitCode.DONE, result.output
    again = open_bundle(tmp_path / "again").manifest
    assert again.files == report.manifest.files
    assert again.recipe == report.manifest.recipe


def test_json_recipe_is_that_of_the_manifest(report_of: Callable[..., BuildReport]) -> None:
    report = report_of(("llama", True))

    result = _run("inspect", report.bundle, "--recipe", "--json")

    assert json.loads(result.stdout) == report.manifest.recipe
    assert report.manifest.recipe["context"] == 256
    assert report.manifest.recipe["target"] == "onnx"
