"""`MacroLaunch`: the launches of a batch's cohorts as one, with what is gathered before and after.

K and V are never moved. A cohort of neighbours reads and writes the batch's own memory through
views. For one whose requests are scattered, q rows, page-table rows and lengths are gathered on the
device by every run, so that they follow changes in place, also when a graph is replayed; its
output rows go back the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from stream_attention.core.backend_plan import AttentionBackendPlan, LaunchSpec
from stream_attention.core.cache import KVView
from stream_attention.core.describe import phase_of
from stream_attention.core.device import DeviceFacts
from stream_attention.core.errors import UnsupportedProblem
from stream_attention.core.launch import BoundTensors, NotCopied
from stream_attention.core.problem import AttentionProblem
from stream_attention.planner.cohorts import DECODE, Cohort, Layout, Place, Span, lay_out, offsets
from stream_attention.planner.dispatch import Built

Step = Callable[[], object]
Build = Callable[[AttentionProblem, BoundTensors], Built]

# For ranking only, and guesses: a small launch, and copies at half the bandwidth of a large one.
COPY_US = 3.0
CUDA_BYTES_PER_US = 1.5e6
CPU_BYTES_PER_US = 6e3


def uniform_form(problem: AttentionProblem, cohort: Cohort) -> bool:
    """Whether the cohort is planned as `[requests, queries]`, which native routes ask for.

    With `batch_invariant` only where its class says so: others in the batch must not decide it.
    """
    if problem.batch_invariant:
        return cohort.name == DECODE
    return cohort.equal and cohort.max_qo_len >= 1


def cohort_problem(problem: AttentionProblem, cohort: Cohort, as_pages: bool) -> AttentionProblem:
    """The batch's problem for these requests alone.

    as_pages: a contiguous cache is read as pages of its capacity, by the numbers of its requests.
    """
    batch, total, longest = len(cohort.requests), cohort.total_qo_len, cohort.max_qo_len
    return dataclasses.replace(
        problem,
        batch=batch,
        total_qo_len=total,
        max_qo_len=longest,
        phase=phase_of(total, batch, longest, problem.kv_capacity),
        cache_kind="paged" if as_pages else problem.cache_kind,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A cohort, where it lies, its problem, and the constants that its launch reads.

    qo_indptr: `[requests + 1]` int32, `None` in the uniform form.
    pages: `[requests, 1]` int32 where a contiguous cache is read as pages, one a request.
    full_lens: `[requests]` int32, the capacity, where such a cache has no lengths.
    """

    cohort: Cohort
    place: Place
    problem: AttentionProblem
    qo_indptr: torch.Tensor | None
    pages: torch.Tensor | None
    full_lens: torch.Tensor | None

    @property
    def constants(self) -> tuple[torch.Tensor | None, ...]:
        """What the plan owns of it."""
        return self.qo_indptr, self.pages, self.full_lens


def make_part(problem: AttentionProblem, cohort: Cohort, place: Place, bound: BoundTensors) -> Part:
    """The part of one cohort; copies its constants to the device."""
    device, count = bound.q.device, len(cohort.requests)
    # Of a batch-invariant plan always, so that a request's form does not depend on its neighbours.
    parted = place.requests_gathered or (problem.batch_invariant and cohort.name != "all")
    as_pages = parted and problem.cache_kind == "contiguous"
    indptr = pages = full_lens = None
    if not uniform_form(problem, cohort):
        indptr = _constant(offsets(cohort.qo_lens), device, torch.int32)
    if as_pages:
        pages = _constant(cohort.requests, device, torch.int32).unsqueeze(1)
        pages = pages[:, : min(1, problem.kv_capacity)]
        if bound.kv.kv_lens is None:
            full_lens = _constant([problem.kv_capacity] * count, device, torch.int32)
    part_problem = cohort_problem(problem, cohort, as_pages)
    return Part(cohort, place, part_problem, indptr, pages, full_lens)


