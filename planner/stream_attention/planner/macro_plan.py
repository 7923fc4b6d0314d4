"""Macro plans: one launch for a mixed batch, one a phase, or one a cohort of like query lengths."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core.backend_plan import Rejection
from stream_attention.core.cache import CACHE_CLASSES, KVCache
from stream_attention.core.cache_checks import tensors_of
from stream_attention.core.describe import Described, describe
from stream_attention.core.device import DeviceFacts, device_facts
from stream_attention.core.errors import Faults, UnsupportedProblem, check_both, shape_of
from stream_attention.core.ir import is_int
from stream_attention.core.launch import BoundTensors
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import Registry
from stream_attention.core.tile_plan import AttentionTilePlan
from stream_attention.core.validate import MAX_LISTED
from stream_attention.core.validate import validate as validate_contents
from stream_attention.planner.cohorts import MACROS, Cohort, Macro, offsets, to_run
from stream_attention.planner.dispatch import Built, build, home_of, info_of
from stream_attention.planner.explain import explain
from stream_attention.planner.macro_launch import MacroLaunch, Part, uniform_form
from stream_attention.planner.modes import PolicyIdentity, decide_with
from stream_attention.planner.plan import AttentionPlan
from stream_attention.planner.ranking import Ranking
from stream_attention.planner.roofline import TimedCandidate, Work, prune

Rank = Callable[[AttentionProblem, DeviceFacts], Ranking]
"""The engine's own ranking of routes."""

# Keywords of a call, less those that a macro plan sets itself.
_OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(describe).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in ("max_qo_len", "allocate", "flags")
)
AUTO = "auto"
MACRO_NAMES = (AUTO, *(macro.name for macro in MACROS))
# What a batch-invariant batch gets: its classes follow from each request's own number of queries.
INVARIANT_MACRO = "phases"
_MAX_ROWS = (1 << 31) - 1


class MacroPlan(AttentionPlan):
    """A plan whose launch is that of several cohorts, each by its own route; see `AttentionPlan`.

    Which request is in which cohort is fixed, as are the numbers of queries. What may change in
    place under a plan may change under this one: q, K, V, page table, lengths. `qo_indptr` is the
    plan's own. Scratch counts what is gathered for scattered cohorts.
    """

    __slots__ = ("_parts", "qo_lens")

    _instead = "plan again over the copied tensors: engine.plan_batch(...)"

    qo_lens: tuple[int, ...]

    def __init__(
        self,
        described: Described,
        tile_plan: AttentionTilePlan,
        built: Built,
        given: dict[str, torch.Tensor | None],
        qo_lens: tuple[int, ...],
    ) -> None:
        super().__init__(described, tile_plan, built, given)
        assert isinstance(built.launch, MacroLaunch)
        self._parts: tuple[tuple[Part, Built], ...] = tuple(
            zip(built.launch.parts, built.launch.built, strict=True)
        )
        self.qo_lens = qo_lens

    @property
    def cohorts(self) -> tuple[Cohort, ...]:
        """The cohorts that run, in the order in which they do; idle requests are in none."""
        return tuple(part.cohort for part, _ in self._parts)

    @property
    def routes(self) -> tuple[str, ...]:
        """Registry name of each cohort's route."""
        return tuple(built.backend_plan.route for _, built in self._parts)

    def explain(self, format: str = "text") -> str:
        """The choice and the other macro plans with their reasons; then every cohort as a plan.

        format: as in `AttentionPlan.explain`; the JSON object has a list `cohorts` besides, each
        with its `cohort`, its `requests` and the object of its plan.
        """
        # The candidates of each cohort stand with it; first come the other macro plans alone.
        others = self.backend_plan.rejections[: len(MACROS) - 1]
        chosen = dataclasses.replace(self.backend_plan, rejections=others)
        whole = explain(self.problem, self.tile_plan, chosen, self.info, self._ranking, format)
        own = [
            explain(
                part.problem,
                AttentionTilePlan.for_problem(part.problem),
                built.backend_plan,
                built.info,
                built.ranking,
                format,
            )
            for part, built in self._parts
        ]
        if format == "json":
            cohorts = [
                {
                    "cohort": part.cohort.name,
                    "requests": list(part.cohort.requests),
                    "plan": json.loads(text),
                }
                for (part, _), text in zip(self._parts, own, strict=True)
            ]
            return json.dumps({**json.loads(whole), "cohorts": cohorts}, indent=1, allow_nan=False)
        parts = zip(self._parts, own, strict=True)
        texts = (f"{_heading(part)}\n{textwrap.indent(text, '  ')}" for (part, _), text in parts)
        return "\n".join((whole, *texts))


