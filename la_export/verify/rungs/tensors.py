"""Rung 17: every tensor a backend gives against ONNX Runtime on the CPU, compared by Polygraphy.

Climbed on every backend but that one. Where tokens and logits only say that something is wrong,
this says which tensor is: the first layer whose keys or values are not those of the graph.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from polygraphy.comparator import Comparator, RunResults, SimpleCompareFunc
from polygraphy.logger import G_LOGGER

from la_export.graph.twin import float32_twin
from la_export.verify.findings import Figure, Finding
from la_export.verify.ladder import EncodedPrompt, Ladder, Rung
from la_runtime.backends.base import Backend, CacheSizing, CacheState, Outputs
from la_runtime.backends.ort import OrtBackend
from la_runtime.backends.ort_options import make_session_options
from la_runtime.block import Part, make_step_inputs
from la_runtime.contract import Dtype
from la_runtime.layout import Group, StepRows, make_rows

__all__ = ["TENSORS", "ComparedTensor", "check_tensors", "compare_tensors", "read_tensors"]

_PROMPTS: Final = 3
_CHUNK: Final = 16
# The root's two drafts, the second of which stands, and the draft behind that one: what is
# committed does not lie together.
_PARENTS: Final = (0, 0, 2)
_PATH: Final = (0, 2, 3)
_ALL: Final = Outputs.TOP | Outputs.LOGSUMEXP | Outputs.LOGITS


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTensor:
    """A tensor of both backends.

    Args:
        name: which, with its prompt.
        share: the largest difference, as a share of the range; NaN when an element is.
        departs: whether Polygraphy finds it beyond the bound.
    """

    name: str
    share: float
    departs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """An array, and the range that its differences are a share of."""

    values: NDArray[np.float32]
    span: float


def check_tensors(ladder: Ladder) -> Finding:
    """Read prompts, run a step with a tree and slots, commit, and compare what both backends have.

    Prompts are read in chunks. What is compared is scores and best scores of both kinds of passes,
    and the keys and values of every layer afterwards.
    """
    bound = ladder.tolerance.logits
    compared: list[ComparedTensor] = []
    with _open_truth(ladder) as truth:
        for prompt in ladder.prompts[:_PROMPTS]:
            compared += compare_tensors(
                read_tensors(ladder, prompt, ladder.backend),
                read_tensors(ladder, prompt, truth),
                bound=bound,
            )
    problems = tuple(
        f"{tensor.name} departs from ONNX Runtime on the CPU by {tensor.share:.2g} of its range "
        f"(at most {bound:.0e})"
        for tensor in compared
        if tensor.departs
    )
    largest = float(np.max([tensor.share for tensor in compared]))  # NaN, if there is one
    return Finding(
        figures=(
            Figure(name="tensors", value=len(compared)),
            Figure(name="largest share of the range", value=largest, bound=bound),
        ),
        problems=problems,
        detail=f"{len(compared)} tensors of {len(ladder.prompts[:_PROMPTS])} prompts, keys and "
        "values of every layer among them, against ONNX Runtime on the CPU",
    )


TENSORS: Final = Rung(number=17, name="tensors", check=check_tensors)


@contextmanager
def _open_truth(ladder: Ladder) -> Iterator[Backend]:
    """The bundle's graph in ONNX Runtime on the CPU; what that cannot compute in, in float32."""
    bundle, contract = ladder.bundle, ladder.manifest.contract
    if contract.compute_dtype is not Dtype.BFLOAT16:
        with closing(OrtBackend.open(bundle, threads=ladder.threads)) as backend:
            backend.set_lookahead_embeddings(ladder.own_vectors)
            yield backend
        return
    options = make_session_options(ladder.threads)
    # Not into the bundle, where a run that is killed would leave it behind.
    with (
        tempfile.TemporaryDirectory() as folder,
        float32_twin(bundle.path(ladder.manifest.graph), folder=Path(folder)) as twin,
    ):
        session = ort.InferenceSession(str(twin), options, providers=["CPUExecutionProvider"])
        wide = replace(contract, compute_dtype=Dtype.FLOAT32, kv_dtype=Dtype.FLOAT32)
        with closing(OrtBackend(session, wide, ladder.own_vectors)) as backend:
            yield backend


