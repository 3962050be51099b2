"""Which steps a check has: for each model and precision build, then plan, verify and time.

Knows the commands and what each needs of the machine. It runs nothing itself.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from la_export.bench.gpu.children import RunChild
from la_export.bench.gpu.machine import (
    DOCTOR,
    INSTALL,
    explain_misfit,
    explain_missing,
    explain_no_gpu,
    explain_unlisted_gpu,
    find_finding,
    list_missing_packages,
)
from la_export.bench.gpu.shapes import SHAPES
from la_export.bench.gpu.steps import Progress, Step, StepError
from la_export.doctor.diagnosis import Section, Verdict
from la_runtime.errors import ExitCode

__all__ = ["CPU_BACKEND", "Check", "Model", "make_steps"]

CPU_BACKEND: Final = "ort-cpu"
_PLAN_TARGETS: Final = ("trt", "trt-rtx")
_BANDWIDTH: Final = "bandwidth"
_ROUNDS: Final = 3
# Of a limit: what is kept for asking doctor again, and for asking for the GPU alone.
_KEPT: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model to check.

    Args:
        name: what steps call it.
        source: what `--model` gets; for a random one, where it is made.
        random: name of the shape it is made of; empty for a model that exists.
        package: that its weights come in; empty when they come in none.
        is_large: whether it is one of billions of parameters: its plans share their weights, and
            its bundle is removed when it has been timed.
    """

    name: str
    source: str
    random: str = ""
    package: str = ""
    is_large: bool = False

    @property
    def shape(self) -> str:
        """Name of the shape it may be one of `SHAPES`."""
        return self.random or self.name

    @property
    def effort(self) -> float:
        """How much longer than with the small one a step takes."""
        return 8.0 if self.is_large else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What is checked.

    Args:
        models: in order.
        precisions: of the builds.
        lengths: values of k.
        backends: to check.
        work: folder for bundles and random checkpoints.
        wheels: folder that packages are installed from; None for pip's own index.
        is_offline: whether pip may ask no index.
        threads: CPU threads of a pass; 0 lets the library choose.
    """

    models: tuple[Model, ...]
    precisions: tuple[str, ...]
    lengths: tuple[int, ...]
    backends: tuple[str, ...]
    work: Path
    wheels: Path | None = None
    is_offline: bool = False
    threads: int = 0

    def bundle(self, model: Model, precision: str) -> Path:
        """Where a model's bundle is built."""
        return self.work / f"{model.name}-{precision}"


def make_steps(
    check: Check, run: RunChild, *, clock: Callable[[], float] = time.monotonic
) -> tuple[Step, ...]:
    """Every step of a check, in order: what is short and says most comes first.

    Args:
        check: what is checked.
        run: runs a command.
        clock: seconds, from anywhere.
    """
    maker = _Maker(check, run, clock)
    return tuple(maker.steps())


