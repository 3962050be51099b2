"""Builds a bundle from a model, stage by stage.

Knows the order of the stages and nothing of how any of them works.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from pydantic import TypeAdapter

from la_export.byte_progress import MeteredReader
from la_export.checkpoint import (
    Checkpoint,
    find_known_model,
    find_model,
    load_checkpoint,
    name_place,
)
from la_export.checkpoint.facts import (
    build_disk_bytes,
    check_input_features,
    check_no_experts,
    count_operators,
    count_parameters,
    make_contract,
    make_model_facts,
)
from la_export.checkpoint.rotary import is_length_dependent
from la_export.checkpoint.tokenizer_files import TokenizerFiles, read_tokenizer
from la_export.estimate import build_host_bytes, make_shape, weight_bytes
from la_export.graph.check import check_graph_file
from la_export.graph.export import optimize_graph, trace_model
from la_export.graph.packed_weights import add_packed_weights
from la_export.graph.parity import check_parity
from la_export.graph.step_graph import OPSET_VERSIONS, StepGraph
from la_export.graph.stored_integers import StoredIntegers
from la_export.graph.stored_weights import check_weights
from la_export.graph.tokens_only import write_tokens_only
from la_export.graph.variants import check_variants, write_cpu_variant
from la_export.graph.weights import SmoothedReader, write_graph
from la_export.host import available_memory_bytes
from la_export.journal import Journal, is_journal_of, make_key
from la_export.lookahead import LookaheadWeights, write_lookaheads
from la_export.lookahead_choice import choose_lookaheads, make_untuned
from la_export.options import SHIPPED, UNTUNED, BuildOptions, Precision
from la_export.plan import (
    PlanOptions,
    PlanSharing,
    PlanSource,
    PlansReport,
    Target,
    build_plans,
    check_plan_options,
)
from la_export.plan.namespace import Installation
from la_export.quantize.calibration import calibrate
from la_export.quantize.integers import BLOCK_SIZE
from la_export.quantize.smoothing import NO_SMOOTHING, Smoothing
from la_export.quantize.smoothing_file import SMOOTHING_PATH, read_smoothing, write_smoothing
from la_export.recipe import Recipe, make_recipe
from la_export.reference import TorchReference
from la_export.stages import Clock, Progress, SilentProgress, Stage, StageReport
from la_export.streamed_model import HeldWeights, stream_weights
from la_export.torch_threads import torch_threads
from la_runtime.bundle import (
    GRAPH_PATH,
    LOOKAHEAD_PATH,
    SCHEMA_VERSION,
    CheckResult,
    GraphVariant,
    LookaheadFacts,
    Manifest,
    ModelFacts,
    abandoned_bytes,
    check_destination,
    seal_bundle,
    write_bundle,
)
from la_runtime.contract import Contract
from la_runtime.errors import HostError, PlanError, UsageError
from la_runtime.plans import PLANS_FOLDER, PlanFacts

__all__ = [
    "NO_PLANS",
    "BuildOptions",
    "BuildReport",
    "Progress",
    "SilentProgress",
    "Stage",
    "StageReport",
    "build",
]

_VARIANTS: Final = TypeAdapter(tuple[GraphVariant, ...])
_CHECKS: Final = TypeAdapter(tuple[CheckResult, ...])
_PLANS: Final = TypeAdapter(PlansReport)
NO_PLANS: Final = PlanOptions(target=Target.ONNX)
_ENGINES: Final = Path("engines")
_TOOLS: Final = (
    "lookahead-attention",
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "onnx-ir",
    "onnxruntime",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """What was built.

    Args:
        bundle: the bundle's folder.
        manifest: as written.
        stages: time and memory of each stage.
        plans: those that were built, and the builders that could not be used.
        seconds: wall time of the whole build, putting the bundle into its place included.
    """

    bundle: Path
    manifest: Manifest
    stages: tuple[StageReport, ...]
    plans: PlansReport
    seconds: float

    @property
    def peak_rss_bytes(self) -> int:
        """Peak resident memory of the whole build."""
        return max(report.peak_rss_bytes for report in self.stages)


def build(
    options: BuildOptions,
    progress: Progress | None = None,
    *,
    plans: PlanOptions = NO_PLANS,
) -> BuildReport:
    """Build a bundle; nothing is left behind unless every check passes.

    A process that is killed leaves a hidden working folder beside the bundle's: the same build goes
    on from it, any other build of that bundle removes it.

    Args:
        options: what to build.
        progress: is told of each stage.
        plans: the TensorRT plans to build as well.

    Raises:
        LookaheadError: the model, the options or the machine do not allow it, or a check failed.
    """
    clock = Clock(progress or SilentProgress(), began=time.perf_counter())
    plans = _check_target(options, plans, clock.progress)
    with torch_threads(options.threads):
        return _build(options, plans, clock)


def _check_target(options: BuildOptions, plans: PlanOptions, progress: Progress) -> PlanOptions:
    """TensorRT's importer knows no product of integers, so nothing is tried in vain."""
    if not options.precision.is_integer or plans.target is Target.ONNX:
        return plans
    if plans.target is not Target.AUTO:
        raise UsageError(
            f"--target {plans.target} has no plans in --precision {options.precision}: TensorRT "
            "multiplies no integers; use --target onnx, or another --precision"
        )
    progress.note(f"no plans: TensorRT multiplies no integers, as --precision {options.precision}")
    return NO_PLANS


