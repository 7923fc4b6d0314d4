"""`prefill` and `train` inside a function that `torch.compile` traces.

What the planner decides from metadata is decided while tracing, on meta tensors of the same shapes
and for the numbers given, and is a constant of the graph; the chosen route's own tensor code is
traced into the graph. A call at fault raises while it is traced, inside the compiler's own error.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import torch

from stream_attention.core.backend_plan import Rejection
from stream_attention.core.device import device_facts
from stream_attention.core.errors import Faults, UnsupportedProblem
from stream_attention.core.info import AttentionInfo
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord, default_registry
from stream_attention.planner.differentiable import forms_of, prefill_problem, train_problem
from stream_attention.planner.dispatch import unsupported
from stream_attention.planner.modes import PolicyIdentity, decide
from stream_attention.planner.ranking import Ranking, rank
from stream_attention.planner.reasons import slower, why_chosen
from stream_attention.planner.traced import call_traced, sizes_of
from stream_attention.planner.traced_checks import check_gradients, check_kinds, settled

Names = tuple[str | None, str | None, int | None]
Traced = tuple[torch.Tensor, torch.Tensor | None, AttentionInfo]

# Decisions of traced calls, `apply_N` and `problem_N` of decision N: the compiler follows code and
# fields of an object only where it can say how the object is reached. Attributes of a module are
# looked up when they are read; a dict is copied when a trace first sees it, without what the same
# trace adds later. One entry for each route and problem that was ever traced.
_DECIDED = types.ModuleType(f"{__name__}._DECIDED")
_NUMBERED: dict[tuple[str, AttentionProblem], tuple[int, AttentionProblem]] = {}
_NUMBERS = itertools.count()
_WRITES = ""


def prefill_traced(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    mode: str,
    names: Names,
    flags: dict[str, Any],
    out: torch.Tensor | None,
    options: dict[str, Any],
) -> Traced:
    """A prefill call in a graph: one operator, or the tensor code of a route that is applied."""
    given = {"attn_mask": attn_mask, "out": out}
    _check((q, k, v), given, {}, mode, names, flags, options, serves=True)
    names, options = _settled(names, options)
    spec = _spec("prefill", q, k, v, attn_mask, 0.0, mode, names, out, options)

    def write() -> Any:
        return call_traced(
            q,
            k,
            None,
            v_cache=v,
            mode=mode,
            names=names,
            validate=flags["validate"],
            return_info=False,
            max_qo_len=None,
            out=out,
            lse=None,
            **options,
        )

    with torch.no_grad():
        return _served(spec, q, k, v, attn_mask, None, options, write)


def train_traced(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    generator: torch.Generator | None,
    mode: str,
    names: Names,
    flags: dict[str, Any],
    options: dict[str, Any],
) -> Traced:
    """A train call in a graph: the tensor code of a differentiable route."""
    numbers = {"dropout_p": dropout_p}
    _check((q, k, v), {"attn_mask": attn_mask}, numbers, mode, names, flags, options)
    dropout_p = settled(dropout_p)
    names, options = _settled(names, options)
    spec = _spec("train", q, k, v, attn_mask, dropout_p, mode, names, None, options)
    return _served(spec, q, k, v, attn_mask, generator, options)


def _check(
    qkv: tuple[Any, Any, Any],
    tensors: dict[str, Any],
    numbers: dict[str, Any],
    mode: Any,
    names: Names,
    flags: dict[str, Any],
    options: dict[str, Any],
    serves: bool = False,
) -> None:
    """What a spec cannot hold, and what would not be a constant.

    serves: a call that returns no gradient, so nothing may want one.
    """
    faults = Faults()
    for name, tensor in zip("qkv", qkv, strict=True):
        if not isinstance(tensor, torch.Tensor):
            faults.add(name, type(tensor).__name__, "must be a torch.Tensor")
    for name, value in numbers.items():
        if value is None:
            faults.add(name, value, "must be a number")
    own = ("causal", "return_lse", "batch_invariant")
    check_kinds(
        faults,
        tensors={**tensors, "attn_sink": options["attn_sink"]},
        numbers={**numbers, **{n: options[n] for n in ("sm_scale", "logits_soft_cap")}},
        counts={"layer_id": names[2], **{n: options[n] for n in ("window_left", "window_right")}},
        flags={**flags, **{n: options[n] for n in own}},
        mode=mode,
        names={"policy_name": names[0], "model_id": names[1]},
    )
    if serves:
        wants = {"q": qkv[0], "key": qkv[1], "value": qkv[2], "attn_sink": options["attn_sink"]}
        check_gradients(faults, {**wants, **tensors})
    faults.raise_if_any("attention")


def _settled(names: Names, options: dict[str, Any]) -> tuple[Names, dict[str, Any]]:
    """The numbers among them as plain ones: the decision is a constant for each of them."""
    numbers = ("sm_scale", "logits_soft_cap", "window_left", "window_right")
    return (names[0], names[1], settled(names[2])), {
        name: settled(value) if name in numbers else value for name, value in options.items()
    }


def _served(
    spec: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    generator: torch.Generator | None,
    options: dict[str, Any],
    write: Callable[[], Any] | None = None,
) -> Traced:
    """By the first route that does not refuse; `write` calls the operator, for one that writes."""
    _raise_if_wrong(_verdict(spec, ()))
    refused: tuple[str, ...] = ()  # by those that came before, as in a call that is not traced
    for name in _names(spec):
        if write is not None and name == _WRITES:
            out, lse, _ = write()
            return out, lse, _info(spec, refused)
        try:
            with torch.autocast(q.device.type, enabled=False):  # as there
                out, lse = getattr(_DECIDED, f"apply_{name}")(
                    getattr(_DECIDED, f"problem_{name}"),
                    q,
                    k,
                    v,
                    attn_sink=options["attn_sink"],
                    attn_mask=attn_mask,
                    generator=generator,
                )
        except UnsupportedProblem as error:
            refused = (*refused, str(error.args[0]))
            continue
        return out, (lse if options["return_lse"] else None), _info(spec, refused)
    _raise_if_wrong(_verdict(spec, refused))
    raise AssertionError("unreachable: no route is left, and none was missed")


def _spec(
    kind: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    mode: str,
    names: Names,
    out: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[Any, ...]:
    """Everything the decision depends on, as plain constants."""
    tensors = (q, k, v, attn_mask, options["attn_sink"], out)
    return (
        kind,
        tuple(None if t is None else (sizes_of(t), t.dtype) for t in tensors),
        q.device,
        dropout_p,
        mode,
        names,
        tuple((name, value) for name, value in options.items() if name != "attn_sink"),
    )


@torch.compiler.assume_constant_result
def _names(spec: tuple[Any, ...]) -> tuple[str, ...]:
    """The routes in the order to try them: numbers of `_DECIDED`, or `_WRITES` for one that writes
    into a given tensor, which an operator call does.
    """
    _, problem, ranking = _ranked(spec)
    names = []
    for candidate in ranking.candidates:
        record = candidate.record
        if record.build is not None and spec[0] == "prefill" and problem.mask is None:
            names.append(_WRITES)
            continue
        assert record.apply is not None
        names.append(_decided(record.route, record.apply, problem))
    return tuple(names)


def _decided(route: str, apply: Callable[..., Any], problem: AttentionProblem) -> str:
    """The number, as text, under which `_DECIDED` holds the decision."""
    # Of threads that trace at once the first one's is everybody's; other numbers stay unused.
    number, problem = _NUMBERED.setdefault((route, problem), (next(_NUMBERS), problem))
    setattr(_DECIDED, f"problem_{number}", problem)
    setattr(_DECIDED, f"apply_{number}", apply)  # a route may have been registered anew
    return str(number)


@torch.compiler.assume_constant_result
def _info(spec: tuple[Any, ...], refused: tuple[str, ...] = ()) -> AttentionInfo:
    return _decide(spec, refused)[2]


@torch.compiler.assume_constant_result
def _verdict(spec: tuple[Any, ...], refused: tuple[str, ...]) -> tuple[bool, str]:
    """Whether a call at fault is a bad one (or one that no route serves), and what its error says.

    Raised in here, an error would reach the caller as an internal one of the compiler.
    """
    try:
        _decide(spec, refused)
    except ValueError as error:
        return True, str(error)
    except UnsupportedProblem as error:
        return False, str(error)
    return False, ""


def _raise_if_wrong(verdict: tuple[bool, str]) -> None:
    is_bad, text = verdict
    if is_bad:
        raise ValueError(text)
    if text:
        raise UnsupportedProblem(text)


def _decide(
    spec: tuple[Any, ...], refused: tuple[str, ...] = ()
) -> tuple[AttentionRecord, AttentionProblem, AttentionInfo]:
    """The route that comes after those that refused, the problem, and what a call reports."""
    mode_reason, problem, ranking = _ranked(spec)
    facts, place = device_facts(spec[2]), len(refused)
    late = zip(ranking.candidates, refused, strict=False)
    rejections = (*ranking.rejections, *(Rejection(c.record.route, (r,)) for c, r in late))
    if place >= len(ranking.candidates):
        raise unsupported(problem, facts, list(rejections))
    chosen = ranking.candidates[place]
    why = why_chosen(chosen, ranking, place)
    lost = (*rejections, *slower(ranking.candidates[place + 1 :], chosen))
    info = AttentionInfo(
        backend_used=chosen.record.backend,
        route=chosen.record.route,
        reason=f"{mode_reason}; {why}; ranked while tracing",
        fallback_reasons=tuple(str(rejection) for rejection in lost),
        arch=facts.arch,
    )
    return chosen.record, problem, info


def _ranked(spec: tuple[Any, ...]) -> tuple[str, AttentionProblem, Ranking]:
    """Why the mode allows what, the problem, and the order of the routes."""
    kind, tensors, device, dropout_p, mode, names, options = spec
    q, k, v, mask, sink, out = (
        None if t is None else torch.empty(t[0], dtype=t[1], device="meta") for t in tensors
    )
    assert q is not None and k is not None and v is not None
    decision = decide(mode, PolicyIdentity(*names))
    keywords: dict[str, Any] = {"attn_sink": sink, **dict(options)}
    if kind == "train":
        problem = train_problem(q, k, v, mask, dropout_p, None, **keywords)
    else:
        problem = prefill_problem(q, k, v, mask, False, out=out, **keywords)
    forms = ("build",) if out is not None else forms_of(problem)
    ranking = rank(problem, device_facts(device), default_registry(), forms=forms)
    return decision.reason, problem, ranking
