"""What choosing a route by evidence costs: `rank` over a phase database, nothing remembered."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stream_attention.bench.timing import Timing, measure_host
from stream_attention.core.device import DeviceFacts
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import Registry, default_registry
from stream_attention.planner.databases import Databases
from stream_attention.planner.phase_db import ARCHS, PhaseDatabase, shipped
from stream_attention.planner.ranking import rank


@dataclass(frozen=True, slots=True)
class ChoiceCost:
    """timing: of one choice, `None` where it could not be measured; `missing` then says why.

    note: how large the database is.
    """

    timing: Timing | None
    missing: str = ""
    note: str = ""


def measure_choice(
    *, repeats: int, samples: int, database: PhaseDatabase | None = None
) -> ChoiceCost:
    """Ranking every route on a measured problem, by what was measured; no device is needed.

    Routes that were measured are legal here whatever their rules say of this machine, which are
    asked all the same. database: `None` = the one inside the wheel that has most cells.
    """
    if database is None:
        found = [each for each in map(shipped, ARCHS) if each is not None]
        if not found:
            return ChoiceCost(None, "there is no phase database in the wheel")
        database = max(found, key=lambda each: len(each.cells))
    where = database.environment
    if where is None:
        return ChoiceCost(None, f"the phase database of {database.arch} has no evidence")
    number = int(database.arch.removeprefix("sm_"))
    device = DeviceFacts("cuda", where.device, 0, divmod(number, 10), where.num_sms, where.l2_bytes)
    databases, registry = Databases([database], with_shipped=False), _as_there(database)

    def choose(problem: AttentionProblem) -> bool:
        """Whether evidence chose."""
        candidates = rank(problem, device, registry, databases=databases).candidates
        return bool(candidates) and candidates[0].measured

    for decision in database.cells:
        problem = decision.cell.problem
        if choose(problem):
            timing = measure_host(
                functools.partial(choose, problem), repeats=repeats, samples=samples
            )
            size = f"{len(database.cells)} cells, {len(database.models)} models"
            return ChoiceCost(timing, note=size)
    return ChoiceCost(None, f"no cell of the phase database of {database.arch} has a model")


def _as_there(database: PhaseDatabase) -> Registry:
    """The routes of this process, those that were measured with rules that are always met."""
    measured = {model.route for model in database.models}
    registry = Registry(discover=False)
    for record in default_registry().attention_records():
        if record.route in measured:
            rules = tuple(
                dataclasses.replace(rule, reason=_unheard(rule.reason)) for rule in record.rules
            )
            record = dataclasses.replace(record, rules=rules)
        registry.register_attention(record)
    return registry


def _unheard(reason: Callable[..., str | None]) -> Callable[..., None]:
    """The rule's work without its verdict."""

    def ask(problem: Any, device: Any) -> None:
        reason(problem, device)

    return ask
