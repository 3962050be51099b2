"""Tunes a model's lookaheads: texts, training, figures, file. Knows the order of these alone."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from la_export.checkpoint import Checkpoint, ModelSource, find_model, load_checkpoint
from la_export.checkpoint.facts import count_parameters, make_model_facts
from la_export.checkpoint.tokenizer_files import TokenizerFiles, read_tokenizer
from la_export.host import available_memory_bytes
from la_export.lookahead import LookaheadWeights, make_untuned_vectors, write_lookaheads
from la_export.question_frame import QuestionFrame, read_frame
from la_export.torch_threads import torch_threads
from la_export.tune.attention import use_tuning_attention
from la_export.tune.evaluation import Acceptance, chain_tokens_per_pass
from la_export.tune.library import TextLibrary
from la_export.tune.lookaheads import Lookaheads, Site, find_sites
from la_export.tune.options import TuneOptions
from la_export.tune.texts import OwnText, TextFile, cut_loop, read_texts, write_texts
from la_export.tune.trainer import Evaluation, Learned, Schedule, Trainer
from la_export.tune.writer import TextWriter
from la_runtime.bundle import ModelFacts
from la_runtime.errors import HostError, UnsupportedModelError, UsageError
from la_runtime.layout import GroupMask
from la_runtime.records import Record
from la_runtime.tokenizer import Tokenizer

__all__ = ["STATE_SUFFIX", "HeldOut", "TuneProgress", "TuneReport", "prepare_model", "tune"]

STATE_SUFFIX: Final = ".tuning"
_TEXTS: Final = "texts.json"
_STATE: Final = "training.safetensors"
_OPTIONS: Final = "options.json"
_ENGINES: Final = Path("engines")
# What a model does to scores beside the head's product, and the value that does nothing.
_SCORE_FIELDS: Final = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
}
# Texts written side by side.
_ROUND: Final = 128
_WRITING_SHARE: Final = 0.2
# Of what remains; the last figures take the rest.
_TRAINING_SHARE: Final = 0.92
_SHORTEST_ANSWER: Final = 4
# Of what is free: K/V of texts, beside the model and what training needs.
_MEMORY_SHARE: Final = 0.4
_CHAIN_TEXTS: Final = 48
_NO_STEP_LIMIT: Final = 10**9


class TuneProgress(Protocol):
    """Is told what happens."""

    def wrote(self, num_texts: int, seconds: float) -> None:
        """Texts so far."""
        ...

    def took_step(self, step: int, seconds: float, loss: float) -> None:
        """One step of training."""
        ...

    def evaluated(self, evaluation: Evaluation) -> None:
        """A look at held-out texts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Figures on held-out texts.

    Args:
        untuned: before training, in shares of proposals that were right, by slot.
        tuned: likewise of what is in the file.
        num_anchors: prefixes that both stood behind.
        gain: slots of the first place that became right less those that became wrong, as a share.
        gain_error: standard error of `gain` over anchors.
        chain_tokens_per_pass: by drafts of a chain, with a group behind every prefix.
        num_chain_texts: texts that were decoded for it.
    """

    untuned: tuple[float, ...]
    tuned: tuple[float, ...]
    num_anchors: int
    gain: float
    gain_error: float
    chain_tokens_per_pass: dict[int, float]
    num_chain_texts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """What came of it.

    Args:
        path: the file.
        k: vectors in it.
        group_mask: that they were made for.
        num_vector_weights: numbers in the vectors.
        num_adapter_weights: numbers in the adapter.
        num_model_weights: of the model.
        num_texts: that were learned from.
        writing_seconds: that they took.
        learned: the training.
        held_out: figures.
        seconds: wall time of this run.
        dtype: that was computed in.
        device: what computed.
    """

    path: Path
    k: int
    group_mask: GroupMask
    num_vector_weights: int
    num_adapter_weights: int
    num_model_weights: int
    num_texts: int
    writing_seconds: float
    learned: Learned
    held_out: HeldOut
    seconds: float
    dtype: str
    device: str


class _Begun(Record):
    """What a state folder is of; going on asks for the same."""

    model_digest: str
    k: int
    rank: int
    group_mask: GroupMask
    text_tokens: int


def tune(options: TuneOptions, progress: TuneProgress) -> TuneReport:
    """Tune, and write the file; what was begun earlier with the same options goes on.

    Args:
        options: what to tune.
        progress: is told what happens.

    Raises:
        LookaheadError: the model or the options do not allow it.
    """
    with torch_threads(options.threads):
        return _tune(options, progress, began=time.monotonic())


def _tune(options: TuneOptions, progress: TuneProgress, *, began: float) -> TuneReport:
    source = find_model(options.model, revision=options.revision, allow_bin=options.allow_bin)
    checkpoint = _load(source, options.text_tokens)
    tokenizer = read_tokenizer(checkpoint)
    facts = make_model_facts(
        checkpoint,
        num_parameters=count_parameters(checkpoint),
        eos_token_ids=tokenizer.eos_token_ids,
    )
    out = _check_out(options.out or _ENGINES / f"{source.name}-lookahead.safetensors")
    state = _open_state(out, options, facts)
    vectors = make_untuned_vectors(checkpoint.embeddings(), options.k)
    model = prepare_model(checkpoint)
    length = min(options.text_tokens, checkpoint.context)
    frame = _read_frame(tokenizer, facts, length)
    writer = TextWriter(model, frame, ends=facts.eos_token_ids, length=length)
    written = _write_texts(writer, state / _TEXTS, options, facts, progress)
    held_out, training = written.held_out, written.training
    sites: tuple[Site, ...] = find_sites(model) if options.rank else ()
    lookaheads = Lookaheads(torch.from_numpy(vectors), sites, options.rank).to(model.device)
    memory = int(_MEMORY_SHARE * available_memory_bytes())
    held_out_library = TextLibrary(model, held_out, memory_bytes=memory // 4)
    trainer = Trainer(
        model,
        lookaheads,
        training=TextLibrary(model, training, memory_bytes=memory),
        held_out=held_out_library,
        group_mask=options.group_mask,
        state_path=state / _STATE,
    )
    before = trainer.acceptance()
    budget = _TRAINING_SHARE * max(60.0 * options.minutes - written.seconds, 1.0)
    learned = trainer.train(
        Schedule(seconds=budget, steps=options.steps or _NO_STEP_LIMIT),
        tell_step=progress.took_step,
        tell_evaluation=progress.evaluated,
    )
    lookaheads.round_adapter()
    figures = _compare(before, trainer, held_out_library, options.k)
    weights = LookaheadWeights(
        vectors=lookaheads.vectors.detach().cpu().numpy(),
        adapter=lookaheads.adapter(),
        group_mask=options.group_mask,
        model_digest=facts.source_digest,
        origin=_describe(options),
        tuning=_provenance(options, learned, written, figures, model),
    )
    _put(out, weights)
    return TuneReport(
        path=out,
        k=options.k,
        group_mask=options.group_mask,
        num_vector_weights=weights.vectors.size,
        num_adapter_weights=weights.adapter.num_weights,
        num_model_weights=facts.num_parameters,
        num_texts=len(training),
        writing_seconds=written.seconds,
        learned=learned,
        held_out=figures,
        seconds=time.monotonic() - began,
        dtype=_name_dtype(model),
        device=str(model.device),
    )


def _load(source: ModelSource, text_tokens: int) -> Checkpoint:
    """A window that is no narrower than a text hides nothing of it.

    Raises:
        UnsupportedModelError: it is narrower.
    """
    checkpoint = load_checkpoint(source, context=None)
    _check_scores(checkpoint)
    if checkpoint.window is not None:
        checkpoint = load_checkpoint(source, context=text_tokens)
    if checkpoint.window is not None:
        raise UnsupportedModelError(
            f"some layers see {checkpoint.window} tokens, fewer than a text of {text_tokens}; "
            f"tune with --text-tokens {checkpoint.window} or less"
        )
    return checkpoint


def _check_scores(checkpoint: Checkpoint) -> None:
    """Lookaheads learn from what the head says, which has to be the model's scores.

    Raises:
        UnsupportedModelError: the model caps or scales them, or caps those of attention.
    """
    config = checkpoint.config
    for field, neutral in _SCORE_FIELDS.items():
        if getattr(config, field, None) not in (None, neutral):
            raise UnsupportedModelError(
                f"model type {config.model_type!r} caps or scales scores ({field}), which tuning "
                "does not do yet; build with --lookahead untuned"
            )


def _check_out(out: Path) -> Path:
    """Before any long work.

    Raises:
        UsageError: it cannot be the name of a file.
    """
    if not out.name or out.is_dir():
        raise UsageError(f"--out {out} is a folder; give a file, such as mine.safetensors")
    return out


def _open_state(out: Path, options: TuneOptions, facts: ModelFacts) -> Path:
    """The folder beside the file where a tuning that is broken off goes on from.

    Raises:
        UsageError: it is of a tuning with other options.
        HostError: it cannot be made.
    """
    folder = out.with_name(out.name + STATE_SUFFIX)
    asked = _Begun(
        model_digest=facts.source_digest,
        k=options.k,
        rank=options.rank,
        group_mask=options.group_mask,
        text_tokens=options.text_tokens,
    )
    path = folder / _OPTIONS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            begun = _Begun.model_validate_json(path.read_bytes())
        else:
            begun = asked
            path.write_text(asked.model_dump_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise HostError(
            f"the folder {folder} cannot be used: {error.strerror or error}; choose another --out"
        ) from error
    except ValidationError:
        begun = None
    if begun != asked:
        raise UsageError(
            f"{folder} holds a tuning of another model or with other options; remove it to begin "
            "anew, or choose another --out"
        )
    return folder


def prepare_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """Frozen, on the GPU if there is one, its weights in bfloat16 where that is computed.

    No buffer is rounded: with other rotary frequencies it would be another model.
    """
    model = checkpoint.load_model()
    model.requires_grad_(False)
    if torch.cuda.is_available():
        torch.nn.Module.to(model, "cuda")
    if torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported():
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    use_tuning_attention(model)
    return model


def _read_frame(files: TokenizerFiles, facts: ModelFacts, length: int) -> QuestionFrame:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files.write(folder)
        return read_frame(
            folder,
            Tokenizer.load(folder),
            bos_token_id=facts.bos_token_id,
            eos_token_ids=facts.eos_token_ids,
            length=length,
        )


def _write_texts(
    writer: TextWriter,
    path: Path,
    options: TuneOptions,
    facts: ModelFacts,
    progress: TuneProgress,
) -> TextFile:
    """Rounds of texts until there are enough of them or their time is over: two at least."""
    file = read_texts(path, facts.source_digest)
    most_seconds = _WRITING_SHARE * 60.0 * options.minutes
    size = min(_ROUND, options.texts // 2)
    progress.wrote(file.num_texts, file.seconds)
    while file.num_begun < 2 * size or (
        file.num_begun + size <= options.texts
        and file.seconds * (1 + size / file.num_begun) <= most_seconds
    ):
        began = time.monotonic()
        written = writer.write(file.num_begun, size)
        # The first round, and it alone, is held out, however often the texts are added to. It is
        # left as the model wrote it.
        kind = "training" if file.num_begun else "held_out"
        if kind == "training":
            written = [cut_loop(text) for text in written]
        texts = tuple(text for text in written if _is_long_enough(text))
        file = file.model_copy(
            update={
                "num_begun": file.num_begun + size,
                "seconds": file.seconds + time.monotonic() - began,
                kind: (*getattr(file, kind), *texts),
            }
        )
        write_texts(path, file)
        progress.wrote(file.num_texts, file.seconds)
    if not file.held_out or not file.training:
        raise UsageError(
            f"the model writes no text: of {file.num_begun} answers {file.num_texts} are of "
            f"{_SHORTEST_ANSWER} tokens or more; there is too little to learn from"
        )
    return file


def _is_long_enough(text: OwnText) -> bool:
    return text.answer_length >= _SHORTEST_ANSWER


def _compare(before: Acceptance, trainer: Trainer, library: TextLibrary, k: int) -> HeldOut:
    after = trainer.acceptance()
    changes = after.right[:, 0].astype(float) - before.right[:, 0]
    first = TextLibrary(trainer.model, library.texts[:_CHAIN_TEXTS], memory_bytes=0)
    chains = {
        drafts: chain_tokens_per_pass(first, drafts, trainer.propose)[0]
        for drafts in (1, 2, 4)
        if drafts <= k
    }
    return HeldOut(
        untuned=before.by_slot,
        tuned=after.by_slot,
        num_anchors=len(changes),
        gain=float(changes.mean()),
        gain_error=float(changes.std(ddof=1) / len(changes) ** 0.5),
        chain_tokens_per_pass=chains,
        num_chain_texts=len(first),
    )


def _describe(options: TuneOptions) -> str:
    adapter = f"adapter of rank {options.rank}" if options.rank else "vectors alone"
    return f"tuned, {adapter}"


def _provenance(
    options: TuneOptions,
    learned: Learned,
    written: TextFile,
    figures: HeldOut,
    model: PreTrainedModel,
) -> dict[str, str]:
    """What is worth knowing years later; no path, no name of a machine."""
    adapter = f"lora:{options.rank}" if options.rank else "none"
    shares = ", ".join(f"{share:.3f}" for share in figures.tuned)
    return {
        "command": f"la-export tune --model {Path(options.model).name} --k {options.k} --adapter "
        f"{adapter} --group-mask {options.group_mask.value} --minutes {options.minutes:g}"
        + (f" --steps {options.steps}" if options.steps else ""),
        "processor": platform.machine(),
        "computed in": f"{_name_dtype(model)} on {model.device.type}",
        "texts": str(written.num_texts),
        "writing seconds": f"{written.seconds:.0f}",
        "training steps": str(learned.steps),
        "training seconds": f"{learned.seconds:.0f}",
        "held-out acceptance by slot": shares,
    }


def _name_dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _put(out: Path, weights: LookaheadWeights) -> None:
    """In one step, so that a file of before stays whole until then."""
    partial = out.with_name(out.name + ".partial")
    try:
        write_lookaheads(partial, weights)
        os.replace(partial, out)
    except OSError as error:
        raise HostError(
            f"{out} cannot be written: {error.strerror or error}; choose another --out"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
