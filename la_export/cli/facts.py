"""A bundle's manifest as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from la_export.cli.console import format_bytes
from la_runtime.bundle import Manifest, PerplexityFacts
from la_runtime.certificate import describe_voidness
from la_runtime.contract import TensorSpec
from la_runtime.plans import PlanProfile
from la_runtime.step_times import StepTimes

__all__ = ["perplexity_table", "print_manifest"]


def print_manifest(manifest: Manifest, console: Console) -> None:
    """Print model facts, contract tensors, checks, plans, files and the tools that made them."""
    facts = Table("fact", "value")
    for name, value in _facts(manifest):
        facts.add_row(name, value)
    console.print(facts)
    tensors = Table("tensor", "axes", "dtype", "")
    for side, specs in (("in", manifest.contract.inputs), ("out", manifest.contract.outputs)):
        for spec in specs:
            tensors.add_row(spec.name, _axes(spec), spec.dtype.value, side)
    console.print(tensors)
    checks = Table("check", "measured", "allowed", "")
    for check in manifest.checks:
        checks.add_row(check.name, f"{check.value:.2g}", f"{check.bound:.2g}", check.detail)
    console.print(checks)
    if manifest.plans:
        console.print(_plans(manifest))
    if manifest.certificates:
        console.print(_certificates(manifest))
    if manifest.perplexity is not None:
        console.print(perplexity_table(manifest.perplexity))
    for measured in manifest.step_times:
        console.print(_step_times(measured))
    files = Table("file", "size", "sha256")
    for name, entry in manifest.files.items():
        files.add_row(name, format_bytes(entry.bytes), entry.sha256)
    console.print(files)
    tools = Table("built with", "version")
    for name, version in manifest.built_with.items():
        tools.add_row(name, version)
    console.print(tools)


def perplexity_table(facts: PerplexityFacts) -> Table:
    """Perplexity of each kind of text beside the source's."""
    source = facts.source or "not at hand"
    title = f"perplexity on {facts.backend}, {facts.utc}; source: {source}"
    table = Table("text", "tokens", "perplexity", "source's", "ratio", title=title)
    for row in (*facts.texts, facts.overall):
        has_source = row.source_perplexity is not None and row.ratio is not None
        table.add_row(
            row.text,
            f"{row.num_tokens:,}",
            f"{row.perplexity:.4f}",
            f"{row.source_perplexity:.4f}" if has_source else "",
            f"{row.ratio:.5f}" if has_source else "",
        )
    return table


def _step_times(measured: StepTimes) -> Table:
    """L(T), and how much longer than a step of one row it is."""
    table = Table(
        *("rows", "ms", "over one row", "quartiles, ms", "samples"),
        title=f"L(T) behind {measured.past} tokens on {measured.backend} "
        f"{measured.backend_version}, {measured.threads} threads of {measured.processor}, "
        f"{measured.utc}",
    )
    first = measured.times[0]
    for time in measured.times:
        table.add_row(
            str(time.rows),
            f"{time.median_ms:.2f}",
            f"{time.median_ms / first.median_ms:.2f}" if first.rows == 1 else "",
            f"{time.low_ms:.2f} to {time.high_ms:.2f}",
            str(time.samples),
        )
    return table


def _plans(manifest: Manifest) -> Table:
    """Which TensorRT and which GPUs each plan is for, and the passes it takes."""
    table = Table("plan", "k", "TensorRT", "GPUs", "driver", "profiles", "also loads on", "")
    for plan in manifest.plans:
        current = manifest.files[manifest.graph].sha256
        notes = (
            ("stripped of its weights", plan.is_stripped),
            ("in later versions of TensorRT", plan.is_version_compatible),
            ("of another graph than the bundle's: build it again", plan.graph_sha256 != current),
        )
        table.add_row(
            plan.path,
            ", ".join(map(str, plan.lookahead_lengths)),
            f"{plan.target} {plan.version}",
            ", ".join(plan.compute_capabilities),
            plan.driver or "none",
            "\n".join(_describe_profile(profile) for profile in plan.profiles),
            plan.hardware_compatibility.value,
            ", ".join(note for note, holds in notes if holds),
        )
    return table


def _describe_profile(profile: PlanProfile) -> str:
    """Its name, and its ranges as least to most."""
    spans = (f"{axis} {span.least}..{span.most}" for axis, span in profile.axes.items())
    return f"{profile.name} k={profile.k}: {', '.join(spans)}"


def _certificates(manifest: Manifest) -> Table:
    """What was verified, where, and how; whether it still holds; skipped rungs are named."""
    table = Table(
        *("verified", "holds", "against", "backend", "processor", "threads", "epsilon", "k"),
        "rungs",
    )
    for entry in manifest.certificates:
        skipped = [name for name, status in entry.rungs.items() if status != "passed"]
        rungs = f"{len(entry.rungs) - len(skipped)} passed"
        void = describe_voidness(manifest, entry)
        table.add_row(
            entry.utc,
            f"no: {void}" if void else "yes",
            entry.reference,
            f"{entry.backend} {entry.backend_version}",
            entry.processor,
            str(entry.threads or "default"),
            f"{entry.epsilon:.2g}",
            ", ".join(map(str, entry.lookahead_lengths)),
            f"{rungs}, not: {', '.join(skipped)}" if skipped else rungs,
        )
    return table


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    model, contract = manifest.model, manifest.contract
    yield "model", model.name
    yield "family", model.family
    yield "source", f"{model.source} @ {model.revision}"
    yield "source quantization", model.source_quantization
    yield "source digest", model.source_digest
    yield "parameters", f"{model.num_parameters:,}"
    yield "layers", str(contract.num_layers)
    yield "heads", f"{model.num_attention_heads}, key/value {contract.num_kv_heads}"
    yield "head / hidden size", f"{contract.head_dim} / {contract.hidden_size}"
    yield "vocabulary", str(contract.vocab_size)
    yield "context", str(model.context)
    yield "rotary embedding", f"{model.rope.kind}, theta {model.rope.theta:g}"
    yield "sliding window", str(model.sliding_window or "none")
    if model.merged_adapter is not None:
        yield "merged adapter", model.merged_adapter
    yield "tied embeddings", "yes" if model.tied_embeddings else "no"
    yield "end tokens", ", ".join(str(token) for token in model.eos_token_ids) or "none"
    yield "precision", manifest.precision
    yield "lookahead lengths", ", ".join(str(k) for k in manifest.lookahead_lengths)
    yield (
        "lookahead vectors",
        f"{manifest.lookahead.origin}, {manifest.lookahead.group_mask.value} group mask",
    )
    yield "extra weights", _describe_extra(manifest)
    places = "" if contract.capacity is None else f" of {contract.capacity} places"
    yield "contract", f"version {contract.version}, {contract.cache_form.value} cache{places}"
    yield "built", manifest.created_utc


def _describe_extra(manifest: Manifest) -> str:
    """What lookaheads add to the model: the paper promises nothing."""
    contract = manifest.contract
    vectors = contract.k_max * contract.hidden_size
    adapter = manifest.lookahead.num_adapter_weights or 0
    share = (vectors + adapter) / max(1, manifest.model.num_parameters)
    return f"{vectors:,} of vectors, {adapter:,} of an adapter ({share:.2%} of the model's)"


def _axes(spec: TensorSpec) -> str:
    return ", ".join(str(axis) for axis in spec.axes)