def _heading(part: Part) -> str:
    requests, place = part.cohort.requests, part.place
    shown = ", ".join(map(str, requests[:MAX_LISTED]))
    more = f" and {len(requests) - MAX_LISTED} more" if len(requests) > MAX_LISTED else ""
    lies = "gathered" if place.requests_gathered else "in place"
    if part.pages is not None:
        lies += ", the contiguous cache read as one page a request"
    return f"cohort {part.cohort.name}: requests {shown or 'none'}{more}; {lies}"


@dataclass(frozen=True, slots=True, eq=False)
class _Alternative:
    """A macro with its launch, or with the reason why there is none."""

    macro: Macro
    launch: MacroLaunch | None = None
    capturable: bool = True
    reason: str = ""

    @property
    def name(self) -> str:
        """As it is listed among candidates."""
        return f"macro({self.macro.name})"

    @property
    def order(self) -> tuple[bool, float]:
        """Smaller is better: what a graph can hold, then the sum of estimates."""
        assert self.launch is not None
        estimate = self.launch.backend_plan.estimate_us
        known = estimate is not None and math.isfinite(estimate)
        return not self.capturable, float(estimate) if known and estimate is not None else math.inf


def plan_batch(
    identity: PolicyIdentity,
    registry: Registry,
    rank: Rank,
    q: torch.Tensor,
    cache: KVCache | torch.Tensor,
    qo_lens: Sequence[int],
    *,
    macro: str,
    mode: str,
    validate: bool,
    **options: Any,
) -> MacroPlan:
    """The plan of `StreamAttnEngine.plan_batch`, which says what the arguments are."""
    for name in options:
        if name not in _OPTIONS:
            close = difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=0.0)[0]
            what = f"unexpected keyword argument {name!r}; the nearest is {close!r}"
            raise TypeError(f"plan_batch() got an {what}")
    options["flags"] = {"validate": validate}
    own = _faults(q, cache, qo_lens, macro)
    with home_of(q):
        decision, described = decide_with(
            mode,
            identity,
            lambda: check_both(
                lambda: own.raise_if_any("plan_batch"),
                lambda: _describe(q, cache, qo_lens, bool(own), options),
            ),
        )
        if validate:
            validate_contents(described)
        lens = tuple(qo_lens)
        device = device_facts(q.device)

        def build_part(problem: AttentionProblem, bound: BoundTensors) -> Built:
            tile_plan = AttentionTilePlan.for_problem(problem)
            ranking = rank(problem, device)
            return build(problem, tile_plan, device, bound, ranking, decision.reason)

        alternatives = _alternatives(described, lens, macro, device, registry, build_part)
        chosen, why = _choose(alternatives, macro, described.problem.batch_invariant)
        tile_plan = AttentionTilePlan.for_problem(described.problem)
        built = _as_built(chosen, alternatives, f"{decision.reason}; {why}", tile_plan, device)
    given = {"q": q, **tensors_of(described.cache)}
    given.update({name: options.get(name) for name in ("attn_sink", "out", "lse")})
    return MacroPlan(described, tile_plan, built, given, lens)


