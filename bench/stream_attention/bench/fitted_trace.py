"""Traces drawn from distributions that are fitted to a trace, stated, and the same everywhere.

gaps between arrivals    Weibull(scale, shape); shape 1 is a Poisson process, below 1 is bursty
prompt, output tokens    exp(mu + sigma · z) rounded, at least 1 and at most the longest seen; the
                         two z are standard normal with correlation rho
no output                with the share seen, apart from everything else

How well they fit is stated beside them as Kolmogorov-Smirnov distances: the largest difference of
the two distribution functions, 0 … 1. Draws use Mersenne Twister bits, correctly rounded decimal
`exp` and `ln` and no mathematics library, so a seed gives the same requests on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from typing import Any

from stream_attention.bench.traces import MAX_TOKENS, Trace, TraceRequest
from stream_attention.core.errors import Faults
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int
from stream_attention.planner.json_keys import check_keys, check_schema

SCHEMA, VERSION = "stream_attention.fitted_trace", 1
_DIGITS = 9  # of the fitted numbers: beyond them, logarithms of two machines may differ
_EXACT = Context(prec=25, rounding=ROUND_HALF_EVEN)
# Beyond any lengths of int32: they lie in 0 … 21.5 as logarithms, so they deviate by 10.8 at most.
_LARGEST_MU, _LARGEST_SIGMA = 22.0, 11.0
# Weibull shapes between which a fit looks; gaps outside of them are taken for the nearest.
_SHAPES = (0.1, 20.0)
_MOST_GAP_US = 10**15  # 30 years: what exp gives at the far end of a bursty fit


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class FittedTrace:
    """Distributions of a trace; `generate` draws from them.

    source: the trace that they are fitted to, of num_fitted requests. gap_scale_us, gap_shape:
    Weibull. prompt_mu, prompt_sigma, output_mu, output_sigma: of the natural logarithms of tokens.
    correlation: of those two. max_prompt, max_output: longest seen, tokens. silent_share: requests
    without output. ks_gap, ks_prompt, ks_output: distances between trace and fit.
    Raises `ValueError` with every broken rule.
    """

    source: str
    num_fitted: int
    gap_scale_us: float
    gap_shape: float
    prompt_mu: float
    prompt_sigma: float
    max_prompt: int
    output_mu: float
    output_sigma: float
    max_output: int
    correlation: float
    silent_share: float
    ks_gap: float
    ks_prompt: float
    ks_output: float

    def __post_init__(self) -> None:
        check_rules(self, _RULES)

    __repr__ = evaluable_repr

    def generate(self, num_requests: int, seed: int) -> Trace:
        """`num_requests` requests, the same for the same seed on every machine."""
        faults = Faults()
        whole = is_int(num_requests) and num_requests >= 1
        faults.require(whole, "num_requests", num_requests, "must be an int >= 1", 1000)
        faults.require(is_int(seed), "seed", seed, "must be an int", 0)
        faults.raise_if_any("generate")
        with localcontext(_EXACT):
            requests = self._draw(num_requests, random.Random(seed))
        name = f"fitted to {self.source}, seed {seed}"
        return Trace(name, "fitted", tuple(requests), notes=(repr(self),))

    def _draw(self, num_requests: int, source: random.Random) -> list[TraceRequest]:
        clock_us, requests = 0, []
        rest = math.sqrt(1 - self.correlation * self.correlation)
        for index in range(num_requests):
            gap = self._gap_us(source)
            clock_us += gap if index else 0
            first, second = _normal_pair(source)
            other = self.correlation * first + rest * second
            prompt = _tokens(self.prompt_mu, self.prompt_sigma, first, self.max_prompt)
            output = _tokens(self.output_mu, self.output_sigma, other, self.max_output)
            if source.random() < self.silent_share:
                output = 0
            requests.append(TraceRequest(clock_us, prompt, output))
        return requests

    def _gap_us(self, source: random.Random) -> int:
        """`scale · (-ln u)^(1 / shape)`, rounded."""
        if not self.gap_scale_us:
            return 0
        depth = -Decimal(1 - source.random()).ln()
        if depth <= 0:  # u was 1
            return 0
        gap = Decimal(self.gap_scale_us) * (depth.ln() / Decimal(self.gap_shape)).exp()
        return int(min(gap, Decimal(_MOST_GAP_US)).to_integral_value())

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` takes; every key is written."""
        return {"schema": SCHEMA, "version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FittedTrace:
        """The inverse of `to_json`. Raises `ValueError` that names unknown and missing keys."""
        faults = Faults()
        names = tuple(field.name for field in fields(cls))
        if check_schema(faults, data, SCHEMA, VERSION, "fitted_trace"):
            check_keys(faults, data, ("schema", "version", *names), "fitted_trace")
        faults.raise_if_any("FittedTrace")
        return cls(**{name: data[name] for name in names})


def _number(name: str, low: float, high: float) -> Rule:
    return Rule(
        name,
        f"must be a number in {low:g}..{high:g}",
        lambda f: not isinstance(getattr(f, name), bool) and low <= getattr(f, name) <= high,
        lambda f: min(max(getattr(f, name), low), high),
    )


def _count(name: str, low: int) -> Rule:
    return Rule(
        name,
        f"must be an int in {low}..{MAX_TOKENS}",
        lambda f: is_int(getattr(f, name)) and low <= getattr(f, name) <= MAX_TOKENS,
        lambda f: min(max(getattr(f, name), low), MAX_TOKENS),
    )


_RULES = (
    Rule("source", "must be a str", lambda f: isinstance(f.source, str), lambda f: "'trace.csv'"),
    _count("num_fitted", 2),
    _number("gap_scale_us", 0, _MOST_GAP_US),
    _number("gap_shape", *_SHAPES),
    *(_number(name, 0, _LARGEST_MU) for name in ("prompt_mu", "output_mu")),
    *(_number(name, 0, _LARGEST_SIGMA) for name in ("prompt_sigma", "output_sigma")),
    *(_count(name, 1) for name in ("max_prompt", "max_output")),
    _number("correlation", -1, 1),
    *(_number(name, 0, 1) for name in ("silent_share", "ks_gap", "ks_prompt", "ks_output")),
)


def fit(trace: Trace) -> FittedTrace:
    """The distributions of a trace, by moments: of the gaps, and of the logarithms of lengths.

    The correlation is that of requests with output. Raises `ValueError` for fewer than 2 requests,
    for a trace where no request has output, and for a gap between arrivals above 30 years.
    """
    requests = trace.requests
    spoken = [request for request in requests if request.output_tokens]
    faults = Faults()
    faults.require(len(requests) >= 2, "trace", f"{len(requests)} requests", "needs 2 or more", 100)
    faults.require(
        bool(spoken), "trace", "no output in any request", "needs outputs to fit", "1 or more"
    )
    arrivals = [request.arrival_us for request in requests]
    gaps = [late - early for early, late in zip(arrivals, arrivals[1:], strict=False)]
    for index, gap in enumerate(gaps, 1):
        if gap > _MOST_GAP_US:  # before floats, which may not hold it
            rule = f"must be at most {_MOST_GAP_US} us, 30 years, as those that are drawn"
            faults.add("trace", f"gap before request {index}", rule, "a part of the trace")
            break
    faults.raise_if_any("fit")
    scale, shape = _fit_gaps(gaps)
    prompts = [request.prompt_tokens for request in requests]
    outputs = [request.output_tokens for request in spoken]
    prompt_mu, prompt_sigma = _moments([math.log(n) for n in prompts])
    output_mu, output_sigma = _moments([math.log(n) for n in outputs])
    return FittedTrace(
        source=trace.name,
        num_fitted=len(requests),
        gap_scale_us=scale,
        gap_shape=shape,
        prompt_mu=prompt_mu,
        prompt_sigma=prompt_sigma,
        max_prompt=max(prompts),
        output_mu=output_mu,
        output_sigma=output_sigma,
        max_output=max(outputs),
        correlation=_correlation(spoken),
        silent_share=_rounded(1 - len(spoken) / len(requests)),
        ks_gap=_distance(gaps, lambda n: _weibull(n + 0.5, scale, shape)),
        ks_prompt=_distance(prompts, _lognormal(prompt_mu, prompt_sigma, max(prompts))),
        ks_output=_distance(outputs, _lognormal(output_mu, output_sigma, max(outputs))),
    )


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    return _rounded(mean), _rounded(math.sqrt(variance))


def _correlation(requests: Sequence[TraceRequest]) -> float:
    """Pearson's, of the logarithms; 0 where one of the two never changes."""
    pairs = [(math.log(r.prompt_tokens), math.log(r.output_tokens)) for r in requests]
    (x, sx), (y, sy) = (_moments(column) for column in zip(*pairs, strict=True))
    if sx < 1e-9 or sy < 1e-9:
        return 0.0
    covariance = math.fsum((a - x) * (b - y) for a, b in pairs) / len(pairs)
    return _rounded(min(max(covariance / (sx * sy), -1.0), 1.0))


def _fit_gaps(gaps: Sequence[int]) -> tuple[float, float]:
    """Weibull `(scale, shape)` with the gaps' mean and coefficient of variation."""
    mean = math.fsum(gaps) / len(gaps)
    if not mean:
        return 0.0, 1.0
    square = math.fsum((gap / mean - 1) ** 2 for gap in gaps) / len(gaps)
    low, high = _SHAPES
    for _ in range(80):  # the coefficient falls where the shape grows
        middle = (low + high) / 2
        ratio = math.exp(math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle))
        low, high = (middle, high) if ratio - 1 > square else (low, middle)
    shape = _rounded((low + high) / 2)
    return _rounded(mean / math.gamma(1 + 1 / shape)), shape


