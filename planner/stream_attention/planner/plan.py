"""`AttentionPlan`: a call that was checked and bound once, and may be run many times."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from stream_attention.core.backend_plan import AttentionBackendPlan
from stream_attention.core.describe import Described
from stream_attention.core.errors import StalePlanError, shape_of
from stream_attention.core.info import AttentionInfo
from stream_attention.core.launch import NotCopied
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.tile_plan import AttentionTilePlan
from stream_attention.planner.dispatch import Built
from stream_attention.planner.explain import explain
from stream_attention.planner.watch import Check, form_check

_Watched = tuple[torch.Tensor, int, torch.Size, tuple[int, ...], torch.dtype]

# A plan that runs under several modes in turn (inference, autocast, ...) has a check for each.
_MODES_KNOWN = 4


def index_to_hold(device: torch.device) -> int | None:
    """The index of `device` where another one may be current when a plan runs, else `None`.

    Asks the runtime: `torch.cuda.device_count` may read an environment that changed since.
    """
    if device.type != "cuda" or torch._C._cuda_getDeviceCount() == 1:
        return None
    return device.index


def _never(*tensors: torch.Tensor) -> bool:
    return False


def is_inference(tensor: torch.Tensor | None) -> bool:
    """Whether only code in inference mode may write `tensor`."""
    return tensor is not None and tensor.is_inference()


def _run_in_inference_mode(run: Callable[[], None]) -> None:
    with torch.inference_mode():
        run()


class AttentionPlan(NotCopied):
    """One planned call over bound tensors.

    `run()` reads q, the cache and the other bound tensors where they lie; their contents may change
    in place between runs (q, K, V, page table, sequence lengths from 0 to capacity), their
    addresses, shapes, strides and dtypes may not: `StalePlanError` names what did. The plan owns
    its outputs (unless the caller gave them) and its scratch, and shares neither with another plan;
    the tensors that `run` returns are written again by the next `run`. `qo_indptr` may change
    within `problem.max_qo_len`. One plan runs on one stream at a time. It cannot be copied or
    pickled: plan again over the copied tensors.
    """

    __slots__ = (
        "_addresses",
        "_alike",
        "_device_index",
        "_known",
        "_launch",
        "_names",
        "_ranking",
        "_result",
        "_run_launch",
        "_tensors",
        "_watched",
        "backend_plan",
        "info",
        "problem",
        "tile_plan",
    )

    _instead = "plan again over the copied tensors: engine.plan(...)"

    problem: AttentionProblem
    tile_plan: AttentionTilePlan
    backend_plan: AttentionBackendPlan
    info: AttentionInfo

    def __init__(
        self,
        described: Described,
        tile_plan: AttentionTilePlan,
        built: Built,
        given: dict[str, torch.Tensor | None],
    ) -> None:
        """`given`: tensors by the names that errors use, as the caller holds them."""
        self.problem = described.problem
        self.tile_plan = tile_plan
        self.backend_plan = built.backend_plan
        self.info = built.info
        self._launch = built.launch
        self._ranking = built.ranking
        self._run_launch: Callable[[], None] = built.launch.run
        self._device_index = index_to_hold(described.bound.q.device)
        out, lse = described.result(), described.result_lse()
        if is_inference(out) or is_inference(lse):
            self._run_launch = functools.partial(_run_in_inference_mode, built.launch.run)
        self._result = (out, built.info) if lse is None else (out, lse, built.info)
        watched = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
        watched.setdefault("out", out)
        if lse is not None:
            watched.setdefault("lse", lse)
        self._names = tuple(watched)
        self._watched: tuple[_Watched, ...] = tuple(
            (t, t.data_ptr(), t.shape, t.stride(), t.dtype) for t in watched.values()
        )
        self._addresses = tuple((t.data_ptr, address) for t, address, *_ in self._watched)
        # One tensor may have two names.
        self._tensors = tuple({id(t): t for t in watched.values()}.values())
        # The first run makes the check, under its own modes.
        self._alike: Check = _never
        self._known: tuple[Check, ...] = ()

    def run(self) -> Any:
        """Run on the current stream: `(out, info)`, or `(out, lse, info)` where lse was asked for.

        Allocates nothing on a GPU, checks no values, never syncs (unless the route's own
        description says so), and may be captured in a graph. Raises `StalePlanError` when a bound
        tensor is no longer what was planned.
        """
        for data_ptr, address in self._addresses:
            if data_ptr() != address:
                self._raise_if_stale()
        if not self._alike(*self._tensors):
            self._alike = self._check_of_this_mode()
        if self._device_index is None or torch._C._cuda_getDevice() == self._device_index:
            self._run_launch()
        else:  # a launch goes to the current device; the caller may be on another one
            with torch.cuda.device(self._device_index):
                self._run_launch()
        return self._result

    def _check_of_this_mode(self) -> Check:
        """The check that takes the bound tensors under the thread's modes; raises if stale."""
        for known in self._known:
            if known(*self._tensors):
                return known
        self._raise_if_stale()
        check = form_check(self._tensors)
        self._known = (check, *self._known[: _MODES_KNOWN - 1])
        return check

    def _raise_if_stale(self) -> None:
        changes = []
        for name, watched in zip(self._names, self._watched, strict=True):
            tensor, address, shape, stride, dtype = watched
            if tensor.dtype is not dtype:
                changes.append(f"{name}.dtype changed from {dtype} to {tensor.dtype}")
            if tensor.shape != shape:
                changes.append(f"{name}.shape changed from {tuple(shape)} to {shape_of(tensor)}")
            if tensor.stride() != stride:
                changes.append(f"{name}.stride() changed from {stride} to {tensor.stride()}")
            if tensor.data_ptr() != address:
                changes.append(
                    f"{name}.data_ptr() changed from {address:#x} to {tensor.data_ptr():#x}"
                )
        if changes:
            raise StalePlanError(
                f"{'; '.join(changes)}: a plan is bound to the tensors it was made for; plan "
                "again, or write new contents in place"
            )

    def reset(self) -> None:
        """Make the scratch as new, after a launch that was aborted."""
        self._launch.reset()

    def explain(self, format: str = "text") -> str:
        """The chosen route with its launches, every candidate with its estimate and what that rests
        on, every rejection with its reasons.

        format: `"text"` for people, `"json"` for tools: one object, its `schema` first.
        """
        return explain(
            self.problem, self.tile_plan, self.backend_plan, self.info, self._ranking, format
        )

    @property
    def route(self) -> str:
        """Registry name of the chosen route."""
        return self.backend_plan.route

    @property
    def reason(self) -> str:
        """Why this route, and what the mode led to."""
        return self.backend_plan.reason

    @property
    def workspace_bytes(self) -> int:
        """Scratch that the plan owns, outputs not counted."""
        return self.backend_plan.workspace_bytes

    def __repr__(self) -> str:
        return f"<AttentionPlan {self.route}: {self.problem!r}>"
