"""What an import costs over `import torch`: fresh processes, as many as their time limit holds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from stream_attention.bench.timing import Timing

# All fresh processes of a run together. One takes 2 s where the files of torch are cached and more
# than 45 s where its disk is cold; there the program's own start takes as long, and everything else
# that host_cost measures 15 s at most, which leaves it below two minutes.
MAX_SECONDS = 55.0


@dataclass(frozen=True, slots=True)
class ImportTimes:
    """Of one module, alone and with a name looked up in it.

    alone, with_name: one sample a process, in microseconds; `None` where no process ended in time.
    note: why samples are fewer than asked, or missing; "" where none is.
    """

    alone: Timing | None
    with_name: Timing | None
    note: str = ""


def measure_import(
    module: str,
    name: str,
    *,
    samples: int = 5,
    max_seconds: float = MAX_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> ImportTimes:
    """Times of `import module`, and of that and `module.name`, from where torch is imported.

    Each sample is a fresh process with this one's import path. The first is always begun, another
    one where the longest before it still fits into `max_seconds`; what takes longer is ended.
    clock: seconds; replaced in tests. Raises `subprocess.CalledProcessError` for an import that
    fails.
    """
    program = (
        "import time, torch; start = time.perf_counter(); "
        f"import {module}; alone = time.perf_counter() - start; "
        f"{module}.{name}; print(alone, time.perf_counter() - start)"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    taken: list[tuple[float, float]] = []
    begin, longest = clock(), 0.0
    while len(taken) < samples:
        start = clock()
        left = max_seconds - (start - begin)
        if taken and left < longest:
            break
        try:
            done = subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                check=True,
                timeout=left,
            )
        except subprocess.TimeoutExpired:
            break
        alone, with_name = done.stdout.split()[-2:]
        taken.append((float(alone) * 1e6, float(with_name) * 1e6))
        longest = max(longest, clock() - start)
    if not taken:
        note = f"a fresh process that imports torch takes more than {max_seconds:g} s"
        return ImportTimes(None, None, note)
    few = f"{len(taken)} of {samples} samples: a process takes {longest:.0f} s"
    first, second = (Timing(times, "host") for times in zip(*taken, strict=True))
    return ImportTimes(first, second, few if len(taken) < samples else "")