def read_tensors(ladder: Ladder, prompt: EncodedPrompt, backend: Backend) -> dict[str, _Tensor]:
    """What a backend says of a prompt, by the name of the tensor, in the order of computation.

    Args:
        ladder: gives the text behind the prompt, and the length of its groups.
        prompt: which.
        backend: what runs the graph.
    """
    text = ladder.text(prompt)
    num_read = max(1, len(text) - len(_PATH))
    ahead = text[num_read : num_read + len(_PATH)]
    state = backend.allocate(1, CacheSizing.STEPPED)
    scores = _read_text(ladder, backend, state, text[:num_read])
    if len(ahead) == len(_PATH):
        scores |= _run_step(ladder, backend, state, ahead)
        backend.commit(state, [_PATH])
    key_values = zip(backend.contract.past_names, state.read(0), strict=True)
    state.close()
    cache = {name: _Tensor(values=values, span=_range(values)) for name, values in key_values}
    return {f"prompt {prompt.name}, {name}": tensor for name, tensor in (scores | cache).items()}


def _read_text(
    ladder: Ladder, backend: Backend, state: CacheState, token_ids: tuple[int, ...]
) -> dict[str, _Tensor]:
    passes: list[dict[str, _Tensor]] = []
    width = min(_CHUNK, backend.limits.block or _CHUNK)
    for start in range(0, len(token_ids), width):
        part = token_ids[start : start + width]
        rows = make_rows(len(part), (), ())
        passes.append(_score(ladder, backend, state, part, rows, "reading"))
        backend.commit(state, [range(len(part))])
    return {
        name: _Tensor(
            values=np.concatenate([scores[name].values for scores in passes]),
            span=max(scores[name].span for scores in passes),
        )
        for name in passes[0]
    }


def _run_step(
    ladder: Ladder, backend: Backend, state: CacheState, ahead: tuple[int, ...]
) -> dict[str, _Tensor]:
    """A step whose tree holds the text's next tokens and one that is wrong."""
    root, first, second = ahead
    wrong = (first + 1) % backend.contract.vocab_size
    k = max(ladder.lookahead_lengths, default=0)
    groups = (Group(0, k),) if k else ()
    rows = make_rows(1, _PARENTS, groups, group_mask=ladder.manifest.lookahead.group_mask)
    return _score(ladder, backend, state, (root, wrong, first, second), rows, "a step")


def _score(
    ladder: Ladder,
    backend: Backend,
    state: CacheState,
    token_ids: tuple[int, ...],
    rows: StepRows,
    where: str,
) -> dict[str, _Tensor]:
    """Copies of one pass's scores; all are judged by the range of the logits."""
    inputs = make_step_inputs(
        [Part(rows=rows, token_ids=token_ids, scored_from=0)],
        state,
        backend.contract,
        context=ladder.context,
        widths=backend.widths,
        outputs=_ALL,
    )
    scores = backend.forward(state, inputs)
    found = {
        "logits": scores.logits(),
        "best logits": scores.top()[1],
        "sums of exponentials": scores.logsumexp(),
    }
    span = _range(found["logits"])
    return {
        f"{name} of {where}": _Tensor(values=values[0].copy(), span=span)
        for name, values in found.items()
    }


def _range(values: NDArray[np.float32]) -> float:
    return float(np.ptp(values)) if values.size else 0.0


def compare_tensors(
    found: dict[str, _Tensor], truth: dict[str, _Tensor], *, bound: float
) -> tuple[ComparedTensor, ...]:
    """Compare tensor by tensor.

    Args:
        found: of the backend in question.
        truth: of ONNX Runtime on the CPU; the same names.
        bound: largest difference of an element, as a share of the true tensor's range.
    """
    runs = RunResults()
    runs.add([{name: t.values for name, t in found.items()}], runner_name="backend")
    runs.add([{name: t.values for name, t in truth.items()}], runner_name="ONNX Runtime")
    compare = SimpleCompareFunc(
        check_error_stat="elemwise",
        rtol=0.0,
        atol={name: bound * tensor.span for name, tensor in truth.items()},
    )
    with G_LOGGER.verbosity():
        (accuracy,) = Comparator.compare_accuracy(runs, compare_func=compare)
    ((verdicts,),) = accuracy.values()
    return tuple(
        ComparedTensor(
            name=name,
            share=_share(found[name].values, tensor),
            departs=not verdicts[name],
        )
        for name, tensor in truth.items()
    )


def _share(found: NDArray[np.float32], truth: _Tensor) -> float:
    difference = np.abs(found.astype(np.float64) - truth.values).max(initial=0.0)
    return float(difference) / (truth.span or 1.0)
