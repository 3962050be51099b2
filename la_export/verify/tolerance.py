"""What arithmetic of a precision is allowed: how far numbers may be apart and tokens be excused.

The reference is always float32 arithmetic on the weights as the bundle holds them, and the same
rule for activations that are quantized, so what is allowed here is rounding of the arithmetic, and
none of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from la_export.options import Precision
from la_runtime.decoder import LARGEST_EPSILON
from la_runtime.errors import NotRunError

__all__ = ["FP32", "Tolerance", "parse_precision", "tolerance_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The bounds of one precision.

    Args:
        logits: largest difference of a logit from the reference's, as a share of their range.
        kl: largest KL divergence of a row's distribution from the reference's.
        epsilon: most that the margin of a near-tie may be, whatever was measured.
        reference_epsilon: margin of a near-tie between the bundle and the reference, which are two
            implementations.
        excused_share: near-ties that may be excused, as a share of the tokens compared.
        reference_excused_share: likewise between the bundle and the reference.
        departure: how far a sum of the residual stream may be from the reference's, as a share of
            an element's own size, or of its tensor's typical size when that is more.
        perplexity: largest relative change of a text's perplexity by the width of its passes.
        nudges: how often the reference is asked again, its input off by rounding, where a row of
            its logits is too far away: the row may be near any of its answers.
    """

    logits: float
    kl: float
    epsilon: float
    reference_epsilon: float
    excused_share: float
    reference_excused_share: float
    departure: float
    perplexity: float
    nudges: int = 0

    def excuse_allowance(self, num_tokens: int) -> int:
        """Near-ties that may be excused among so many tokens; one always may."""
        return max(1, int(num_tokens * self.excused_share))

    def reference_allowance(self, num_tokens: int) -> int:
        """Likewise between the bundle and the reference."""
        return max(1, int(num_tokens * self.reference_excused_share))


# Float32 kernels that sum in another order differ by 1e-6 to 1e-5 of the range; two distributions
# whose logits differ by 1e-4 of a range of 40 are at most 1e-5 apart.
FP32: Final = Tolerance(
    logits=1e-4,
    kl=1e-5,
    epsilon=LARGEST_EPSILON[Precision.FP32],
    reference_epsilon=1e-3,
    excused_share=1 / 5000,
    reference_excused_share=1 / 5000,
    # Up to 8e-5 was seen, at all 62 points of SmolLM2-135M and in four scripts.
    departure=5e-4,
    # Over hundreds of tokens the sums of another width all but cancel out.
    perplexity=1e-5,
)
_TOLERANCES: Final = {
    Precision.FP32: FP32,
    # SmolLM2-135M on tokens at random (scripts/float16.py): logits up to 1.1e-2 of their range off,
    # where PyTorch's own float16 is up to 2.1e-2 off. A logit near 32 is a multiple of 1/32.
    Precision.FP16: Tolerance(
        logits=2.5e-2,
        kl=5e-2,
        epsilon=LARGEST_EPSILON[Precision.FP16],
        reference_epsilon=0.5,
        excused_share=1 / 500,
        reference_excused_share=1 / 500,
        departure=1e-1,
        perplexity=1e-2,
    ),
    # Three bits of precision fewer; no machine at hand has run it.
    Precision.BF16: Tolerance(
        logits=2e-1,
        kl=4e-1,
        epsilon=LARGEST_EPSILON[Precision.BF16],
        reference_epsilon=4.0,
        excused_share=1 / 500,
        reference_excused_share=1 / 500,
        departure=8e-1,
        perplexity=8e-2,
    ),
    # An activation that is one ULP off can round to another integer, and the next layers carry that
    # on until it is as large as the rounding itself. So PyTorch and a graph, which sum in other
    # orders, are apart on SmolLM2-135M, and PyTorch is as far from itself when its embeddings are
    # off by a millionth (scripts/int8.py, docs/results/int8.json): on prompts by up to 0.03 and
    # 0.04 of the range, with another best token at 4 % of the positions; on tokens at random by up
    # to 0.37 and 0.38, at single places, with another best token at 8 and 10 %. Numbers that went
    # through many layers say little about a graph; what it does to floats, each product by itself,
    # and bits at other widths say more.
    Precision.INT8: Tolerance(
        logits=2.5e-1,
        kl=3.0,
        epsilon=LARGEST_EPSILON[Precision.INT8],
        reference_epsilon=2.0,
        excused_share=1 / 500,
        reference_excused_share=1 / 4,
        departure=64.0,
        perplexity=5e-2,
        nudges=24,
    ),
    # Only the head rounds activations. Measured likewise, off by 1e-6: logits up to 0.26 apart,
    # which is 4.4e-3 of their range, KL up to 7e-4, sums up to 3.7e-3, perplexity 1.5e-4.
    Precision.INT4: Tolerance(
        logits=1e-2,
        kl=3e-3,
        epsilon=LARGEST_EPSILON[Precision.INT4],
        reference_epsilon=LARGEST_EPSILON[Precision.INT4],
        excused_share=1 / 500,
        reference_excused_share=1 / 500,
        departure=1e-2,
        perplexity=1e-3,
        nudges=24,
    ),
}


def tolerance_of(precision: str) -> Tolerance:
    """The bounds of a precision, as a manifest names it.

    Raises:
        NotRunError: this version does not know it.
    """
    return _TOLERANCES[parse_precision(precision)]


def parse_precision(name: str) -> Precision:
    """The precision that a manifest names.

    Raises:
        NotRunError: this version does not know it.
    """
    try:
        return Precision(name)
    except ValueError as error:
        raise NotRunError(
            f"the bundle's precision {name!r:.40} is none that can be verified: expected one of "
            f"{', '.join(Precision)}; upgrade the package"
        ) from error
