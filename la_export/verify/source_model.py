"""The checkpoint a bundle was made from, opened with transformers and PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import jinja2
import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from la_export.adapter import NO_ADAPTER, Adapter, is_of_adapter
from la_export.checkpoint import (
    Checkpoint,
    find_model,
    load_checkpoint,
    name_place,
)
from la_export.checkpoint.facts import count_operators
from la_export.graph.check import check_graph_file
from la_export.graph.passes.names import read_name
from la_export.graph.stored_weights import ExpectedWeights
from la_export.graph.variants import check_variants
from la_export.lookahead import read_lookaheads
from la_export.options import Precision
from la_export.quantize.smoothing import NO_SMOOTHING, Smoothing
from la_export.quantize.smoothing_file import SMOOTHING_PATH, read_smoothing
from la_export.recipe import ALLOW_BIN
from la_export.reference import TorchReference
from la_export.verify.tolerance import parse_precision
from la_runtime.bundle import Bundle, Manifest
from la_runtime.errors import BundleError, CheckpointError, HostError, NotRunError, UsageError

__all__ = ["CheckpointSource", "open_checkpoint", "open_source"]

_USER: Final = "Say something."
_ANSWER: Final = "Something."


class CheckpointSource:
    """A checkpoint as `reference.SourceModel` wants it.

    Args:
        checkpoint: a readable checkpoint.
        threads: for PyTorch and for checks of the graph; 0 leaves the libraries' choice.
        precision: of the bundle.
        smoothing: of its weights.
        adapter: of its lookahead rows.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        threads: int,
        precision: Precision = Precision.FP32,
        smoothing: Smoothing = NO_SMOOTHING,
        adapter: Adapter = NO_ADAPTER,
    ) -> None:
        self._checkpoint = checkpoint
        self._smoothing = smoothing
        self._adapter = adapter
        self._precision = precision
        self._threads = threads
        if threads:
            torch.set_num_threads(threads)

    @cached_property
    def reference(self) -> TorchReference:
        """The model in PyTorch, with weights as the bundle stores them."""
        return TorchReference(
            self._checkpoint.load_model(),
            precision=self._precision,
            smoothing=self._smoothing,
            adapter=self._adapter,
        )

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        source = self._checkpoint.source
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.folder,
            gguf_file=source.gguf_name,
            trust_remote_code=False,
            local_files_only=True,
        )
        return tokenizer

    def end_token_ids(self) -> Mapping[str, tuple[int, ...]]:
        """Those of configuration, generation defaults, tokenizer, and the template's turn end."""
        origins = {
            "configuration": _as_ids(self._checkpoint.config.eos_token_id),
            "generation defaults": self._generation_defaults(),
            "tokenizer": _as_ids(self._tokenizer.eos_token_id),
            "chat template": self._turn_end(),
        }
        return {origin: tokens for origin, tokens in origins.items() if tokens}

    def _generation_defaults(self) -> tuple[int, ...]:
        source = self._checkpoint.source
        if source.gguf_name is not None or not (source.folder / "generation_config.json").is_file():
            return ()
        config = GenerationConfig.from_pretrained(source.folder, local_files_only=True)
        return _as_ids(config.eos_token_id)

    def _turn_end(self) -> tuple[int, ...]:
        """The special token that the template puts behind an assistant's answer, if it does."""
        chat = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}]
        text = self.render(chat, add_generation_prompt=False)
        if text is None or _ANSWER not in text:
            return ()
        behind = self.encode(text.rpartition(_ANSWER)[2].strip(), add_special_tokens=False)
        special = set(self._tokenizer.all_special_ids) | {
            token_id
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
            if token.special
        }
        return (behind[0],) if behind and behind[0] in special else ()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See `SourceModel.encode`."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `SourceModel.decode`."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        assert isinstance(text, str), "one sequence gives one text"
        return text

    def vocabulary(self) -> Mapping[str, int]:
        """See `SourceModel.vocabulary`."""
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    def template_text(self) -> str | None:
        """See `SourceModel.template_text`."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str | None:
        """See `SourceModel.render`; None also for a chat that the template refuses."""
        if not self._tokenizer.chat_template:
            return None
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                )
            )
        except jinja2.TemplateError:
            return None

    def check_graphs(self, bundle: Bundle) -> str:
        """The portable graph against the contract; variants against it or, lean, like it."""
        manifest = bundle.manifest
        path = bundle.path(manifest.graph)
        found = check_graph_file(path, manifest.contract, count_operators(self._checkpoint))
        results = check_variants(
            path,
            [(bundle.path(variant.path), variant) for variant in manifest.variants],
            self.reference,
            contract=manifest.contract,
            context=manifest.model.context,
            threads=self._threads,
        )
        details = [found.detail, *(result.detail for result in results if result.detail)]
        return "; ".join(details)

    def compare_weights(self, graphs: Sequence[Path]) -> tuple[int, list[str]]:
        """See `SourceModel.compare_weights`; one weight is in memory at a time.

        A weight that graphs share in a file beside them is read once. The first graph has all
        weights; one for passes without lookaheads has none of the adapter's.
        """
        expected = ExpectedWeights(self.reference)
        compared: set[tuple[str, str]] = set()
        equal, problems = 0, []
        for path in graphs:
            tensors = _stored_weights(path)
            missing = list(expected.missing(tensors))
            if path != graphs[0] and not any(map(is_of_adapter, _parameters_of(tensors))):
                missing = [name for name in missing if not is_of_adapter(name)]
            problems += [f"{path.name} has no weight {name}" for name in missing]
            for name, tensor in tensors.items():
                truth, place = expected.of(name), _place(tensor)
                if truth is None or place in compared:
                    continue
                compared |= {place} if place is not None else set()
                found = numpy_helper.to_array(tensor, base_dir=str(path.parent))
                difference = _describe_difference(name, found, truth)
                problems += [f"{path.name}: {difference}"] if difference else []
                equal += not difference
        return equal, problems

    def find_nonfinite_weight(self, graph: Path) -> str | None:
        """See `SourceModel.find_nonfinite_weight`; one weight is in memory at a time."""
        model = onnx.load(graph, load_external_data=False)
        for initializer in model.graph.initializer:
            weight = numpy_helper.to_array(initializer, base_dir=str(graph.parent))
            if np.issubdtype(weight.dtype, np.floating) and not np.isfinite(weight).all():
                return str(initializer.name)
        return None


def _parameters_of(stored: Collection[str]) -> Iterator[str]:
    """The parameters that stored weights of these names hold."""
    return (parameter for name in stored for parameter in read_name(name).parameters)


def _stored_weights(graph: Path) -> dict[str, onnx.TensorProto]:
    """Weights by name; their numbers stay where they are."""
    model = onnx.load(graph, load_external_data=False)
    return {tensor.name: tensor for tensor in model.graph.initializer}


def _place(tensor: onnx.TensorProto) -> tuple[str, str] | None:
    """File and offset of a weight; None when it is in the graph itself."""
    fields = {entry.key: entry.value for entry in tensor.external_data}
    return (fields["location"], fields.get("offset", "0")) if fields else None


def _describe_difference(
    name: str, found: NDArray[np.generic], expected: NDArray[np.generic]
) -> str:
    """A line about a weight that is not the checkpoint's at its own precision; empty if it is."""
    if found.shape != expected.shape:
        return f"weight {name} is {found.shape}, the checkpoint's {expected.shape}"
    expected_here = expected.astype(found.dtype, copy=False)
    if np.array_equal(found, expected_here):
        return ""
    unequal = np.argwhere(found != expected_here)
    return (
        f"weight {name} differs from the checkpoint's in {len(unequal)} of {found.size} numbers, "
        f"the first at {unequal[0].tolist()}"
    )