def _weibull(gap: float, scale: float, shape: float) -> float:
    return -math.expm1(-((gap / scale) ** shape)) if scale and gap > 0 else float(gap >= 0)


def _lognormal(mu: float, sigma: float, largest: int) -> Callable[[int], float]:
    """The distribution function of `_tokens`."""

    def below(tokens: int) -> float:
        if tokens < 1:
            return 0.0
        if tokens >= largest:
            return 1.0
        depth = math.log(tokens + 0.5) - mu
        if not sigma:
            return float(depth >= 0)
        return 0.5 * math.erfc(-depth / (sigma * math.sqrt(2)))

    return below


def _distance(values: Sequence[int], below: Callable[[int], float]) -> float:
    """Kolmogorov-Smirnov: both functions are steps at integers, so they differ most at a value
    that was seen or just before one.
    """
    ordered = sorted(values)
    count, largest, done = len(ordered), 0.0, 0
    while done < count:
        value, before = ordered[done], done
        while done < count and ordered[done] == value:
            done += 1
        largest = max(
            largest,
            abs(below(value) - done / count),
            abs(below(value - 1) - before / count),
        )
    return _rounded(min(largest, 1.0))


def _normal_pair(source: random.Random) -> tuple[float, float]:
    """Two standard normal numbers by Marsaglia's polar method (1964)."""
    while True:
        x, y = 2 * source.random() - 1, 2 * source.random() - 1
        square = x * x + y * y
        if 0 < square < 1:
            factor = float((-2 * Decimal(square).ln() / Decimal(square)).sqrt())
            return x * factor, y * factor


def _tokens(mu: float, sigma: float, z: float, largest: int) -> int:
    """`exp(mu + sigma · z)` rounded, in 1 … largest."""
    value = Decimal(mu + sigma * z).exp().to_integral_value()
    return int(min(max(value, Decimal(1)), Decimal(largest)))