class _Maker:
    def __init__(self, check: Check, run: RunChild, clock: Callable[[], float]) -> None:
        self._check = check
        self._run = run
        self._clock = clock

    def steps(self) -> Iterator[Step]:
        check = self._check
        yield Step(name=DOCTOR, usual_s=60, run=self._doctor)
        yield Step(name=INSTALL, usual_s=120, run=self._install, obstacle=self._nothing_missing)
        yield Step(
            name=_BANDWIDTH,
            usual_s=10,
            run=lambda _, limit_s: self._program("bandwidth", self._device, timeout_s=limit_s),
            obstacle=self._no_device,
        )
        # Two models may be of one shape.
        shapes = dict.fromkeys(model.shape for model in check.models if model.shape in SHAPES)
        for shape in shapes:
            for precision in check.precisions:
                yield self._torch_steps(shape, precision)
        for model in check.models:
            if model.random:
                yield self._random_checkpoint(model)
            for precision in check.precisions:
                yield from self._model_steps(model, precision)

    @property
    def _device(self) -> str:
        return "cpu" if set(self._check.backends) <= {CPU_BACKEND} else "cuda"

    def _model_steps(self, model: Model, precision: str) -> Iterator[Step]:
        estimate = f"estimate {model.name} {precision}"
        build = f"build {model.name} {precision}"
        yield Step(
            name=estimate,
            usual_s=15,
            needs=(f"make {model.name}",) if model.random else (),
            run=lambda _, limit_s: self._estimate(model, precision, limit_s),
            obstacle=lambda progress: (
                self._no_device(progress) or explain_missing(progress, model.package)
            ),
        )
        yield Step(
            name=build,
            usual_s=120 * model.effort,
            needs=(estimate,),
            run=lambda _, limit_s: self._build(model, precision, limit_s),
            obstacle=lambda progress: explain_misfit(progress, estimate, "ort-"),
        )
        for backend in self._check.backends:
            where = f"{model.name} {precision} on {backend}"
            needs: tuple[str, ...] = (build,)
            if backend in _PLAN_TARGETS:
                yield Step(
                    name=f"plan {where}",
                    usual_s=90 * model.effort,
                    needs=needs,
                    run=self._plan(model, precision, backend),
                    obstacle=self._cannot_plan(backend, estimate, model),
                )
                needs = (build, f"plan {where}")
            cannot_run = self._cannot(Section.RUNNING, backend, precision)
            yield Step(
                name=f"time {where}",
                usual_s=60 * model.effort,
                needs=needs,
                run=self._time(model, precision, backend),
                obstacle=cannot_run,
            )
            yield Step(
                name=f"verify {where}",
                usual_s=120 * model.effort,
                needs=needs,
                run=self._verify(model, precision, backend),
                obstacle=cannot_run,
            )
        if model.is_large:
            yield Step(
                name=f"remove {model.name} {precision}",
                usual_s=0,
                needs=(build,),
                run=lambda _, __: _remove(self._check.bundle(model, precision)),
            )

    # --- the machine

    def _doctor(self, _: Progress, limit_s: float) -> dict[str, Any]:
        """Where doctor fails, whether there is a GPU is asked alone: PyTorch needs no more."""
        try:
            return self._ask_doctor((1 - _KEPT) * limit_s)
        except StepError as error:
            module = "la_export.doctor.probes.gpu"
            try:
                gpu = self._ask(module, timeout_s=_KEPT * limit_s)["gpu"]
            except StepError:
                gpu = None
            if gpu is None:
                raise
            finding = {
                "section": Section.GPU.value,
                "name": gpu["name"],
                "verdict": Verdict.OK.value,
                "found": gpu["compute_capability"],
            }
            raise StepError(str(error), {"findings": [finding]}) from error

    def _ask_doctor(self, timeout_s: float) -> dict[str, Any]:
        good_codes = (int(ExitCode.DONE), int(ExitCode.ENVIRONMENT))
        return self._export("doctor", timeout_s=timeout_s, good_codes=good_codes)

    def _no_device(self, progress: Progress) -> str:
        """Why nothing can run on the device that is checked."""
        return "" if self._device == "cpu" else explain_no_gpu(progress)

    def _cannot_plan(self, backend: str, estimate: str, model: Model) -> Callable[[Progress], str]:
        target = "trt, one shared plan" if model.is_large else "trt, a plan per k"
        cannot = self._cannot(Section.BUILDING, f"plans for {backend}")
        return lambda progress: (
            cannot(progress)
            or explain_unlisted_gpu(progress, backend)
            or explain_misfit(progress, estimate, target)
        )

    def _cannot(
        self, section: Section, name: str, precision: str = ""
    ) -> Callable[[Progress], str]:
        def obstacle(progress: Progress) -> str:
            if name == CPU_BACKEND and precision == "bf16":
                return "ONNX Runtime has no bf16 arithmetic on CPUs"
            if name != CPU_BACKEND and (reason := explain_no_gpu(progress)):
                return reason
            finding = find_finding(progress, section, name)
            if finding.get("verdict") not in ("ok", "warn"):
                return f"{name}: {finding.get('found') or 'doctor did not say'}"
            # It may work there, but nobody promises.
            return explain_unlisted_gpu(progress, name)

        return obstacle

    # --- packages

    def _nothing_missing(self, progress: Progress) -> str:
        reason = self._no_device(progress)
        if reason:
            return reason
        return "" if list_missing_packages(progress, self._check.backends) else "nothing is missing"

    def _install(self, progress: Progress, limit_s: float) -> dict[str, Any]:
        """Each requirement for itself: one that cannot be had keeps no other away."""
        ends = self._clock() + limit_s
        results = {}
        for requirement in list_missing_packages(progress, self._check.backends):
            try:
                self._install_one(requirement, ends - _KEPT * limit_s)
                results[requirement] = "installed"
            except StepError as error:
                results[requirement] = str(error)
        if "installed" not in results.values():
            raise StepError(f"nothing could be installed: {results}", {"results": results})
        try:
            return {"results": results, **self._ask_doctor(ends - self._clock())}
        except StepError as error:
            raise StepError(f"doctor afterwards: {error}", {"results": results}) from error

    def _install_one(self, requirement: str, ends: float) -> None:
        """Install a package before a time by the clock; each call of pip gets what is left."""

        def run(command: Sequence[str]) -> None:
            left = ends - self._clock()
            if left <= 0:
                raise StepError("no time is left for it")
            self._run(command, timeout_s=left)

        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        install = [*pip, "install"]
        if self._check.wheels is not None:
            install += ["--find-links", str(self._check.wheels)]
        if self._check.wheels is not None or self._check.is_offline:
            install += ["--no-index"]
        if requirement.startswith("onnxruntime-gpu"):
            # Both install the folder onnxruntime, so the one for CPUs has to go, and stays where
            # the other cannot be had.
            run([*install, "--dry-run", requirement])
            run([*pip, "uninstall", "-y", "onnxruntime"])
        run([*install, requirement])

    # --- models

    def _random_checkpoint(self, model: Model) -> Step:
        return Step(
            name=f"make {model.name}",
            usual_s=60 * model.effort,
            run=lambda _, limit_s: self._program(
                *("random_checkpoint", "--config", model.random, "--out", model.source),
                timeout_s=limit_s,
            ),
            obstacle=self._no_device,
        )

    def _estimate(self, model: Model, precision: str, limit_s: float) -> dict[str, Any]:
        report = self._export(
            *("estimate", "--model", model.source, "--precision", precision),
            *self._lengths(),
            *("--out", str(self._check.bundle(model, precision))),
            timeout_s=limit_s,
        )
        return {key: report[key] for key in ("parameters", "warnings") if key in report}

    def _build(self, model: Model, precision: str, limit_s: float) -> dict[str, Any]:
        report = self._export(
            "build",
            *("--model", model.source, "--precision", precision),
            *self._lengths(),
            *("--out", str(self._check.bundle(model, precision)), "--target", "onnx"),
            timeout_s=limit_s,
        )
        return {key: report[key] for key in ("seconds", "peak_rss_bytes") if key in report}

    def _plan(
        self, model: Model, precision: str, backend: str
    ) -> Callable[[Progress, float], dict[str, Any]]:
        def run(_: Progress, limit_s: float) -> dict[str, Any]:
            return self._export(
                *("plan", str(self._check.bundle(model, precision)), "--target", backend),
                *("--plans", "shared" if model.is_large else "per-k"),
                timeout_s=limit_s,
            )

        return run

    def _verify(
        self, model: Model, precision: str, backend: str
    ) -> Callable[[Progress, float], dict[str, Any]]:
        def run(_: Progress, limit_s: float) -> dict[str, Any]:
            try:
                report = self._export(
                    *("verify", str(self._check.bundle(model, precision)), "--backend", backend),
                    *("--model", model.source, "--quick", "--no-certificate"),
                    *("--threads", str(self._check.threads)),
                    timeout_s=limit_s,
                )
            except StepError as error:
                raise StepError(str(error), _verdict(error.found), status=error.status) from error
            return _verdict(report)

        return run

    def _time(
        self, model: Model, precision: str, backend: str
    ) -> Callable[[Progress, float], dict[str, Any]]:
        def run(_: Progress, limit_s: float) -> dict[str, Any]:
            return self._program(
                *("decode", str(self._check.bundle(model, precision)), "--backend", backend),
                *self._lengths(),
                *("--threads", str(self._check.threads), "--rounds", str(_ROUNDS)),
                timeout_s=limit_s,
            )

        return run

    def _torch_steps(self, shape: str, precision: str) -> Step:
        return Step(
            name=f"torch steps {shape} {precision}",
            usual_s=45,
            run=lambda _, limit_s: self._ask(
                *("la_export.bench.torch_steps", "--shape", shape),
                *("--device", self._device, "--precision", precision),
                *self._lengths(),
                timeout_s=limit_s,
            ),
            obstacle=lambda progress: (
                self._no_device(progress) or explain_missing(progress, "torch")
            ),
        )

    # --- commands

    def _lengths(self) -> tuple[str, ...]:
        return tuple(word for k in self._check.lengths for word in ("--k", str(k)))

    def _export(
        self, *arguments: str, timeout_s: float, good_codes: Sequence[int] = (0,)
    ) -> dict[str, Any]:
        words = ("la_export.cli", *arguments, "--json")
        return self._ask(*words, timeout_s=timeout_s, good_codes=good_codes)

    def _program(self, name: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
        return self._ask(f"la_export.bench.gpu.{name}", *arguments, timeout_s=timeout_s)

    def _ask(
        self, module: str, *arguments: str, timeout_s: float, good_codes: Sequence[int] = (0,)
    ) -> dict[str, Any]:
        """Run a module of ours, which prints one object."""
        found = self._run(
            [sys.executable, "-m", module, *arguments], timeout_s=timeout_s, good_codes=good_codes
        )
        if not found:
            raise StepError(f"{module} printed no JSON object")
        return found


def _remove(folder: Path) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    return {}


def _verdict(report: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict, and every rung that did not pass."""
    rungs = [
        {"name": rung["name"], "status": rung["status"], "detail": rung["detail"]}
        for rung in report.get("rungs", ())
        if rung["status"] != "passed"
    ]
    return {
        "verdict": report.get("verdict"),
        "epsilon": report.get("epsilon"),
        "not_passed": rungs,
    }
