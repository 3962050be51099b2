"""Whether one model gives the same tokens from bundles of several cache forms and precisions.

A float32 bundle is compared with plain decoding of the first float32 bundle, whatever their cache
forms. Coarser arithmetic gives a text of its own: such a bundle is compared with its own plain
decoding. `scripts/cache_forms.py` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from la_export.bench.exactness import EncodedPrompt
from la_export.bench.results import Cell
from la_export.verify.decoding import Decoded, decode
from la_export.verify.epsilon import measure_epsilon
from la_export.verify.ladder import Proposals
from la_export.verify.probes import GivenProposals
from la_export.verify.tokens import Comparisons, Verdict
from la_export.verify.tolerance import Tolerance, tolerance_of
from la_runtime.contract import CacheForm, Dtype
from la_runtime.generation import Engine
from la_runtime.layout import Layout
from la_runtime.sampling import SamplingParams

__all__ = ["PLAINLY", "FormRuns", "Way", "compare_forms", "decode_form", "make_ways"]

_EPSILON_TEXT: Final = 500  # positions of a text; half of a context of 1,024


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of decoding; k = 0 is plain. Of given proposals five in seven are right."""

    k: int
    proposals: Proposals


PLAINLY: Final = Way(k=0, proposals=Proposals.OWN)


def make_ways(ks: Sequence[int]) -> tuple[Way, ...]:
    """Plain decoding, then each k with both kinds of proposals."""
    return (PLAINLY, *(Way(k=k, proposals=whose) for k, whose in product(ks, Proposals)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FormRuns:
    """What one bundle made of the prompts.

    Args:
        precision: its arithmetic.
        cache_form: of its graph.
        tolerance: what its arithmetic is allowed.
        measured_epsilon: margin of a near-tie, measured on it.
        runs: per way a decoding of each prompt.
    """

    precision: Dtype
    cache_form: CacheForm
    tolerance: Tolerance
    measured_epsilon: float
    runs: Mapping[Way, Sequence[Decoded]]

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.precision} {self.cache_form}"


def decode_form(
    engine: Engine,
    prompts: Sequence[EncodedPrompt],
    ways: Sequence[Way],
    *,
    new_tokens: int,
    epsilon_positions: int,
) -> FormRuns:
    """Decode every prompt in every way, one at a time.

    Args:
        engine: over the bundle.
        prompts: their tokens and `new_tokens` more fit into the bundle's context.
        ways: plain decoding first.
        new_tokens: most tokens of each.
        epsilon_positions: over how many positions the margin of a near-tie is measured.
    """
    manifest, backend = engine.bundle.manifest, engine.backend
    runs: dict[Way, list[Decoded]] = {way: [] for way in ways}
    for index, prompt in enumerate(prompts):
        for way in ways:
            proposing = backend
            if way.proposals is Proposals.GIVEN:
                text = (*prompt.token_ids, *runs[PLAINLY][index].token_ids)
                proposing = GivenProposals(backend, [text])
            params = SamplingParams(k=way.k, max_new_tokens=new_tokens)
            runs[way] += decode(proposing, manifest, [prompt.token_ids], [params])
    read = [token for prompt in prompts for token in prompt.token_ids][:epsilon_positions]
    return FormRuns(
        precision=manifest.contract.compute_dtype,
        cache_form=manifest.contract.cache_form,
        tolerance=tolerance_of(manifest.precision),
        measured_epsilon=max(
            measure_epsilon(
                backend,
                text,
                widths=sorted({Layout.ROOT_ONLY.max_rows(way.k) for way in ways if way.k}),
                context=manifest.model.context,
            )
            for text in (
                read[start : start + _EPSILON_TEXT] for start in range(0, len(read), _EPSILON_TEXT)
            )
        ),
        runs=runs,
    )


def compare_forms(
    forms: Sequence[FormRuns], prompts: Sequence[str]
) -> tuple[list[dict[str, Cell]], list[str]]:
    """Compare each bundle's decodings with plain decoding.

    Args:
        forms: what the bundles made of the same prompts.
        prompts: their names.

    Returns:
        A row per bundle and way; what is not excused, and near-ties where they are too many.
    """
    rows: list[dict[str, Cell]] = []
    problems: list[str] = []
    for form in forms:
        reference = _reference(form, forms)
        epsilon = max(form.measured_epsilon, reference.measured_epsilon)
        comparisons = Comparisons(
            tolerance=form.tolerance, epsilon=min(epsilon, form.tolerance.epsilon)
        )
        for way, found in form.runs.items():
            if form is not reference or way != PLAINLY:
                rows.append(_compare(form, way, found, reference, prompts, comparisons))
        problems += comparisons.problems
    return rows, problems


def _reference(form: FormRuns, forms: Sequence[FormRuns]) -> FormRuns:
    if form.precision is not Dtype.FLOAT32:
        return form
    return next(other for other in forms if other.precision is Dtype.FLOAT32)


def _compare(
    form: FormRuns,
    way: Way,
    found: Sequence[Decoded],
    reference: FormRuns,
    prompts: Sequence[str],
    comparisons: Comparisons,
) -> dict[str, Cell]:
    """One row of the table."""
    how = f"{form.name}, k={way.k} with {way.proposals} proposals"
    tokens_before = comparisons.num_tokens
    verdicts = [
        comparisons.compare(
            f"prompt {name}", how, expected.token_ids, expected.margins, decoded.token_ids
        )
        for name, expected, decoded in zip(prompts, reference.runs[PLAINLY], found, strict=True)
    ]
    after_prefill = [length for decoded in found for length in decoded.block_lengths[1:]]
    return {
        "precision": form.precision.value,
        "cache_form": form.cache_form.value,
        "k": way.k,
        "proposals": way.proposals.value if way.k else "none",
        "reference": f"{reference.name}, plain",
        "prompts": len(found),
        "tokens": comparisons.num_tokens - tokens_before,
        "equal": verdicts.count(Verdict.EQUAL),
        "excused": verdicts.count(Verdict.EXCUSED),
        "different": verdicts.count(Verdict.DIFFERENT),
        "epsilon": comparisons.epsilon,
        "tokens_per_pass": sum(after_prefill) / len(after_prefill) if after_prefill else None,
    }