def _build(options: BuildOptions, plans: PlanOptions, clock: Clock) -> BuildReport:
    with clock.stage(Stage.RESOLVE):
        inputs = _resolve(options, plans, clock.progress)
    key = _make_key(options, plans, inputs)
    with write_bundle(inputs.destination, adopts=partial(is_journal_of, key=key)) as work:
        journal = Journal(work, key)
        if journal.done:
            done = ", ".join(journal.done)
            clock.progress.note(f"goes on from a build that was cut off; it had done: {done}")
        variants, smoothing = _write_graphs(work, options, inputs, journal, clock)
        with clock.stage(Stage.TOKENIZER):
            inputs.tokenizer.write(work)
        checks = journal.once(
            Stage.CHECK, _CHECKS, lambda: _check(work, variants, inputs, options, smoothing, clock)
        )
        built = journal.once(
            Stage.PLANS, _PLANS, lambda: _build_plans(work, options, plans, inputs, clock)
        )
        with clock.stage(Stage.SEAL):
            recipe = _make_recipe(options, plans, inputs, built)
            manifest = _make_manifest(
                options, inputs, recipe, variants=variants, plans=built.facts, checks=checks
            )
            manifest = seal_bundle(work, manifest, leaving_out=[journal.folder])
            journal.remove()
    return BuildReport(
        bundle=inputs.destination,
        manifest=manifest,
        stages=tuple(clock.reports),
        plans=built,
        seconds=time.perf_counter() - clock.began,
    )


def _write_graphs(
    work: Path, options: BuildOptions, inputs: _Inputs, journal: Journal, clock: Clock
) -> tuple[tuple[GraphVariant, ...], Smoothing]:
    """The graphs, their weights and the lookaheads."""
    (work / GRAPH_PATH).parent.mkdir(exist_ok=True)
    if journal.is_done(Stage.WEIGHTS):
        return journal.recall(Stage.WEIGHTS, _VARIANTS), _read_smoothing(work, options)
    step_graph = _trace(inputs, journal, clock)
    smoothing = _calibrate(work, options, inputs, journal, clock)
    adapter = inputs.lookaheads.adapter
    with clock.stage(Stage.OPTIMIZE):
        optimize_graph(step_graph, options.precision, smoothing.rotation, adapter)
    with clock.stage(Stage.WEIGHTS):
        reader = SmoothedReader(
            source=inputs.checkpoint, smoothing=smoothing, adapter=smoothing.adapt(adapter)
        )
        folder = (work / GRAPH_PATH).parent
        graph_path = write_graph(step_graph, reader, folder, report=clock.progress.advance_bytes)
        variant = write_cpu_variant(graph_path, inputs.contract, options.precision)
        variants: tuple[GraphVariant, ...] = () if variant is None else (variant,)
        if options.packed and variant is not None:
            add_packed_weights(work / variant.path)
            if adapter.pairs and variant.cache_form is not None:
                variants = (variant, write_tokens_only(work, variant))
        write_lookaheads(work / LOOKAHEAD_PATH, inputs.lookaheads)
        journal.write(Stage.WEIGHTS, variants, _VARIANTS)
    return variants, smoothing


