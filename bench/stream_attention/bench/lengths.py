"""KV lengths as data: a small language that a flag, a case name and a JSON file share.

4096                     every request holds 4096 tokens
300,17,0                 one value a request
lognormal:4608:1.0:0     mean 4608 tokens, sigma 1.0 of the logarithm, seed 0
skewed                   one request of 64K tokens, the rest of 512
skewed:8192:64           one of 8192, the rest of 64
range:300:900:0          uniform integers 300 .. 900, seed 0
"""

from __future__ import annotations

import difflib
import random
from dataclasses import dataclass

KINDS = ("uniform", "list", "lognormal", "skewed", "range")
# Here one request holds nearly all tokens; exp() of a draw overflows from about 100.
MAX_SIGMA = 10
_FORMS = "N, a comma list, lognormal:MEAN:SIGMA:SEED, skewed[:LONG:SHORT], range:LO:HI:SEED"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of KV lengths; `draw(batch)` gives the same list on every machine.

    kind: one of `KINDS`. numbers: uniform (n,); list: the lengths; lognormal (mean, sigma, seed);
    skewed (long, short); range (low, high, seed).
    """

    kind: str
    numbers: tuple[float, ...]

    def __str__(self) -> str:
        shown = [f"{number:g}" if number < 1e6 else str(int(number)) for number in self.numbers]
        if self.kind in ("uniform", "list"):
            return ",".join(str(int(number)) for number in self.numbers)
        if self.kind == "skewed" and self.numbers == (65536, 512):
            return "skewed"
        return ":".join([self.kind, *shown])

    def draw(self, batch: int) -> tuple[int, ...]:
        """`batch` lengths. A list must have that many entries (or one): else `ValueError`."""
        if self.kind == "uniform":
            return (int(self.numbers[0]),) * batch
        if self.kind == "list":
            if len(self.numbers) != batch:
                raise ValueError(
                    f"lengths={self}: has {len(self.numbers)} values, one a request is needed for "
                    f"batch={batch}; use --batch={len(self.numbers)}"
                )
            return tuple(int(number) for number in self.numbers)
        if self.kind == "skewed":
            long, short = self.numbers
            return (int(long), *(int(short),) * (batch - 1))
        *_, seed = self.numbers
        source = random.Random(int(seed))
        if self.kind == "range":
            low, high = int(self.numbers[0]), int(self.numbers[1])
            return tuple(source.randint(low, high) for _ in range(batch))
        return _lognormal(batch, self.numbers[0], self.numbers[1], source)


def _lognormal(batch: int, mean: float, sigma: float, source: random.Random) -> tuple[int, ...]:
    """Lognormal draws scaled so that their sum is batch · mean up to rounding, each at least 1."""
    raw = [source.lognormvariate(0.0, sigma) for _ in range(batch)]
    scale = batch * mean / sum(raw)
    return tuple(max(1, round(value * scale)) for value in raw)


def uniform(tokens: int) -> Lengths:
    """Every request holds `tokens`."""
    return Lengths("uniform", (tokens,))


def parse_lengths(text: str) -> Lengths:
    """The language of this module's docstring; `ValueError` names rule and nearest value."""
    head, _, rest = text.strip().partition(":")
    if not head:
        raise ValueError(f"must be one of: {_FORMS}; use 4096")
    if head[0].isdigit() or head[0] in "-+":
        return _parse_list(text.strip())
    if head not in KINDS[2:]:
        close = difflib.get_close_matches(head, KINDS[2:], n=1, cutoff=0.0)
        raise ValueError(f"must be one of: {_FORMS}; use {close[0]}")
    fields = rest.split(":") if rest else []
    if head == "skewed" and not fields:
        return Lengths("skewed", (65536, 512))
    names = {
        "lognormal": ("MEAN", "SIGMA", "SEED"),
        "skewed": ("LONG", "SHORT"),
        "range": ("LO", "HI", "SEED"),
    }[head]
    example = {"lognormal": "4608:1.0:0", "skewed": "65536:512", "range": "300:900:0"}[head]
    if len(fields) != len(names):
        raise ValueError(
            f"{head} takes {':'.join(names)}, got {len(fields)} fields; use {head}:{example}"
        )
    numbers = []
    for name, field in zip(names, fields, strict=True):
        numbers.append(_parse_number(head, name, field))
    if head == "range" and numbers[0] > numbers[1]:
        raise ValueError(
            f"LO={numbers[0]:g} must be at most HI={numbers[1]:g}; "
            f"use range:{numbers[1]:g}:{numbers[0]:g}:{numbers[2]:g}"
        )
    return Lengths(head, tuple(numbers))


def _parse_number(head: str, name: str, field: str) -> float:
    fractional = name == "SIGMA"
    try:
        number = float(field) if fractional else int(field)
    except ValueError:
        rule = "a number" if fractional else "an int"
        raise ValueError(f"{head}: {name}={field!r} must be {rule}; use 1") from None
    low = 1 if name in ("MEAN", "LONG") else 0
    high = MAX_SIGMA if fractional else 2**31 - 1
    if not low <= number <= high:  # also false for NaN
        nearest = high if number > high else low
        raise ValueError(f"{head}: {name}={field} must be in {low}..{high}; use {nearest}")
    return number


def _parse_list(text: str) -> Lengths:
    numbers = []
    for field in text.split(","):
        try:
            number = int(field)
        except ValueError:
            raise ValueError(f"{field!r} is not an int; use 4096, or one int a request") from None
        if not 0 <= number < 2**31:
            raise ValueError(
                f"{number} must be in 0..2147483647; use {max(0, min(number, 2**31 - 1))}"
            )
        numbers.append(number)
    return Lengths("uniform" if len(numbers) == 1 else "list", tuple(numbers))
