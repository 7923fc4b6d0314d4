"""Lengths of requests as data: a small language that a flag, a case name and a JSON file share.

4096                     every request holds 4096 tokens
300,17,0                 one value a request
lognormal:4608:1.0:0     mean 4608 tokens, sigma 1.0 of the logarithm, seed 0
skewed                   one request of 64K tokens, the rest of 512
skewed:8192:64           one of 8192, the rest of 64
range:300:900:0          uniform integers 300 .. 900, seed 0
mixed:4:2560:4787:1.0:0  four requests of 2560, the rest lognormal:4787:1.0:0

They are also the language of query lengths: mixed:4:512:1:0:0 is four chunks of 512 and decodes.
"""

from __future__ import annotations

import difflib
import math
import random
from dataclasses import dataclass

from stream_attention.core.errors import Faults

KINDS = ("uniform", "list", "lognormal", "skewed", "range", "mixed")
# Here one request holds nearly all tokens; exp() of a draw overflows from about 100.
MAX_SIGMA = 10
MAX_TOKENS = 2**31 - 1
_FIELDS = {
    "uniform": ("N",),
    "lognormal": ("MEAN", "SIGMA", "SEED"),
    "skewed": ("LONG", "SHORT"),
    "range": ("LO", "HI", "SEED"),
    "mixed": ("NUM", "LONG", "MEAN", "SIGMA", "SEED"),
}
_EXAMPLES = {
    "uniform": (4096,),
    "lognormal": (4608, 1.0, 0),
    "skewed": (65536, 512),
    "range": (300, 900, 0),
    "mixed": (4, 2560, 4787, 1.0, 0),
}
_FORMS = (
    "N, a comma list, lognormal:MEAN:SIGMA:SEED, skewed[:LONG:SHORT], range:LO:HI:SEED, "
    "mixed:NUM:LONG:MEAN:SIGMA:SEED"
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths; `draw(batch)` gives the same list on every machine.

    kind: one of `KINDS`. numbers: uniform (n,); list: the lengths; lognormal (mean, sigma, seed);
    skewed (long, short); range (low, high, seed); mixed (num, long, mean, sigma, seed), the rest of
    which is what lognormal (mean, sigma, seed) draws for it. Raises `ValueError` with every fault.
    """

    kind: str
    numbers: tuple[float, ...]

    def __post_init__(self) -> None:
        faults = Faults()
        if self.kind not in KINDS:
            close = difflib.get_close_matches(str(self.kind), KINDS, n=1, cutoff=0.0)
            faults.add("kind", self.kind, f"must be one of {', '.join(KINDS)}", repr(close[0]))
        elif not isinstance(self.numbers, tuple):
            faults.add("numbers", self.numbers, "must be a tuple", "(4096,)")
        else:
            _check_numbers(self.kind, self.numbers, faults)
        faults.raise_if_any("Lengths")

    def __str__(self) -> str:
        shown = [f"{number:g}" if number < 1e6 else str(int(number)) for number in self.numbers]
        if self.kind in ("uniform", "list"):
            return ",".join(str(int(number)) for number in self.numbers)
        if self.kind == "skewed" and self.numbers == (65536, 512):
            return "skewed"
        return ":".join([self.kind, *shown])

    def draw(self, batch: int, name: str = "lengths") -> tuple[int, ...]:
        """`batch` lengths. A list must have that many entries, and mixed no more long ones.

        Raises `ValueError`, which calls the lengths `name`.
        """
        if self.kind == "uniform":
            return (int(self.numbers[0]),) * batch
        if self.kind == "list":
            if len(self.numbers) != batch:
                raise ValueError(
                    f"{name}={self}: has {len(self.numbers)} values, one a request is needed for "
                    f"batch={batch}; use --batch={len(self.numbers)}"
                )
            return tuple(int(number) for number in self.numbers)
        if self.kind == "skewed":
            long, short = self.numbers
            return (int(long), *(int(short),) * (batch - 1))
        if self.kind == "mixed" and self.numbers[0] > batch:
            raise ValueError(
                f"{name}={self}: has {int(self.numbers[0])} long requests, more than "
                f"batch={batch}; use --batch={int(self.numbers[0])}"
            )
        *_, seed = self.numbers
        source = random.Random(int(seed))
        if self.kind == "range":
            low, high = int(self.numbers[0]), int(self.numbers[1])
            return tuple(source.randint(low, high) for _ in range(batch))
        *first, mean, sigma, _ = self.numbers
        leading = (int(first[1]),) * int(first[0]) if first else ()
        return (*leading, *_lognormal(batch - len(leading), mean, sigma, source))


def _check_numbers(kind: str, numbers: tuple[float, ...], faults: Faults) -> None:
    """Faults of `numbers` as those of `kind`: how many, which numbers, in which range."""
    names = _FIELDS.get(kind, ("N",) * max(1, len(numbers)))
    if len(numbers) != len(names):
        rule = f"{kind} takes {len(names)}, {', '.join(names)}"
        faults.add("numbers", numbers, rule, _EXAMPLES.get(kind, (4096,)))
        return
    nearest = tuple(map(_nearest, names, numbers))
    if nearest != numbers or any(isinstance(number, bool) for number in numbers):
        limits = (f"{name} in {low}..{high}" for name in names for low, high in (_limits(name),))
        which = "ints, and any number as SIGMA" if "SIGMA" in names else "ints"
        rule = f"{kind} takes {which}: {', '.join(dict.fromkeys(limits))}"
        faults.add("numbers", numbers, rule, nearest)
    elif kind == "range" and numbers[0] > numbers[1]:
        swapped = (numbers[1], numbers[0], numbers[2])
        faults.add("numbers", numbers, "LO must be at most HI", swapped)


def _limits(name: str) -> tuple[int, int]:
    """The range of a field."""
    return 1 if name in ("MEAN", "LONG", "NUM") else 0, MAX_SIGMA if name == "SIGMA" else MAX_TOKENS


def _nearest(name: str, number: float) -> float:
    """The number that a field may hold which is nearest to `number`."""
    low, high = _limits(name)
    if not isinstance(number, (int, float)) or math.isnan(number):
        return low
    kept = min(max(number, low), high)
    return kept if name == "SIGMA" else round(kept)


def _lognormal(batch: int, mean: float, sigma: float, source: random.Random) -> tuple[int, ...]:
    """Lognormal draws scaled so that their sum is batch · mean up to rounding, each at least 1."""
    raw = [source.lognormvariate(0.0, sigma) for _ in range(batch)]
    scale = batch * mean / sum(raw) if raw else 1.0
    return tuple(max(1, round(value * scale)) for value in raw)


def uniform(tokens: int) -> Lengths:
    """Every request holds `tokens`."""
    return Lengths("uniform", (tokens,))


def parse_lengths(text: str) -> Lengths:
    """The language of this module's docstring; `ValueError` names rule and nearest value."""
    if not isinstance(text, str):
        raise ValueError(f"text={text!r}: must be a str, one of: {_FORMS}; use '4096'")
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
    names = _FIELDS[head]
    example = ":".join(str(number) for number in _EXAMPLES[head])
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
    low, high = _limits(name)
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
        if not 0 <= number <= MAX_TOKENS:
            nearest = max(0, min(number, MAX_TOKENS))
            raise ValueError(f"{number} must be in 0..{MAX_TOKENS}; use {nearest}")
        numbers.append(number)
    return Lengths("uniform" if len(numbers) == 1 else "list", tuple(numbers))