def _trace(inputs: _Inputs, journal: Journal, clock: Clock) -> StepGraph:
    """Read back in any case, so that names that passes make are the same in both."""
    if not journal.is_done(Stage.TRACE):
        with clock.stage(Stage.TRACE):
            traced = trace_model(
                inputs.checkpoint.traced_config, inputs.contract, context=inputs.checkpoint.context
            )
            journal.write_trace(traced)
    return journal.read_trace(inputs.contract)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What is known before the long work begins."""

    destination: Path
    checkpoint: Checkpoint
    contract: Contract
    tokenizer: TokenizerFiles
    model_facts: ModelFacts
    lookaheads: LookaheadWeights
    builder: Installation | None


def _resolve(options: BuildOptions, plans: PlanOptions, progress: Progress) -> _Inputs:
    """Find the model and refuse whatever can be refused without tracing."""
    builder = check_plan_options(plans).installation
    if options.out is not None:
        check_destination(options.out)
    known = find_known_model(options.model)
    if known is not None:
        progress.note(f"{known.name}: {known.note}")
    source = find_model(options.model, revision=options.revision, allow_bin=options.allow_bin)
    name = source.name if options.lora is None else f"{source.name}-{options.lora.resolve().name}"
    destination = options.out or _ENGINES / name
    check_destination(destination)
    checkpoint = load_checkpoint(source, context=options.context, lora=options.lora)
    if is_length_dependent(checkpoint.config):
        progress.note(
            "its rotary frequencies depend on the length of the text: the bundle has those of "
            f"{checkpoint.context} tokens, from the first token on; --context chooses others"
        )
    if options.precision.is_integer:
        check_no_experts(checkpoint, precision=options.precision)
    if options.precision is Precision.INT4:
        check_input_features(checkpoint, block_size=BLOCK_SIZE, precision=options.precision)
    contract = make_contract(
        checkpoint,
        options.k_max,
        dtype=options.precision.dtype,
        cache_form=options.cache_form,
        prefill_chunk=options.prefill_chunk,
    )
    num_parameters = count_parameters(checkpoint)
    shape = make_shape(checkpoint.traced_config, name=source.name, context=checkpoint.context)
    weights = weight_bytes(shape, options.precision) * (2 if options.packed else 1)
    num_plans = 0 if builder is None else _count_plans(options, plans)
    _check_free_space(destination, build_disk_bytes(weights, num_plans=num_plans))
    needed = build_host_bytes(
        shape,
        options.precision,
        is_streamed=checkpoint.is_large,
        has_plans=builder is not None,
    )
    _check_memory(source.name, needed)
    tokenizer = read_tokenizer(checkpoint)
    facts = make_model_facts(
        checkpoint, num_parameters=num_parameters, eos_token_ids=tokenizer.eos_token_ids
    )
    return _Inputs(
        destination=destination,
        checkpoint=checkpoint,
        contract=contract,
        tokenizer=tokenizer,
        model_facts=facts,
        lookaheads=_choose_lookaheads(options, checkpoint, contract, facts.source_digest),
        builder=builder,
    )


def _choose_lookaheads(
    options: BuildOptions, checkpoint: Checkpoint, contract: Contract, digest: str
) -> LookaheadWeights:
    tuned = choose_lookaheads(
        options.lookahead, contract, model_digest=digest, shapes=checkpoint.shapes()
    )
    if tuned is not None:
        return tuned
    return make_untuned(checkpoint.embeddings(), contract.k_max, model_digest=digest)


def _calibrate(
    work: Path, options: BuildOptions, inputs: _Inputs, journal: Journal, clock: Clock
) -> Smoothing:
    """Nothing, in precisions that quantize no activation."""
    if not options.is_smoothed or journal.is_done(Stage.CALIBRATE):
        return _read_smoothing(work, options)
    with clock.stage(Stage.CALIBRATE):
        checkpoint = inputs.checkpoint
        if checkpoint.is_large:
            model = checkpoint.make_skeleton()
            read = _meter(inputs, clock, num_readings=1)
            held = HeldWeights.of_model(
                model, read, smoothing=NO_SMOOTHING, precision=Precision.FP32
            )
            stream_weights(model, held)
            smoothing = calibrate(model, checkpoint.read)
        else:
            smoothing = calibrate(checkpoint.load_model())
        write_smoothing(work / SMOOTHING_PATH, smoothing)
        journal.write(Stage.CALIBRATE)
    return smoothing


def _read_smoothing(work: Path, options: BuildOptions) -> Smoothing:
    return read_smoothing(work / SMOOTHING_PATH) if options.is_smoothed else NO_SMOOTHING


def _meter(inputs: _Inputs, clock: Clock, *, num_readings: int) -> MeteredReader:
    """Reads the checkpoint and tells how far it is, over so many readings of everything."""
    whole = inputs.model_facts.num_parameters * np.dtype(np.float32).itemsize
    return MeteredReader(
        source=inputs.checkpoint.read,
        report=clock.progress.advance_bytes,
        total=num_readings * whole,
    )


def _name_lookaheads(options: BuildOptions, lookaheads: LookaheadWeights) -> str | None:
    """As a recipe names them: none of its keys is a path of this machine."""
    if lookaheads.origin == UNTUNED:
        return UNTUNED
    return SHIPPED if options.lookahead in (None, SHIPPED) else None


def _check(
    work: Path,
    variants: tuple[GraphVariant, ...],
    inputs: _Inputs,
    options: BuildOptions,
    smoothing: Smoothing,
    clock: Clock,
) -> tuple[CheckResult, ...]:
    """The file against the contract first: it is cheap and names its faults best."""
    checkpoint, contract = inputs.checkpoint, inputs.contract
    graph_path, context = work / GRAPH_PATH, checkpoint.context
    threads = options.threads or torch.get_num_threads()
    with clock.stage(Stage.CHECK):
        checks = [check_graph_file(graph_path, contract, count_operators(checkpoint))]
        # The weights themselves, a pass, and in integers one with activations as they are.
        meter = _meter(inputs, clock, num_readings=3 if options.precision.is_integer else 2)
        reference = TorchReference(
            checkpoint.make_skeleton() if checkpoint.is_large else checkpoint.load_model(),
            precision=options.precision,
            smoothing=smoothing,
            adapter=inputs.lookaheads.adapter,
            read=meter if checkpoint.is_large else None,
        )
        checks.append(check_weights(graph_path, reference))
        stored = StoredIntegers(graph_path, checkpoint.shapes(), report=meter.add)
        reference.take_integers(stored.read)
        checks += check_parity(graph_path, contract, reference, context=context, threads=threads)
        checks += check_variants(
            graph_path,
            [(work / variant.path, variant) for variant in variants],
            reference,
            contract=contract,
            context=context,
            threads=threads,
        )
    return tuple(checks)


def _build_plans(
    work: Path, options: BuildOptions, plans: PlanOptions, inputs: _Inputs, clock: Clock
) -> PlansReport:
    """The plans that are asked for, from the graph that has passed its checks.

    With `Target.AUTO` a TensorRT that refuses the graph is skipped like one that is not there.
    """
    if plans.target is Target.ONNX:
        return PlansReport(plans=(), skipped=())
    source = PlanSource(
        graph=GRAPH_PATH,
        contract=inputs.contract,
        context=inputs.checkpoint.context,
        lookahead_lengths=options.sorted_lengths,
    )
    with clock.stage(Stage.PLANS):
        try:
            return build_plans(work, source, plans, progress=clock.progress)
        except PlanError as error:
            if plans.target is not Target.AUTO:
                raise
            shutil.rmtree(work / PLANS_FOLDER, ignore_errors=True)
            return PlansReport(plans=(), skipped=(str(error),))


def _make_recipe(
    options: BuildOptions, plans: PlanOptions, inputs: _Inputs, built: PlansReport
) -> Recipe:
    return make_recipe(
        options,
        plans,
        place=name_place(inputs.model_facts.source, inputs.model_facts.revision),
        context=inputs.checkpoint.context,
        target=Target(built.facts[0].target) if built.facts else Target.ONNX,
        lookahead=_name_lookaheads(options, inputs.lookaheads),
    )


def _make_key(options: BuildOptions, plans: PlanOptions, inputs: _Inputs) -> str:
    """Of everything that decides what is written, and of who writes it."""
    lookaheads, builder = inputs.lookaheads, inputs.builder
    arrays = [lookaheads.vectors, *(array for _, array in lookaheads.adapter.parameters())]
    return make_key(
        {
            "model": inputs.model_facts.model_dump(mode="json"),
            "configuration": inputs.checkpoint.config.to_json_string(use_diff=False),
            "contract": repr(inputs.contract),
            "tokenizer": {
                name: hashlib.sha256(content).hexdigest()
                for name, content in inputs.tokenizer.contents.items()
            },
            "options": repr(replace(options, model="any", out=None, threads=None)),
            "plans": repr(plans),
            "builder": None if builder is None else [builder.title, repr(builder.gpu)],
            "lookaheads": [
                lookaheads.origin,
                lookaheads.group_mask.value,
                *(hashlib.sha256(array.tobytes()).hexdigest() for array in arrays),
            ],
            "tools": _tool_versions(inputs.contract),
        }
    )


def _make_manifest(
    options: BuildOptions,
    inputs: _Inputs,
    recipe: Recipe,
    *,
    variants: tuple[GraphVariant, ...],
    plans: tuple[PlanFacts, ...],
    checks: tuple[CheckResult, ...],
) -> Manifest:
    """Everything but the files, whose digests sealing adds."""
    return Manifest(
        schema_version=SCHEMA_VERSION,
        contract=inputs.contract,
        model=inputs.model_facts,
        precision=options.precision.value,
        lookahead_lengths=options.sorted_lengths,
        graph=GRAPH_PATH,
        variants=variants,
        plans=plans,
        lookahead=LookaheadFacts(
            path=LOOKAHEAD_PATH,
            origin=inputs.lookaheads.origin,
            group_mask=inputs.lookaheads.group_mask,
            num_adapter_weights=inputs.lookaheads.adapter.num_weights or None,
        ),
        recipe=recipe,
        built_with=_tool_versions(inputs.contract),
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        checks=checks,
        files={},
    )


def _tool_versions(contract: Contract) -> dict[str, str]:
    versions = {"opset": str(OPSET_VERSIONS[contract.cache_form])}
    for name in _TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _count_plans(options: BuildOptions, plans: PlanOptions) -> int:
    """Plans that hold the weights once more."""
    if plans.is_stripped:
        return 0
    if plans.sharing is PlanSharing.SHARED:
        return 1
    return len(set(plans.lookahead_lengths or options.lookahead_lengths))


def _check_memory(name: str, needed: int) -> None:
    """Refuse early what the kernel would end in the middle; where it does not say, go on."""
    try:
        available = available_memory_bytes()
    except HostError:
        return
    if available < needed:
        raise HostError(
            f"not enough memory to build {name}: about {needed / 1e9:.1f} GB are needed, "
            f"{available / 1e9:.1f} GB are free; end other programs or build on a larger machine"
        )


def _check_free_space(destination: Path, needed: int) -> None:
    """Refuse early when the bundle plainly cannot fit."""
    folder = next(parent for parent in destination.absolute().parents if parent.is_dir())
    # What a killed build has written is gone on with, or removed.
    free = shutil.disk_usage(folder).free + abandoned_bytes(destination)
    if free < needed:
        raise HostError(
            f"not enough disk space for {destination}: about {needed / 1e9:.1f} GB are needed, "
            f"{free / 1e9:.1f} GB are free; free some or choose another --out"
        )
