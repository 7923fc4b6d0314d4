"""Modes and identities: which guarantee the caller accepts, and whose policy may relax it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from stream_attention.core.errors import Faults, UnsupportedProblem, check_both
from stream_attention.core.ir import evaluable_repr, is_int

MODES = ("exact_native", "seed_only_native", "verified_auto")
MODE_ALIASES = {"dense": "exact_native", "auto": "verified_auto"}
DEFAULT_MODE = "verified_auto"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, repr=False)
class PolicyIdentity:
    """Who asks: the names that a calibrated policy must match in full. `None` matches nothing."""

    policy_name: str | None = None
    model_id: str | None = None
    layer_id: int | None = None

    def __post_init__(self) -> None:
        faults = Faults()
        for name in ("policy_name", "model_id"):
            value = getattr(self, name)
            faults.require(
                value is None or (isinstance(value, str) and bool(value)),
                name,
                value,
                "must be None or a non-empty string",
                "None",
            )
        faults.require(
            self.layer_id is None or (is_int(self.layer_id) and self.layer_id >= 0),
            "layer_id",
            self.layer_id,
            "must be None or an int >= 0",
            "None",
        )
        faults.raise_if_any("identity")

    __repr__ = evaluable_repr

    @property
    def missing(self) -> tuple[str, ...]:
        """Names without which no policy can match."""
        return tuple(n for n in ("model_id", "layer_id") if getattr(self, n) is None)


@dataclass(frozen=True, slots=True)
class ModeDecision:
    """The mode in its full name and, in words, what it led to."""

    mode: str
    reason: str


def canonical_mode(mode: str) -> str:
    """The mode's full name; `ValueError` with the nearest name for an unknown one."""
    names = (*MODES, *MODE_ALIASES)
    if isinstance(mode, str) and mode in names:
        return MODE_ALIASES.get(mode, mode)
    faults = Faults()
    close = difflib.get_close_matches(str(mode), names, n=1, cutoff=0.0)
    faults.add("mode", mode, f"must be one of {', '.join(names)}", repr(close[0]))
    faults.raise_if_any("attention")
    raise AssertionError("unreachable: a fault was added")


def decide(mode: str, identity: PolicyIdentity) -> ModeDecision:
    """What the mode means for this identity; `UnsupportedProblem` where it cannot be honoured.

    No policy cells are installed in this version, so nothing ever matches one: `verified_auto` is
    exact and says why, `seed_only_native` raises. Unknown is exact.
    """
    name = canonical_mode(mode)
    who = (
        f"policy_name={identity.policy_name!r}, model_id={identity.model_id!r}, "
        f"layer_id={identity.layer_id!r}"
    )
    if name == "exact_native":
        return ModeDecision(name, "exact_native: every token is read")
    if name == "seed_only_native":
        raise UnsupportedProblem(
            f"mode='seed_only_native': no policy cell is installed for ({who}); "
            "use 'exact_native' or 'verified_auto'"
        )
    if identity.missing:
        why = f"{' and '.join(identity.missing)} not given, so no policy can match"
    else:
        why = f"no policy cell is installed for ({who})"
    return ModeDecision(name, f"verified_auto: {why}; exact")


def decide_with(
    mode: str, identity: PolicyIdentity, describe: Callable[[], T]
) -> tuple[ModeDecision, T]:
    """`decide`, and what `describe` returns; one `ValueError` when both are at fault.

    Faults of the arguments come before a mode that cannot be honoured for them.
    """
    described = check_both(lambda: canonical_mode(mode), describe)
    return decide(mode, identity), described