def _constant(
    values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """A tensor on `device` that any stream may read at once: the copy is waited for."""
    return torch.tensor(values, dtype=dtype).to(device)


def _one_list(index: torch.Tensor) -> torch.Tensor:
    """A page table or lengths without the axis of KV heads where all share one list."""
    return index[:, 0] if index.shape[1] > 1 and index.stride(1) == 0 else index


def _per_head(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`index` with the axis of KV heads that `like` has, by a stride of 0 where it lacks it."""
    if index.dim() == like.dim():
        return index
    shape = (index.shape[0], like.shape[1], *index.shape[1:])
    return index.unsqueeze(1).expand(shape)


class Gathered:
    """What a run gathers for scattered cohorts, and the buffers for it; empty where there is none.

    q, out, lse: rows of all such cohorts. table, lens: their page-table rows and lengths, or `None`
    where the cache has none or shares nothing but memory.
    """

    __slots__ = ("_requests", "_returns", "_rows", "lens", "lse", "out", "q", "table")

    def __init__(self, layout: Layout, bound: BoundTensors) -> None:
        device = bound.q.device
        self._rows = _constant(layout.rows, device)
        self._requests = _constant(layout.requests, device)
        self._returns: tuple[tuple[Span, torch.Tensor], ...] = tuple(
            (span, _constant(sources, device)) for span, sources in layout.returns
        )
        self.q = _buffer(bound.q, len(layout.rows))
        self.out = _buffer(bound.out, len(layout.rows))
        self.lse = None if bound.lse is None else _buffer(bound.lse, len(layout.rows))
        kv, count = bound.kv, len(layout.requests)
        self.table = None if kv.page_table is None else _buffer(_one_list(kv.page_table), count)
        self.lens = None if kv.kv_lens is None else _buffer(_one_list(kv.kv_lens), count)

    def into(self, bound: BoundTensors) -> list[tuple[str, Step]]:
        """The copies before the launches, by the names of what they read."""
        kv = bound.kv
        table = None if kv.page_table is None else _one_list(kv.page_table)
        lens = None if kv.kv_lens is None else _one_list(kv.kv_lens)
        copies = (
            ("q", bound.q, self._rows, self.q),
            ("page_table", table, self._requests, self.table),
            ("sequence_lengths", lens, self._requests, self.lens),
        )
        return [
            (name, _select(source, index, target))
            for name, source, index, target in copies
            if source is not None and target is not None and target.numel()
        ]

    def back(self, bound: BoundTensors) -> list[tuple[str, Step]]:
        """The copies behind the launches: each gathered row to its place in `out` and `lse`."""
        copies: list[tuple[str, Step]] = []
        for name, source, target in (("out", self.out, bound.out), ("lse", self.lse, bound.lse)):
            if source is None or target is None or not source.numel():
                continue
            # A caller's output may want a gradient elsewhere; here it is only memory.
            places = target.detach()
            copies += [
                (name, _select(source, index, places[first:last]))
                for (first, last), index in self._returns
            ]
        return copies

    @property
    def buffers(self) -> tuple[torch.Tensor | None, ...]:
        """What the plan owns of it."""
        indices = (self._rows, self._requests, *(index for _, index in self._returns))
        return self.q, self.out, self.lse, self.table, self.lens, *indices

    @property
    def moved_bytes(self) -> int:
        """Bytes that the copies of a run write: q, table and lengths before, out and lse behind."""
        return bytes_of((self.q, self.out, self.lse, self.table, self.lens))


def _buffer(like: torch.Tensor, count: int) -> torch.Tensor:
    """Room for `count` rows of `like`."""
    return torch.empty((count, *like.shape[1:]), dtype=like.dtype, device=like.device)


def _select(source: torch.Tensor, index: torch.Tensor, target: torch.Tensor) -> Step:
    """`target[i] = source[index[i]]`: one launch, no allocation, no sync, the same bits always."""
    return functools.partial(torch.index_select, source, 0, index, out=target)


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of their elements."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def bound_of(part: Part, bound: BoundTensors, gathered: Gathered) -> BoundTensors:
    """The memory of one cohort: views of the batch's, or of what is gathered."""
    first, last = part.place.rows
    of = gathered if part.place.rows_gathered else bound
    return BoundTensors(
        q=of.q[first:last],
        kv=_kv_of(part, bound.kv, gathered),
        qo_indptr=part.qo_indptr,
        out=of.out[first:last],
        lse=None if of.lse is None else of.lse[first:last],
        attn_sink=bound.attn_sink,
    )


def _kv_of(part: Part, kv: KVView, gathered: Gathered) -> KVView:
    first, last = part.place.requests
    count, own = len(part.cohort.requests), not part.place.requests_gathered
    lens = kv.kv_lens
    if lens is not None:
        found = lens if own else gathered.lens
        assert found is not None
        lens = _per_head(found[first:last], lens)
    if part.pages is not None:
        heads = kv.num_kv_heads
        if lens is None:
            assert part.full_lens is not None
            lens = part.full_lens.unsqueeze(1).expand(-1, heads)
        table = part.pages.unsqueeze(1).expand(-1, heads, -1)
        width = table.shape[2]
        return dataclasses.replace(kv, page_table=table, kv_lens=lens, batch=count, max_pages=width)
    if kv.page_table is None:
        assert own, "scattered requests of a contiguous cache are read as pages"
        key, value = kv.key[first:last], kv.value[first:last]
        return dataclasses.replace(kv, key=key, value=value, kv_lens=lens, batch=count)
    found = kv.page_table if own else gathered.table
    assert found is not None
    table = _per_head(found[first:last], kv.page_table)
    return dataclasses.replace(kv, page_table=table, kv_lens=lens, batch=count)


class MacroLaunch(NotCopied):
    """The launches of all cohorts, one behind the other. See `stream_attention.core.launch.Launch`.

    parts, built: one a cohort. Owns the buffers of what is gathered and the cohorts' offsets.
    """

    __slots__ = ("_gathered", "_steps", "backend_plan", "built", "parts")

    def __init__(
        self,
        name: str,
        cohorts: Sequence[Cohort],
        qo_lens: Sequence[int],
        problem: AttentionProblem,
        device: DeviceFacts,
        bound: BoundTensors,
        build: Build,
    ) -> None:
        layout = lay_out(qo_lens, cohorts)
        self.parts = tuple(
            make_part(problem, cohort, place, bound)
            for cohort, place in zip(cohorts, layout.places, strict=True)
        )
        self._gathered = Gathered(layout, bound)
        self.built = tuple(self._build(part, bound, build) for part in self.parts)
        copies = self._order(bound)
        self.backend_plan = self._plan(name, copies, device)

    def _build(self, part: Part, bound: BoundTensors, build: Build) -> Built:
        try:
            return build(part.problem, bound_of(part, bound, self._gathered))
        except UnsupportedProblem as error:
            raise UnsupportedProblem(f"cohort {part.cohort.name}: {error}") from error

    def _order(self, bound: BoundTensors) -> tuple[list[str], list[str]]:
        """Line up what a run does; the names of what is copied before and behind the launches."""
        into, back = self._gathered.into(bound), self._gathered.back(bound)
        self._steps: tuple[Step, ...] = (
            *(step for _, step in into),
            *(built.launch.run for built in self.built),
            *(step for _, step in back),
        )
        return [name for name, _ in into], [name for name, _ in back]

    def _plan(
        self, name: str, copies: Sequence[Sequence[str]], device: DeviceFacts
    ) -> AttentionBackendPlan:
        plans = [built.backend_plan for built in self.built]
        estimates = [plan.estimate_us for plan in plans]
        total = sum(each for each in estimates if each is not None)
        rate = CUDA_BYTES_PER_US if device.type == "cuda" else CPU_BYTES_PER_US
        total += COPY_US * sum(map(len, copies)) + self._gathered.moved_bytes / rate
        owned = bytes_of((*self._gathered.buffers, *(t for p in self.parts for t in p.constants)))
        launches = [launch for plan in plans for launch in plan.launches]
        before, behind = ([LaunchSpec(f"index_select({one})") for one in names] for names in copies)
        return AttentionBackendPlan(
            route=f"macro({name}): {_joined(plan.route for plan in plans)}",
            backend=_joined(plan.backend for plan in plans),
            arch=_joined(plan.arch for plan in plans),
            splits=max(plan.splits for plan in plans),
            split_tokens=plans[0].split_tokens if len(plans) == 1 else 0,
            workspace_bytes=owned + sum(plan.workspace_bytes for plan in plans),
            launches=(*before, *launches, *behind),
            estimate_us=None if None in estimates else total,
        )

    @property
    def gathers(self) -> str:
        """What every run copies, in words."""
        scattered = [p.cohort.name for p in self.parts if p.place.requests_gathered]
        if not scattered:
            return "every cohort lies in place, and nothing is gathered"
        names = [name for name in ("q", "out", "lse") if getattr(self._gathered, name) is not None]
        rows = self._gathered.q.shape[0]
        shares = [f"{rows} rows of {', '.join(names)}"] if rows else []
        if self._gathered.table is not None:
            shares.append("page-table rows")
        if self._gathered.lens is not None:
            shares.append("lengths")
        what = f"{' and '.join(scattered)} (scattered in the batch)"
        return (
            f"every run copies {'; '.join(shares) or 'nothing'} of {what}: "
            f"{self._gathered.moved_bytes} bytes, no K or V"
        )

    def run(self) -> None:
        """Enqueue on the current stream: copies in, the launches of all cohorts, copies back."""
        for step in self._steps:
            step()

    def rebind(self, bound: BoundTensors) -> None:
        """Use other tensors of the same shapes, strides, dtypes and device."""
        for part, built in zip(self.parts, self.built, strict=True):
            built.launch.rebind(bound_of(part, bound, self._gathered))
        self._order(bound)

    def unbind(self) -> None:
        """Keep no bound tensor alive; a rebind must come before the next run."""
        self._steps = ()
        for built in self.built:
            built.launch.unbind()

    def reset(self) -> None:
        """Make the scratch of every cohort as new; what is gathered is written before it is read.

        Every cohort's is, also where one fails to.
        """
        with contextlib.ExitStack() as every:
            for built in self.built:
                every.callback(built.launch.reset)


def _joined(names: Iterable[str]) -> str:
    return " + ".join(dict.fromkeys(names))