def _as_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    assert isinstance(value, list | tuple), "transformers keeps an id or a list of ids"
    return tuple(value)


def open_source(
    bundle: Bundle, model: str | None, *, threads: int, lora: Path | None = None
) -> CheckpointSource:
    """Open the checkpoint a bundle was made from, as the bundle's precision holds it.

    Args:
        bundle: opened, so that its digests are checked.
        model: where it is; None takes the place that the manifest's recipe names.
        threads: see `CheckpointSource`.
        lora: see `open_checkpoint`.

    Raises:
        NotRunError: it cannot be found or read, or is another one.
    """
    manifest = bundle.manifest
    checkpoint = open_checkpoint(manifest, model, otherwise="use --reference self", lora=lora)
    is_smoothed = bundle.has(SMOOTHING_PATH)
    return CheckpointSource(
        checkpoint,
        threads=threads,
        precision=parse_precision(manifest.precision),
        smoothing=read_smoothing(bundle.path(SMOOTHING_PATH)) if is_smoothed else NO_SMOOTHING,
        adapter=_read_adapter(bundle),
    )


def open_checkpoint(
    manifest: Manifest, model: str | None, *, otherwise: str, lora: Path | None = None
) -> Checkpoint:
    """Find the checkpoint a bundle was made from.

    Args:
        manifest: of the bundle.
        model: where it is; None takes the place that the manifest's recipe names.
        otherwise: what to do without it, for the message.
        lora: folder of the adapter that was merged, if one was.

    Raises:
        NotRunError: it cannot be found or read, or is another one.
    """
    merged = manifest.model.merged_adapter
    if (merged is None) != (lora is None):
        raise NotRunError(
            f"the bundle has no adapter merged; leave --lora out, or {otherwise}"
            if merged is None
            else f"the bundle has the adapter {merged} merged; name its folder with --lora, or "
            f"{otherwise}"
        )
    name, revision = (model, None) if model is not None else _recorded_place(manifest, otherwise)
    try:
        source = find_model(
            name, revision=revision, allow_bin=manifest.recipe.get(ALLOW_BIN) is True
        )
        if lora is None:
            _check_weights(name, source.digest(), manifest, otherwise)
            return load_checkpoint(source, context=manifest.model.context)
        checkpoint = load_checkpoint(source, context=manifest.model.context, lora=lora)
        _check_weights(name, checkpoint.source_digest(), manifest, otherwise)
        return checkpoint
    except (CheckpointError, HostError, UsageError, OSError) as error:
        raise NotRunError(
            f"the checkpoint to compare with cannot be opened: {error}; name it with --model, or "
            f"{otherwise}"
        ) from error


def _check_weights(name: str, digest: str, manifest: Manifest, otherwise: str) -> None:
    """Before the weights are loaded, which can take minutes."""
    if digest != manifest.model.source_digest:
        raise NotRunError(
            f"the checkpoint {name} is not the one the bundle was made from: its weights have "
            f"sha256 {digest[:12]}, the manifest says {manifest.model.source_digest[:12]}; name "
            f"the right one with --model, or {otherwise}"
        )


def _recorded_place(manifest: Manifest, otherwise: str) -> tuple[str, str | None]:
    """Name and revision of the checkpoint as `--model` and `--revision` would take them."""
    origin = manifest.model.source
    place = name_place(origin, manifest.model.revision)
    if place is None:
        raise NotRunError(
            f"the bundle was made from {origin!r}, a place on the machine that built it; name the "
            f"checkpoint with --model, or {otherwise}"
        )
    return place


def _read_adapter(bundle: Bundle) -> Adapter:
    if bundle.manifest.lookahead.num_adapter_weights is None:
        return NO_ADAPTER
    try:
        return read_lookaheads(bundle.path(bundle.manifest.lookahead.path)).adapter
    except UsageError as error:
        raise BundleError(f"{error}; rebuild the bundle") from error
