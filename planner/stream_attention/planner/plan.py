"""`AttentionPlan`: a call that was checked and bound once, and may be run many times."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from stream_attention.core.backend_plan import AttentionBackendPlan
from stream_attention.core.describe import Described
from stream_attention.core.errors import StalePlanError, shape_of
from stream_attention.core.info import AttentionInfo
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.tile_plan import AttentionTilePlan
from stream_attention.planner.dispatch import Built
from stream_attention.planner.explain import explain

_Watched = tuple[torch.Tensor, int, torch.Size, tuple[int, ...], torch.dtype]


class AttentionPlan:
    """One planned call over bound tensors.

    `run()` reads q, the cache and the other bound tensors where they lie; their contents may change
    in place between runs (q, K, V, page table, sequence lengths from 0 to capacity), their
    addresses, shapes, strides and dtypes may not: `StalePlanError` names what did. The plan owns
    its outputs (unless the caller gave them) and its scratch, and shares neither with another plan;
    the tensors that `run` returns are written again by the next `run`. `qo_indptr` may change
    within `problem.max_qo_len`. One plan runs on one stream at a time.
    """

    __slots__ = (
        "_device_index",
        "_launch",
        "_names",
        "_result",
        "_watched",
        "backend_plan",
        "info",
        "problem",
        "tile_plan",
    )

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
        device = described.bound.q.device
        self._device_index = device.index if device.type == "cuda" else None
        out, lse = described.result(), described.result_lse()
        self._result = (out, built.info) if lse is None else (out, lse, built.info)
        watched = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
        watched.setdefault("out", out)
        if lse is not None:
            watched.setdefault("lse", lse)
        self._names = tuple(watched)
        self._watched: tuple[_Watched, ...] = tuple(
            (t, t.data_ptr(), t.shape, t.stride(), t.dtype) for t in watched.values()
        )

    def run(self) -> Any:
        """Run on the current stream: `(out, info)`, or `(out, lse, info)` where lse was asked for.

        Allocates nothing on a GPU, checks no values, never syncs (unless the route's own
        description says so), and may be captured in a graph. Raises `StalePlanError` when a bound
        tensor is no longer what was planned.
        """
        for tensor, address, shape, stride, dtype in self._watched:
            if (
                tensor.data_ptr() != address
                or tensor.shape != shape
                or tensor.stride() != stride
                or tensor.dtype is not dtype
            ):
                self._raise_stale()
        if self._device_index is None or self._device_index == torch.cuda.current_device():
            self._launch.run()
        else:  # a launch goes to the current device; the caller may be on another one
            with torch.cuda.device(self._device_index):
                self._launch.run()
        return self._result

    def _raise_stale(self) -> NoReturn:
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
        raise StalePlanError(
            f"{'; '.join(changes)}: a plan is bound to the tensors it was made for; plan again, "
            "or write new contents in place"
        )

    def reset(self) -> None:
        """Make the scratch as new, after a launch that was aborted."""
        self._launch.reset()

    def explain(self) -> str:
        """The chosen route, its estimate and launches, and every rejected candidate, as text."""
        return explain(self.problem, self.tile_plan, self.backend_plan, self.info)

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