def _faults(q: Any, cache: Any, qo_lens: Any, macro: Any) -> Faults:
    """What is wrong with the arguments that only a macro plan has."""
    faults = Faults()
    if not (isinstance(macro, str) and macro in MACRO_NAMES):
        close = difflib.get_close_matches(str(macro), MACRO_NAMES, n=1, cutoff=0.0)
        faults.add("macro", macro, f"must be one of {', '.join(MACRO_NAMES)}", repr(close[0]))
    if not isinstance(qo_lens, (list, tuple)):
        rule = "must be a list or tuple of host ints, the queries of each request"
        nearest = "qo_lens.tolist()" if hasattr(qo_lens, "tolist") else "list(qo_lens)"
        faults.add("qo_lens", type(qo_lens).__name__, rule, nearest)
        return faults
    bad = [(n, each) for n, each in enumerate(qo_lens) if not (is_int(each) and each >= 0)]
    for index, each in bad[:MAX_LISTED]:
        least = 0 if is_int(each) else None
        faults.add(f"qo_lens[{index}]", each, f"request {index} must have an int >= 0", least)
    if len(bad) > MAX_LISTED:
        faults.add("qo_lens", f"{len(bad)} faults", f"the first {MAX_LISTED} are listed")
    batch = _batch_of(cache)
    if batch is not None and len(qo_lens) != batch:
        rule = f"must have one entry for each request of the cache's batch = {batch}"
        faults.add("qo_lens", f"{len(qo_lens)} entries", rule, f"{batch} entries")
    if bad or not (isinstance(q, torch.Tensor) and q.dim() == 3):
        return faults
    rows, total = q.shape[0], sum(qo_lens)
    rule = f"must sum to the rows of q {shape_of(q)}, packed [total_q, num_qo_heads, head_dim]"
    faults.require(total == rows, "sum(qo_lens)", total, rule, rows)
    rule = "a batch has fewer than 2^31 rows, which offsets of int32 count"
    faults.require(total <= _MAX_ROWS, "sum(qo_lens)", total, rule, _MAX_ROWS)
    return faults


def _batch_of(cache: Any) -> int | None:
    """Requests of a cache, or `None` of what is none."""
    if isinstance(cache, CACHE_CLASSES):
        return None if cache.faults() else cache.batch
    return cache.shape[0] if isinstance(cache, torch.Tensor) and cache.dim() == 4 else None


def _describe(
    q: Any, cache: Any, qo_lens: Sequence[int], faulty: bool, options: dict[str, Any]
) -> Described:
    """The batch as one packed call. Beside faults, for the sake of others: no result is made."""
    device = q.device if isinstance(q, torch.Tensor) else torch.device("cpu")
    if faulty:
        stand_in = torch.zeros((_batch_of(cache) or 0) + 1, dtype=torch.int32, device=device)
        return describe(q, cache, stand_in, allocate=False, **options)
    offset = torch.tensor(offsets(qo_lens), dtype=torch.int32).to(device)
    return describe(q, cache, offset, max_qo_len=max(qo_lens, default=0), **options)


def _alternatives(
    described: Described,
    qo_lens: tuple[int, ...],
    wanted: str,
    device: DeviceFacts,
    registry: Registry,
    build_part: Any,
) -> list[_Alternative]:
    """Every macro, built or with its reason; what is not compared is not built.

    Built, not only ranked, since a route may refuse the very tensors. The losers are let go.
    """
    problem, bound = described.problem, described.bound
    only = wanted
    if wanted == AUTO and problem.batch_invariant:
        only = INVARIANT_MACRO
    found: list[_Alternative] = []
    known: dict[tuple[Any, ...], str] = {}
    for macro in MACROS:
        if only not in (AUTO, macro.name):
            found.append(_Alternative(macro, reason=f"not compared: {_why_only(wanted)}"))
            continue
        cohorts = to_run(qo_lens, problem.gqa_group_size, macro)
        form = tuple((cohort.requests, uniform_form(problem, cohort)) for cohort in cohorts)
        if form in known:
            found.append(_Alternative(macro, reason=f"the same cohorts as {known[form]}"))
            continue
        known[form] = f"macro({macro.name})"
        if reason := _pruned(found, len(cohorts), device):
            found.append(_Alternative(macro, reason=reason))
            continue
        try:
            launch = MacroLaunch(macro.name, cohorts, qo_lens, problem, device, bound, build_part)
        except UnsupportedProblem as error:
            found.append(_Alternative(macro, reason=str(error) or "refused to build"))
            continue
        found.append(_Alternative(macro, launch, _capturable(launch, device, registry)))
    return found


