"""A worker's side of the conversation: one request at a time, each with one reply.

`start` finds the contender, `warm` runs it on tiny cases (compilation happens there), `row` and
`pair` measure, and give the memory back before they reply: the next to measure is another process.
Beside replies there are steps, which say what is being done, for when it never ends.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.channel import Channel, ChannelClosed
from stream_attention.bench.contenders import Contender, join_names, load_peers
from stream_attention.bench.floor import ReadCurve
from stream_attention.bench.memory import keep_what_is_loaded
from stream_attention.bench.pairs import run_pair
from stream_attention.bench.pools import build_pools
from stream_attention.bench.results import Row, case_from, curve_from
from stream_attention.bench.routes import route_contenders
from stream_attention.bench.runner import (
    TOO_LARGE,
    Setting,
    Settings,
    lost_device,
    one_line,
    prepare,
    refusals,
    run_row,
)
from stream_attention.bench.spent import Spent


@dataclass(slots=True)
class _Worker:
    """What `start` set up."""

    step: Callable[[str], None]
    device: torch.device
    settings: Settings
    curve: ReadCurve
    known: dict[str, Contender]
    spent: Spent = field(default_factory=Spent)


def serve(channel: Channel) -> None:
    """Answer requests until the other end closes. What a request raises is its reply."""

    def step(what: str) -> None:
        channel.send({"step": what})

    worker: _Worker | None = None
    while True:
        try:
            request = channel.receive()
        except ChannelClosed:
            return
        assert request is not None
        try:
            if request["do"] == "start":
                worker = _start(request, step)
                reply: dict[str, Any] = {}
            else:
                assert worker is not None
                reply = _answer(worker, request)
        except (Exception, SystemExit) as error:
            reply = {"error": one_line(error)}
        # Only here is everything that the request held gone, also what an error kept alive.
        lost = worker is not None and _release(worker.device)
        channel.send({"reply": request["do"], "lost": lost, **reply})


def _start(request: dict[str, Any], step: Callable[[str], None]) -> _Worker:
    if request["threads"] is not None:
        torch.set_num_threads(request["threads"])
    step("import of contenders")
    registry = load_peers(request["modules"])
    known = join_names(route_contenders(), registry.peers.values())
    name = request["contender"]
    if name not in known:
        raise LookupError(f"{name} is no contender here; missing: {registry.missing or 'nothing'}")
    device = torch.device(request["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    settings = Settings(**request["settings"])
    keep_what_is_loaded()
    return _Worker(step, device, settings, curve_from(request["curve"]), known)


def _answer(worker: _Worker, request: dict[str, Any]) -> dict[str, Any]:
    worker.spent = Spent()
    requests = {"warm": _warm, "row": _row, "pair": _pair}
    reply = requests[request["do"]](worker, request)
    return {**reply, "spent": worker.spent.seconds}


def _warm(worker: _Worker, request: dict[str, Any]) -> dict[str, Any]:
    """Build and run each case once; one that fails is left to the case that it stands for."""
    contender = worker.known[request["contender"]]
    notes = []
    for data in request["cases"]:
        case = case_from(data)
        worker.step(case.name)
        try:
            _run_once(worker, contender, case)
        except (Exception, SystemExit) as error:
            notes.append(f"{case.name}: {one_line(error)}")
        if lost_device(worker.device):
            break
    keep_what_is_loaded()
    return {"notes": notes}


def _run_once(worker: _Worker, contender: Contender, case: AttentionCase) -> None:
    if refusals(contender, case, worker.device, worker.settings.graph):
        return
    pools = build_pools(case, worker.device, seed=worker.settings.seed, cold=False)
    for pool in pools:
        pool.fill_unused(contender.unused_fill)
    for work in contender.build(case, pools, worker.device):
        work.run()


def _row(worker: _Worker, request: dict[str, Any]) -> dict[str, Any]:
    contender, case = worker.known[request["contender"]], case_from(request["case"])
    try:
        reasons = refusals(contender, case, worker.device, worker.settings.graph)
    except Exception as error:
        return _plain(Row(contender.name, contender.kind, "failed", (one_line(error),)))
    if reasons:  # without inputs: nothing would read them
        return _plain(Row(contender.name, contender.kind, "unsupported", reasons))
    try:
        setting = _prepare(worker, case, request)
    except TOO_LARGE as error:
        reason = f"its worker skipped the case: {error}"
        return _plain(Row(contender.name, contender.kind, "unsupported", (reason,)))
    worker.step("run")
    return _plain(run_row(contender, setting))


def _pair(worker: _Worker, request: dict[str, Any]) -> dict[str, Any]:
    first, second = (worker.known[name] for name in request["pair"])
    setting = _prepare(worker, case_from(request["case"]), request)
    worker.step("run")
    return _plain(run_pair(first, second, setting))


def _prepare(worker: _Worker, case: AttentionCase, request: dict[str, Any]) -> Setting:
    answers = None if request["answers"] is None else Path(request["answers"])
    return prepare(
        case, worker.device, worker.settings, worker.curve, worker.step, answers, worker.spent
    )


def _plain(row: Any) -> dict[str, Any]:
    return {"row": dataclasses.asdict(row)}


def _release(device: torch.device) -> bool:
    """Give memory back to the device; whether its context is lost, and this process of no use."""
    gc.collect()
    return bool(lost_device(device))
