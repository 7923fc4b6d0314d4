"""Where the time of a run goes: seconds by part, from processes that work one at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

PARTS = ("read curve", "start-up", "warm-up", "inputs", "oracle", "timing")


@dataclass(slots=True)
class Spent:
    """Seconds by part, one of `PARTS`. clock: seconds; replaced in tests."""

    seconds: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    @contextlib.contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Adds the time of the block to `part`, also where it raises."""
        begin = self.clock()
        try:
            yield
        finally:
            self.add({part: self.clock() - begin})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add what was spent elsewhere."""
        for part, value in seconds.items():
            if part not in PARTS:
                raise ValueError(f"part={part!r}: must be one of {', '.join(PARTS)}; use 'timing'")
            self.seconds[part] = self.seconds.get(part, 0.0) + value

    def line(self, total: float) -> str:
        """`time    431 s: read curve 6.0 s, …, the rest 3.1 s`; total: of the whole run."""
        parts = [(part, self.seconds[part]) for part in PARTS if part in self.seconds]
        rest = max(0.0, total - sum(value for _, value in parts))
        shown = ", ".join(f"{part} {value:.1f} s" for part, value in (*parts, ("the rest", rest)))
        return f"time    {total:.0f} s: {shown}"
