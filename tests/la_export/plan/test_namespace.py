from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from la_export.plan.namespace import choose_installation, open_tensorrt
from la_export.plan.options import Target
from la_runtime.errors import HostError
from la_runtime.plans import PlanTarget
from tests.la_export.plan.machines import GPU, find_gpu, find_no_gpu, never_ask


def _without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    from importlib.util import find_spec

    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in modules else find_spec(name)
    )


@pytest.mark.parametrize(
    ("target", "module", "requirement"),
    [
        (PlanTarget.TRT, "tensorrt", "lookahead-attention[trt]"),
        (PlanTarget.TRT_RTX, "tensorrt_rtx", "lookahead-attention[trt-rtx]"),
    ],
)
def test_missing_package_is_named_with_its_pip_line(
    target: PlanTarget, module: str, requirement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without(monkeypatch, module)

    with pytest.raises(HostError) as caught:
        open_tensorrt(target, find_gpu=find_gpu)

    assert f"target {target} needs" in str(caught.value)
    assert f"not installed; run: pip install '{requirement}'" in str(caught.value)


def test_trt_asks_for_the_gpu_before_its_module_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text("raise AssertionError('loaded without a GPU')")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(HostError, match=r"builds plans on the GPU .* no NVIDIA driver"):
        open_tensorrt(PlanTarget.TRT, find_gpu=find_no_gpu)


def test_module_that_cannot_be_loaded_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text(
        "raise ImportError('libnvonnxparser.so.11: cannot open shared object file')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(HostError, match=r"cannot be imported: libnvonnxparser\.so\.11"):
        open_tensorrt(PlanTarget.TRT, find_gpu=find_gpu)


@pytest.mark.parametrize("version", ["10.14.1", "12.0.0.1", "8.6", "unknown"])
def test_version_that_is_not_known_is_refused(
    version: str, stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in, "__version__", version)

    with pytest.raises(HostError, match=rf"from 10\.15 to before 12\.0, got {version}"):
        open_tensorrt(PlanTarget.TRT, find_gpu=find_gpu)


@pytest.mark.parametrize("version", ["10.15.0", "10.16.1.11", "11.4.0.106"])
def test_trt_of_a_known_version_is_opened_on_its_gpu(
    version: str, stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in, "__version__", version)

    found = open_tensorrt(PlanTarget.TRT, find_gpu=find_gpu)

    assert (found.version, found.gpu) == (version, GPU)


def test_rtx_needs_no_gpu() -> None:
    found = open_tensorrt(PlanTarget.TRT_RTX, find_gpu=never_ask)

    assert found.gpu is None
    assert found.version.startswith("1.7.")


def test_auto_takes_trt_where_it_and_a_gpu_are(stand_in: ModuleType) -> None:
    choice = choose_installation(Target.AUTO, find_gpu=find_gpu)

    assert choice.installation is not None
    assert choice.installation.flavor.target is PlanTarget.TRT
    assert choice.skipped == ()


def test_auto_takes_rtx_without_a_gpu_and_says_what_it_skipped(stand_in: ModuleType) -> None:
    choice = choose_installation(Target.AUTO, find_gpu=find_no_gpu)

    assert choice.installation is not None
    assert choice.installation.flavor.target is PlanTarget.TRT_RTX
    (skipped,) = choice.skipped
    assert "target trt builds plans on the GPU they are for" in skipped


def test_auto_notes_that_rtx_builds_no_plans_for_the_gpu_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _without(monkeypatch, "tensorrt")
    served = replace(GPU, compute_capability="SM89")

    for gpu, num_notes in ((GPU, 1), (served, 0)):
        choice = choose_installation(Target.AUTO, find_gpu=lambda gpu=gpu: gpu)

        assert choice.installation is not None
        assert choice.installation.flavor.target is PlanTarget.TRT_RTX
        assert len(choice.notes) == num_notes
        for note in choice.notes:
            assert "builds no plans for this machine's NVIDIA Test, SM90" in note


def test_auto_without_any_tensorrt_names_both_pip_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "tensorrt", "tensorrt_rtx")

    choice = choose_installation(Target.AUTO, find_gpu=never_ask)

    assert choice.installation is None
    assert [line.rpartition("pip install ")[2] for line in choice.skipped] == [
        "'lookahead-attention[trt]'",
        "'lookahead-attention[trt-rtx]'",
    ]


def test_onnx_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "tensorrt", "tensorrt_rtx")

    choice = choose_installation(Target.ONNX, find_gpu=never_ask)

    assert (choice.installation, choice.skipped) == (None, ())


def test_plans_load_neither_pytorch_nor_onnx() -> None:
    program = (
        "import sys; import la_export.plan, la_export.cli.plan, la_export.cli.plan_lines\n"
        "heavy = {'torch', 'transformers', 'onnx', 'rich', 'tensorrt', 'tensorrt_rtx'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"
