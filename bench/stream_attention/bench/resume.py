"""Going on with the file of an earlier run: what it made is kept where it was made in the same way.

Rows of one file come from one device, one set of versions, one commit and one set of settings;
a run that differs is refused, and the file stays as it is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stream_attention.bench import json_text
from stream_attention.bench.campaign import Kept
from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.machine import Environment
from stream_attention.bench.results import Run, from_json
from stream_attention.core.errors import Faults

# What may be another in a run that goes on: how and when it began, how busy the machine was.
_FREE_FACTS = ("command", "load_average", "started_at")
# What chooses cases, contenders and pairs; those of the file are compared one by one.
_FREE_SETTINGS = ("suite", "routes", "peers", "paired")


def load(path: Path, flag: str = "--resume", nearest: str = "another --json") -> Run | None:
    """The run in a file; `None` without a file. Raises `ValueError` for what is no such file.

    flag, nearest: how the caller's messages call what named the file, and what to use instead.
    """
    try:
        return from_json(json_text.read(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{flag}: {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(
            f"{flag}: {path} is no file of this bench: {error}; use {nearest}"
        ) from None


def continued(
    earlier: Run | None, environment: Environment, cases: Iterable[AttentionCase]
) -> Environment:
    """The environment of a run: of one that goes on with the same cases, it began when, and by the
    command that, the file says.

    Rows that are kept would else be other rows of evidence, taken at another time. With other cases
    floors are measured anew, and then they are.
    """
    if earlier is None or {result.case for result in earlier.cases} != set(cases):
        return environment
    return dataclasses.replace(
        environment,
        **{name: getattr(earlier.environment, name) for name in ("command", "started_at")},
    )


def keep(
    earlier: Run,
    environment: Environment,
    settings: Mapping[str, Any],
    cases: Iterable[AttentionCase],
    contenders: Iterable[str],
) -> Kept:
    """Rows and pairs of `earlier` that this run need not make.

    Raises `ValueError` with everything that differs: facts of the environment, settings, and cases
    or contenders of the file that this run leaves out, whose rows would be lost.
    """
    faults = Faults()
    for field in dataclasses.fields(Environment):
        if field.name not in _FREE_FACTS:
            _compare(
                faults,
                field.name,
                getattr(earlier.environment, field.name),
                getattr(environment, field.name),
            )
    for name in sorted({*earlier.settings, *settings}.difference(_FREE_SETTINGS)):
        _compare(faults, f"--{name}", earlier.settings.get(name), settings.get(name))
    known_cases, names = set(cases), set(contenders)
    for result in earlier.cases:
        if result.case not in known_cases:
            faults.add("case", result.case.name, "is in the file and not in this run")
    made = {
        (result.case, row.contender): row
        for result in earlier.cases
        for row in result.rows
        if row.outcome != "not_run"
    }
    for name in dict.fromkeys(contender for _, contender in made):
        if name not in names:
            faults.add("contender", name, "is in the file and not in this run")
    faults.raise_if_any("--resume: the file of --json is of another run; use another file")
    return Kept(made, {(pair.case, pair.first, pair.second): pair for pair in earlier.pairs})


def _compare(faults: Faults, name: str, there: Any, here: Any) -> None:
    # As JSON has it: a tuple reads back as a list.
    same = json.dumps(there, sort_keys=True) == json.dumps(here, sort_keys=True)
    faults.require(same, name, there, f"is what the file has, and this run has {here!r}")
