"""Which phase databases a device may be judged by, and what they say of a problem on it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stream_attention.core.device import DeviceFacts
from stream_attention.core.errors import Faults
from stream_attention.core.problem import AttentionProblem
from stream_attention.planner import cost_model
from stream_attention.planner.evidence import Fingerprint
from stream_attention.planner.model_index import RouteEstimate
from stream_attention.planner.phase_db import PhaseDatabase, load, shipped

_ACCEPTED = "must be None (the shipped ones), a path, a PhaseDatabase, or a list or tuple of these"


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What one phase database says of a problem, route by route.

    database: `None` where no database is of the device; `why` then says so. family: the problem's.
    """

    why: str = ""
    database: PhaseDatabase | None = None
    family: str = ""
    estimates: Mapping[str, RouteEstimate] = field(default_factory=dict)

    def inside(self, route: str) -> RouteEstimate | None:
        """The route's estimate, where the problem lies among what was measured of it."""
        found = self.estimates.get(route)
        return found if found is not None and found.inside else None

    def why_not(self, route: str) -> str:
        """Why the route has no estimate from evidence here."""
        if self.why or not self.family:
            return self.why
        if route in self.estimates:
            return self.estimates[route].why_outside
        if self.estimates:
            return f"the route was not measured on problems of this family: {self.family}"
        return f"no problem of this family was measured: {self.family}"


NOTHING = Found("no route is legal, so no evidence was asked for")


def _look_up(database: PhaseDatabase, problem: AttentionProblem, routes: Collection[str]) -> Found:
    family = cost_model.family_of(problem)
    try:
        estimates = {each.route: each for each in database.lookup(problem, routes, family)}
    except Exception as error:  # a broken database does not harm a call that a route can serve
        why = f"the phase database of {database.arch} is broken: {type(error).__name__}: {error}"
        return Found(why, database, family)
    return Found("", database, family, estimates)


class Databases:
    """The phase databases that routes are ranked by, in the order in which they are asked.

    own: the caller's. with_shipped: those inside the wheel come after them.

    A database is asked for the device that it was measured on alone, whatever the versions of the
    software: times of one device say nothing of another's. One database makes a whole ranking: the
    first with a legal route that was measured near the problem. May be shared between threads.
    """

    __slots__ = ("_of_device", "own", "with_shipped")

    def __init__(self, own: Sequence[PhaseDatabase] = (), *, with_shipped: bool = True) -> None:
        self.own = tuple(own)
        self.with_shipped = with_shipped
        self._of_device: dict[DeviceFacts, tuple[tuple[PhaseDatabase, ...], str]] = {}

    def __reduce__(self) -> Any:
        """Shipped ones are those of the process that loads it."""
        if self is SHIPPED:
            return "SHIPPED"
        return _restored, (self.own, self.with_shipped)

    def consult(
        self, problem: AttentionProblem, device: DeviceFacts, routes: Collection[str]
    ) -> Found:
        """What is known of `problem`, of which `routes` are legal, on `device`."""
        databases, why = self.of(device)
        first: Found | None = None
        for database in databases:
            found = _look_up(database, problem, routes)
            if any(found.inside(route) is not None for route in routes):
                return found
            first = found if first is None else first
        return Found(why) if first is None else first

    def of(self, device: DeviceFacts) -> tuple[tuple[PhaseDatabase, ...], str]:
        """The databases of `device`; where there is none, why."""
        known = self._of_device.get(device)
        if known is None:
            known = self._of_device[device] = self._search(device)
        return known

    def _search(self, device: DeviceFacts) -> tuple[tuple[PhaseDatabase, ...], str]:
        if not (self.own or self.with_shipped):
            return (), "phase_db=(): no evidence is used"
        every = [each for each in self.own if each.arch == device.arch]
        fault = ""
        if self.with_shipped:
            try:
                last = shipped(device.arch)
            except (OSError, ValueError) as error:
                fault, last = f"the shipped phase database is broken: {error}", None
            every += [] if last is None else [last]
        covering = tuple(each for each in every if _is_of(each, device))
        if covering:
            return covering, ""
        if fault:
            return (), fault
        if not every:
            return (), f"there is no phase database for {device.arch}"
        measured = {each.environment.device: None for each in every if each.environment}
        if not measured:
            return (), f"the phase database of {device.arch} has no evidence"
        here = device.name
        if any(each.environment and each.environment.device == here for each in every):
            measured = {_sized_name(each.environment): None for each in every if each.environment}
            here = f"{device.name} of {device.num_sms} SMs"
        return (), (
            f"evidence of {', '.join(measured)} is not used for {here}: times of one device say "
            "nothing of another's"
        )


def _restored(own: tuple[PhaseDatabase, ...], with_shipped: bool) -> Databases:
    return Databases(own, with_shipped=with_shipped)


def _is_of(database: PhaseDatabase, device: DeviceFacts) -> bool:
    """Measured on such a device: of the same name and, as a part of one may bear it, as large."""
    measured = database.environment
    return measured is not None and (measured.device, measured.num_sms) == (
        device.name,
        device.num_sms,
    )


def _sized_name(measured: Fingerprint) -> str:
    return f"{measured.device} of {measured.num_sms} SMs"


SHIPPED = Databases()
"""The databases inside the wheel: what one-shot calls use, and engines unless told otherwise."""


def databases_of(faults: Faults, phase_db: Any) -> Databases:
    """The databases that an engine's `phase_db` means; what is wrong with it goes to `faults`.

    Files are read now, and not looked at again.
    """
    if phase_db is None:
        return SHIPPED
    if isinstance(phase_db, (str, os.PathLike, PhaseDatabase)):
        named = {"phase_db": phase_db}
    elif isinstance(phase_db, (list, tuple)):
        named = {f"phase_db[{index}]": each for index, each in enumerate(phase_db)}
    else:
        faults.add("phase_db", phase_db, f"{_ACCEPTED}; () is none at all", "None")
        return SHIPPED
    own = [_opened(faults, name, each) for name, each in named.items()]
    return Databases([each for each in own if each is not None], with_shipped=bool(own))


def _opened(faults: Faults, name: str, given: Any) -> PhaseDatabase | None:
    if isinstance(given, PhaseDatabase):
        return given
    if not isinstance(given, (str, os.PathLike)):
        faults.add(name, given, "must be a path or a PhaseDatabase", "None")
        return None
    path = os.fspath(given)
    try:
        return load(Path(os.fsdecode(path)))
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        what = str(error).removeprefix(f"{path}: ")
    faults.add(name, path, what)
    return None
