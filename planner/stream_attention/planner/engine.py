"""`StreamAttnEngine`: describes a call, validates it, chooses a route and binds a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import MemberDescriptorType
from typing import Any

import torch

from stream_attention.core.cache import KVCache
from stream_attention.core.describe import Described, describe, phase_of
from stream_attention.core.device import DeviceFacts, device_facts
from stream_attention.core.errors import Faults
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import Registry, default_registry
from stream_attention.core.tile_plan import AttentionTilePlan
from stream_attention.core.validate import validate as validate_contents
from stream_attention.planner.databases import SHIPPED, databases_of
from stream_attention.planner.dispatch import build, home_of
from stream_attention.planner.macro_plan import MacroPlan, plan_batch
from stream_attention.planner.modes import DEFAULT_MODE, PolicyIdentity, decide_with
from stream_attention.planner.plan import AttentionPlan
from stream_attention.planner.ranking import Ranking, Rankings


class StreamAttnEngine:
    """Plans attention calls for one policy identity.

    policy_name, model_id, layer_id: whose calibrated policy may apply; without a full match every
        call is exact.
    phase_db: evidence that ranks routes on the devices that it was measured on: `None`, the
        databases inside the wheel; a path, a `PhaseDatabase`, or a list or tuple of these, which
        are asked before those inside the wheel; `()`, none at all, so that cost models rank.
    registry: the records to choose from; the process-wide registry when `None`.

    An engine holds no tensors and may be shared between threads.
    """

    def __init__(
        self,
        policy_name: str | None = None,
        model_id: str | None = None,
        layer_id: int | None = None,
        phase_db: Any = None,
        registry: Registry | None = None,
    ) -> None:
        faults = Faults()
        faults.require(
            registry is None or isinstance(registry, Registry),
            "registry",
            registry,
            "must be None (the process-wide one) or a Registry",
            "None",
        )
        databases = databases_of(faults, phase_db)
        faults.raise_if_any("StreamAttnEngine")
        self.identity = PolicyIdentity(policy_name, model_id, layer_id)
        self.registry = default_registry() if registry is None else registry
        self._databases = databases
        self._rankings = Rankings()

    def __copy__(self) -> StreamAttnEngine:
        """The engine itself: it may be shared, so that a module which holds one can be copied."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamAttnEngine:
        """The engine itself, as in `__copy__`."""
        return self

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Pickled, an engine is its identity, its databases (with their contents, unless they are
        those inside the wheel) and whatever a subclass adds; nothing is planned yet.

        It is loaded without `__init__`, whose arguments a subclass may change.
        """
        if self.registry is not default_registry():
            raise TypeError(
                "StreamAttnEngine: cannot be pickled with a registry of its own, which holds "
                "functions; make another where it shall be used: StreamAttnEngine(registry=...)"
            )
        own = ("registry", "_rankings")
        fields = {name: value for name, value in vars(self).items() if name not in own}
        members = (item for cls in type(self).__mro__ for item in vars(cls).items())
        slots = {
            name: getattr(self, name)
            for name, member in members
            if isinstance(member, MemberDescriptorType) and hasattr(self, name)
        }
        return fields, slots

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """The process that loads an engine has a registry, and ranks for itself."""
        fields, slots = state
        vars(self).update(fields)
        vars(self).setdefault("_databases", SHIPPED)
        for name, value in slots.items():
            object.__setattr__(self, name, value)
        self.registry = default_registry()
        self._rankings = Rankings()

    def plan(
        self,
        q: torch.Tensor,
        cache: KVCache | torch.Tensor,
        v_cache: torch.Tensor | None = None,
        *,
        mode: str = DEFAULT_MODE,
        validate: bool = True,
        **options: Any,
    ) -> AttentionPlan:
        """A plan for requests with equally many queries.

        q: `[batch, 1, num_qo_heads, head_dim]`, `[batch, num_qo_heads, head_dim]` or
            `[batch, qo_len, num_qo_heads, head_dim]`.
        cache: `PagedKVCache`, `ContiguousKVCache`, or keys `[batch, capacity, num_kv_heads,
            head_dim]` beside `v_cache`.
        mode: `exact_native`, `seed_only_native`, `verified_auto` (or `dense`, `auto`).
        validate: check lengths, page ids and scales now, with one sync; never inside `run`.
        options: the keywords of `plan_attention`.

        Raises `ValueError` with every fault, `UnsupportedProblem` with every candidate's reasons.
        """
        return self.plan_attention(
            q, cache, None, v_cache=v_cache, mode=mode, validate=validate, **options
        )

    def plan_attention(
        self,
        q: torch.Tensor,
        cache: KVCache | torch.Tensor,
        qo_indptr: torch.Tensor | None = None,
        *,
        v_cache: torch.Tensor | None = None,
        mode: str = DEFAULT_MODE,
        validate: bool = True,
        sm_scale: float | None = None,
        causal: bool = True,
        window_left: int | None = None,
        window_right: int | None = None,
        logits_soft_cap: float | None = None,
        attn_sink: torch.Tensor | None = None,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        batch_invariant: bool = False,
        max_qo_len: int | None = None,
    ) -> AttentionPlan:
        """A plan for any mix of prefill, append, verify and decode requests.

        q: packed `[total_q, num_qo_heads, head_dim]` beside `qo_indptr` `[batch + 1]` int32, or a
            form that `plan` takes. Without `max_qo_len`, a plan that validates is made for the
            longest request that it finds. The rest is as in `plan`.
        """
        options: dict[str, Any] = {
            "sm_scale": sm_scale,
            "causal": causal,
            "window_left": window_left,
            "window_right": window_right,
            "logits_soft_cap": logits_soft_cap,
            "attn_sink": attn_sink,
            "return_lse": return_lse,
            "out": out,
            "lse": lse,
            "batch_invariant": batch_invariant,
            "max_qo_len": max_qo_len,
        }
        with home_of(q):
            decision, described = decide_with(
                mode,
                self.identity,
                lambda: describe(
                    q, cache, qo_indptr, v_cache=v_cache, flags={"validate": validate}, **options
                ),
            )
            if validate:
                described = checked(described, max_qo_len)
            problem = described.problem
            tile_plan = AttentionTilePlan.for_problem(problem)
            device = device_facts(q.device)
            ranking = self._rank(problem, device)
            built = build(problem, tile_plan, device, described.bound, ranking, decision.reason)
        bound_cache = described.cache
        given = {
            "q": q,
            "key": bound_cache.key,
            "value": bound_cache.value,
            "page_table": getattr(bound_cache, "page_table", None),
            "sequence_lengths": bound_cache.sequence_lengths,
            "key_scale": bound_cache.key_scale,
            "value_scale": bound_cache.value_scale,
            "qo_indptr": qo_indptr,
            "attn_sink": attn_sink,
            "out": out,
            "lse": lse,
        }
        return AttentionPlan(described, tile_plan, built, given)

    def _rank(self, problem: AttentionProblem, device: DeviceFacts) -> Ranking:
        return self._rankings.rank(problem, device, self.registry, databases=self._databases)

    def plan_batch(
        self,
        q: torch.Tensor,
        cache: KVCache | torch.Tensor,
        qo_lens: Sequence[int],
        *,
        macro: str = "auto",
        mode: str = DEFAULT_MODE,
        validate: bool = True,
        **options: Any,
    ) -> MacroPlan:
        """A plan for a mix of requests whose numbers of queries are known on the host.

        q: packed `[total_q, num_qo_heads, head_dim]`. qo_lens: list of ints, the queries of each
            request, 0 too; fixed for the plan's life, `qo_indptr` is the plan's own.
        macro: `unified` (one launch), `phases` (decode, verify, prefill), `cohorts` (by rows of
            queries), or `auto`, the lowest sum of estimates, `unified` where they are equal. With
            `batch_invariant`, `auto` is `phases`: a request's route follows from its own queries.
        options: the keywords of `plan_attention`, without `max_qo_len`.

        Each cohort is ranked, and served, as a batch of its own; `cohorts` and `routes` of the plan
        say how. Of a cohort whose requests are no neighbours every run gathers q rows, page-table
        rows and lengths, and puts its out rows back: on the device, without allocation or sync. K
        and V are never moved. Planning copies offsets and such to the device and waits for that,
        also where nothing is validated. Raises as `plan` does.
        """
        return plan_batch(
            self.identity,
            self.registry,
            self._rank,
            q,
            cache,
            qo_lens,
            macro=macro,
            mode=mode,
            validate=validate,
            **options,
        )


def checked(described: Described, max_qo_len: int | None) -> Described:
    """Validate the contents; where no `max_qo_len` was given, plan for the longest request seen."""
    longest = validate_contents(described)
    problem = described.problem
    if max_qo_len is not None or longest == problem.max_qo_len:
        return described
    phase = phase_of(problem.total_qo_len, problem.batch, longest, problem.kv_capacity)
    problem = dataclasses.replace(problem, max_qo_len=longest, phase=phase)
    return dataclasses.replace(described, problem=problem)
