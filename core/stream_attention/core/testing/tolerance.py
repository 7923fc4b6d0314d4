"""The one tolerance: `err <= K_REFERENCE · err(same-dtype reference) + rounding`, on max and RMS.

The same-dtype reference (`testing.golden`) does the oracle's sums with the roundings that any
kernel of that dtype makes: fp32 scores, weights rounded to the dtype, fp32 sums, one rounding of
the output. A correct kernel makes the same roundings in another order, so its error is of the same
size. Where a result has few elements the reference can be right by luck; `noise` is the expected
size of those roundings, computed beside the oracle, and stands in for it. Bits that are not finite
must agree in place and sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Two evaluations of the same sums in different orders (splits, tiles, lanes) have independent
# errors of one size: the larger of two maxima over many elements is rarely over 1.5 × the other,
# and online rescaling adds a rounding a tile. 3 leaves room for both and is far below what a wrong
# mask, a lost token or a second rounding of the output in a narrower dtype makes.
K_REFERENCE = 3.0
# `noise` is the length of a random walk of full unit roundoffs, of which a real rounding is 0.6 or
# less: 4 of it are 7 standard deviations, which covers the largest of the 10^6 elements of a case,
# and every sum of up to 16 tokens even where all roundings conspire.
K_NOISE_MAX = 4.0
# The RMS averages the walk, so it needs no tail: only unlucky small results lie over 1, and a
# result of one element lies under 3 of its standard deviations.
K_NOISE_RMS = 3.0
# One rounding to the output dtype is at most half a unit in the last place. A merge of splits
# stored in fp32 does not add any.
K_OUTPUT = 1.0

UNIT_ROUNDOFF = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
# Half the spacing of subnormals: the absolute error of one rounding near zero. fp16 has few
# exponents, so results near 1e-7 are rounded to it; for the others this only covers flush to zero.
SUBNORMAL = {
    torch.bfloat16: 2.0**-126,
    torch.float16: 2.0**-25,
    torch.float32: 2.0**-126,
    torch.float64: 2.0**-1022,
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Errors and bounds of one comparison; `ok` when both errors are within their bounds.

    max_error, max_bound: of the worst row, at element `worst`. rms_error, rms_bound: of the whole.
    """

    max_error: float
    max_bound: float
    rms_error: float
    rms_bound: float
    worst: tuple[int, ...]

    @property
    def ok(self) -> bool:
        return self.max_error <= self.max_bound and self.rms_error <= self.rms_bound

    def __str__(self) -> str:
        return (
            f"max error {self.max_error:.3e} (bound {self.max_bound:.3e}) at {self.worst}, "
            f"RMS error {self.rms_error:.3e} (bound {self.rms_bound:.3e})"
        )


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to `dtype`."""
    return UNIT_ROUNDOFF[dtype]


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def compare(
    actual: torch.Tensor,
    oracle: torch.Tensor,
    dtype: torch.dtype,
    *,
    reference: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
) -> Comparison:
    """Errors of the finite elements against `K_REFERENCE · err(reference) + rounding`.

    actual: the result, any dtype. oracle: fp64 of the same shape. dtype: output dtype whose
    rounding is allowed. reference: the same-dtype reference's result; `None` when none exists
    (then the rounding alone is the bound). noise: fp64, the standard size of the inner roundings.

    The maximum is taken in every row (last axis) against that row's bound, so that the large values
    of a short request do not hide errors in a long one; the RMS is taken over everything.
    """
    assert actual.shape == oracle.shape, (actual.shape, oracle.shape)
    if not oracle.numel():
        return Comparison(0.0, 0.0, 0.0, 0.0, ())
    finite = oracle.isfinite()
    error = torch.where(finite, actual.double() - oracle, 0.0).abs()
    floor = K_OUTPUT * unit_roundoff(dtype) * torch.where(finite, oracle, 0.0).abs()
    floor = floor + SUBNORMAL[dtype]
    step = torch.zeros_like(floor) if noise is None else torch.where(finite, noise, 0.0)
    row_bound = (floor + K_NOISE_MAX * step).amax(-1)
    rms_bound = _rms(floor + K_NOISE_RMS * step)
    if reference is not None:
        of_reference = torch.where(finite, reference.double() - oracle, 0.0).abs()
        row_bound = row_bound + K_REFERENCE * of_reference.amax(-1)
        rms_bound += K_REFERENCE * _rms(of_reference)
    ratio = (error / row_bound.unsqueeze(-1)).nan_to_num(nan=math.inf, posinf=math.inf)
    worst = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
    return Comparison(
        float(error[worst]), float(row_bound[worst[:-1]]), _rms(error), rms_bound, worst
    )


def assert_close(
    actual: torch.Tensor,
    oracle: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    reference: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    label: str = "out",
) -> None:
    """Raise `AssertionError` unless `actual` is the oracle's value up to the one tolerance.

    Shape must agree, NaN and infinities must be at the same places (with sign), elements of rows
    that the oracle gives as exact zeros (`noise` 0 there) must be exact zeros, and max and RMS
    error must be within `compare`'s bounds. `dtype` defaults to `actual.dtype`.
    """
    dtype = actual.dtype if dtype is None else dtype
    if actual.shape != oracle.shape:
        raise AssertionError(f"{label}: shape {tuple(actual.shape)}, want {tuple(oracle.shape)}")
    got = actual.detach().double().to(oracle.device)
    _same_places(got.isnan(), oracle.isnan(), f"{label}: NaN", got, oracle)
    _same_places(got == math.inf, oracle == math.inf, f"{label}: +inf", got, oracle)
    _same_places(got == -math.inf, oracle == -math.inf, f"{label}: -inf", got, oracle)
    if noise is not None:
        exact = (noise == 0) & (oracle == 0)
        _same_places((got != 0) & exact, torch.zeros_like(exact), f"{label}: non-zero", got, oracle)
    result = compare(got, oracle, dtype, reference=reference, noise=noise)
    if not result.ok:
        raise AssertionError(
            f"{label}: {result}; got {got[result.worst].item():.7g}, "
            f"want {oracle[result.worst].item():.7g}"
        )


def assert_lse_close(
    actual: torch.Tensor,
    oracle: torch.Tensor,
    *,
    reference: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    label: str = "lse",
) -> None:
    """`assert_close` for a natural-log lse, which every route keeps in fp32; `-inf` in place."""
    if actual.dtype != torch.float32:
        raise AssertionError(f"{label}: dtype {actual.dtype}, want torch.float32")
    if noise is None:
        # Without a model of the scores: the log of a sum of fp32 terms is off by a few roundings of
        # the sum (relative, so absolute in the log) and of the largest score.
        noise = 4 * unit_roundoff(torch.float32) * (1 + oracle.abs())
    assert_close(actual, oracle, torch.float32, reference=reference, noise=noise, label=label)


def _same_places(
    got: torch.Tensor, want: torch.Tensor, what: str, actual: torch.Tensor, oracle: torch.Tensor
) -> None:
    wrong = got != want
    if wrong.any():
        first = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{what} in the wrong places: {int(wrong.sum())} of {wrong.numel()} elements, first at "
            f"{first}: got {actual[first].item()}, want {oracle[first].item()}"
        )