def _pruned(found: list[_Alternative], num_cohorts: int, device: DeviceFacts) -> str:
    """Why so many launches, one a cohort at least, cannot win against the best so far; or ''."""
    best = min((each for each in found if each.launch), key=lambda each: each.order, default=None)
    if best is None or not best.capturable or not math.isfinite(best.order[1]):
        return ""
    known = TimedCandidate(name=best.name, work=Work(read_bytes=0), time_us=best.order[1])
    other = TimedCandidate(name="other", work=Work(read_bytes=0, num_launches=num_cohorts))
    _, dropped = prune((known, other), device)
    return f"not built: {dropped[0].reasons[0]}" if dropped else ""


def _why_only(wanted: str) -> str:
    if wanted != AUTO:
        return f"macro={wanted!r} was asked for"
    return (
        f"with batch_invariant=True, macro='auto' is {INVARIANT_MACRO!r}, whose routes follow from "
        "each request's own number of queries; which sum is lowest depends on the whole batch"
    )


def _capturable(launch: MacroLaunch, device: DeviceFacts, registry: Registry) -> bool:
    """On CUDA, whether a graph can hold every cohort's runs."""
    if device.type != "cuda":
        return True
    safe = {record.route for record in registry.attention_records() if record.graph_safe}
    return all(built.backend_plan.route in safe for built in launch.built)


def _choose(
    alternatives: list[_Alternative], wanted: str, invariant: bool
) -> tuple[_Alternative, str]:
    """The best one, earlier before later where they are equal, and why it is."""
    legal = [each for each in alternatives if each.launch is not None]
    if not legal:
        lines = ["no macro plan serves this batch"]
        lines += [f"{each.name}: {each.reason}" for each in alternatives]
        raise UnsupportedProblem("\n  ".join(lines))
    chosen = min(legal, key=lambda each: each.order)
    assert chosen.launch is not None
    if len(legal) > 1:
        of = f"of {len(legal)} macro plans"
        why = f"{chosen.macro.name} has the lowest sum of estimates ({_sum_us(chosen)}) {of}"
        if any(each.order[1] < chosen.order[1] for each in legal):
            why += " that a CUDA graph can hold"
    elif wanted != AUTO or invariant:
        why = _why_only(wanted)
    else:
        why = f"{chosen.macro.name} is the only macro plan"
    return chosen, f"{why}; {chosen.launch.gathers}"


def _sum_us(alternative: _Alternative) -> str:
    return f"{alternative.order[1]:.1f} us"


def _as_built(
    chosen: _Alternative,
    alternatives: list[_Alternative],
    reason: str,
    tile_plan: AttentionTilePlan,
    device: DeviceFacts,
) -> Built:
    """The chosen launch with the reason, and everything that was turned down on the way.

    The guarantee is that of the batch's own schedule: cohorts read the tokens that it names.
    """
    launch = chosen.launch
    assert launch is not None
    rejections = [
        Rejection(each.name, (_why_lost(each, chosen),))
        for each in alternatives
        if each is not chosen
    ]
    for part, built in zip(launch.parts, launch.built, strict=True):
        rejections += [
            Rejection(f"{part.cohort.name}: {other.route}", other.reasons)
            for other in built.backend_plan.rejections
        ]
    routes = zip(launch.parts, launch.built, strict=True)
    served = ", ".join(f"{part.cohort.name} by {b.backend_plan.route}" for part, b in routes)
    plan = dataclasses.replace(
        launch.backend_plan, reason=f"{reason}; {served}", rejections=tuple(rejections)
    )
    # The batch as a whole is no candidate of any route: its cohorts are.
    ranking = Ranking((), plan.rejections, device)
    return Built(launch, plan, info_of(plan, tile_plan.guarantee), ranking)


def _why_lost(other: _Alternative, chosen: _Alternative) -> str:
    if other.launch is None:
        return other.reason
    times = f"{_sum_us(other)} against {_sum_us(chosen)} of {chosen.name}"
    if chosen.capturable and not other.capturable:
        return f"legal, but cannot be captured in a CUDA graph (estimated at {times})"
    return f"legal, but estimated at {times}"
