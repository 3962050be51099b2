"""Compiles one plan: the lines that TensorRT and TensorRT for RTX share.

Knows profiles, switches and files, not what a bundle is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from la_export.plan import api
from la_export.plan.layers import count_layers
from la_export.plan.log import BuildLog, make_log
from la_export.plan.namespace import Installation
from la_export.plan.network import check_network, let_attention_decompose, read_graph
from la_export.plan.options import PlanOptions
from la_export.plan.problems import describe_build_errors
from la_export.plan.profiles import check_profile
from la_export.plan.progress import PlanProgress, catch_interrupt, make_monitor
from la_export.plan.report import Compiled
from la_export.plan.timing_cache import TimingCacheFile, default_timing_folder
from la_runtime.contract import Contract, Dtype
from la_runtime.errors import HostError, PlanError, UsageError
from la_runtime.plans import HardwareCompatibility, PlanProfile

__all__ = ["PlanBuilder"]


class PlanBuilder:
    """Compiles plans of one graph with one TensorRT.

    Args:
        installation: the TensorRT, checked to be usable here.
        graph: the graph's file, weights beside it.
        contract: of the graph.
        context: positions of the model.
        options: how plans are built; checked to suit the TensorRT.
        progress: is told how far a build has come.
    """

    def __init__(
        self,
        installation: Installation,
        graph: Path,
        contract: Contract,
        *,
        context: int,
        options: PlanOptions,
        progress: PlanProgress,
    ) -> None:
        self._installation = installation
        self._trt = installation.trt
        self._graph = graph
        self._contract = contract
        self._context = context
        self._options = options
        self._progress = progress

    def compile(self, profiles: Sequence[PlanProfile], path: Path) -> Compiled:
        """Compile a plan into a file.

        Args:
            profiles: at least one, in the order of their index.
            path: where to write; it is complete or not there.

        Raises:
            UsageError: a profile contradicts itself, or there is no such GPU to build for.
            PlanError: TensorRT refuses the graph or cannot build it.
            HostError: TensorRT does not start, or the file cannot be written.
            KeyboardInterrupt: Ctrl-C; the build has stopped and nothing was written.
        """
        for profile in profiles:
            check_profile(profile, self._contract, context=self._context)
        began = time.perf_counter()
        log = make_log(self._trt)
        timings = self._timing_cache()
        # Around all of it: whatever logs calls back.
        with catch_interrupt() as interruption:
            builder = self._start_builder(log)
            parsed = read_graph(self._installation, builder, self._graph, log=log)
            check_network(self._trt, parsed.network, self._contract)
            num_attentions = let_attention_decompose(self._trt, parsed.network)
            config = self._make_config(builder, profiles, log)
            config.progress_monitor = make_monitor(self._trt, self._progress, interruption)
            if timings is not None:
                timings.attach(config)
            log.take_errors()  # what has come so far did not matter
            plan = builder.build_serialized_network(parsed.network, config)
            config.progress_monitor = None
        if plan is None:
            raise PlanError(
                f"no plan of {self._graph.name}: {self._installation.title} cannot build it: "
                f"{describe_build_errors(log.take_errors())}; try other sizes or another "
                "precision, or use --target onnx"
            )
        if timings is not None:
            timings.keep(config)
        _write(plan, path)
        return Compiled(
            bytes=plan.nbytes,
            seconds=time.perf_counter() - began,
            num_attentions=num_attentions,
            layers=None
            if log.layers is None
            else count_layers(log.layers, num_profiles=len(profiles)),
        )

    def _start_builder(self, log: BuildLog) -> api.Builder:
        try:
            return self._trt.Builder(log)
        except TypeError as error:  # how the binding says that there is none
            raise HostError(
                f"{self._installation.title} does not start: "
                f"{describe_build_errors(log.take_errors())}; check that 'nvidia-smi' works and "
                "that the driver is new enough for it"
            ) from error

    def _make_config(
        self, builder: api.Builder, profiles: Sequence[PlanProfile], log: BuildLog
    ) -> api.IBuilderConfig:
        trt, options = self._trt, self._options
        config = builder.create_builder_config()
        for profile in profiles:
            self._add_profile(builder, config, profile, log)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if self._contract.compute_dtype is Dtype.FLOAT32:
            config.clear_flag(trt.BuilderFlag.TF32)  # float32 is meant
        if options.workspace_bytes is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
        if options.optimization_level is not None:
            config.builder_optimization_level = options.optimization_level
        if options.is_version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if options.is_stripped:
            config.set_flag(trt.BuilderFlag.STRIP_PLAN)
            config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
        if options.hardware_compatibility is not HardwareCompatibility.NONE:
            config.hardware_compatibility_level = self._hardware_compatibility_level()
        if options.compute_capabilities:
            self._set_compute_capabilities(cast(api.RtxBuilderConfig, config))
        return config

    def _add_profile(
        self,
        builder: api.Builder,
        config: api.IBuilderConfig,
        profile: PlanProfile,
        log: BuildLog,
    ) -> None:
        made = builder.create_optimization_profile()
        for spec in self._contract.inputs:
            made.set_shape(str(spec.name), *profile.shape_of(spec.axes))
        if config.add_optimization_profile(made) < 0:
            raise PlanError(
                f"profile {profile.name!r} for k = {profile.k} is refused by "
                f"{self._installation.title}: {describe_build_errors(log.take_errors())}; build "
                "with other sizes"
            )

    def _hardware_compatibility_level(self) -> object:
        levels = self._trt.HardwareCompatibilityLevel
        return {
            HardwareCompatibility.NONE: levels.NONE,
            HardwareCompatibility.AMPERE_PLUS: levels.AMPERE_PLUS,
            HardwareCompatibility.SAME_COMPUTE_CAPABILITY: levels.SAME_COMPUTE_CAPABILITY,
        }[self._options.hardware_compatibility]

    def _set_compute_capabilities(self, config: api.RtxBuilderConfig) -> None:
        known = {
            name: value
            for name, value in self._trt.ComputeCapability.__members__.items()
            if name.startswith("SM")
        }
        wanted = self._options.compute_capabilities
        for name in wanted:
            if name not in known:
                raise UsageError(
                    f"--compute-capability {name} is not one that {self._installation.title} "
                    f"builds for; expected some of: {', '.join(known)}"
                )
        config.num_compute_capabilities = len(wanted)
        for index, name in enumerate(wanted):
            config.set_compute_capability(known[name], index)

    def _timing_cache(self) -> TimingCacheFile | None:
        installation = self._installation
        if not installation.flavor.has_timing_cache or installation.gpu is None:
            return None
        return TimingCacheFile(
            self._options.timing_cache or default_timing_folder(),
            version=installation.version,
            gpu=installation.gpu,
        )


def _write(plan: api.IHostMemory, path: Path) -> None:
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as stream:
            stream.write(memoryview(plan).cast("B"))
        os.replace(partial, path)
    except OSError as error:
        raise HostError(
            f"could not write the plan {path.name}: {error.strerror or error}; free some space"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
