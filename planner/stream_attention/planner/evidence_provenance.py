"""Rules of provenance: who measured what, where, with which source, and what ran."""

from __future__ import annotations

import datetime
import re

from stream_attention.core.errors import Fault
from stream_attention.planner.evidence import OUTCOMES, EvidenceRow, PairRow, Row
from stream_attention.planner.evidence_finding import (
    COMMIT_FORM,
    Context,
    Find,
    RefusalRule,
    device_type,
    is_commit,
    of_any,
    of_single,
    sides_of,
    time_of,
    unless,
)

# Clocks of two machines that keep time differ by less.
CLOCK_SLACK = datetime.timedelta(minutes=5)

_ARCH = re.compile(r"cpu|sm_[0-9]{2,3}")
_NATIVE = re.compile(r"sm([0-9]{2,3})(_.*)?")


def _commit(row: Row, _: Context) -> Fault | None:
    commit = row.commit.partition("+")[0]
    held = is_commit(commit)
    return unless(
        held,
        "commit",
        row.commit,
        COMMIT_FORM,
    )


def _local_changes(row: Row, _: Context) -> Fault | None:
    rule = "must be of a source without local changes"
    return unless("+" not in row.commit, "commit", row.commit, rule, "a commit of them")


def _other_commit(row: Row, context: Context) -> Fault | None:
    held = context.commit is None or row.commit == context.commit
    return unless(held, "commit", row.commit, f"must be {context.commit}")


def _taken_in_future(row: Row, context: Context) -> Fault | None:
    taken, now = time_of(row), context.time
    held = taken is None or taken <= now + CLOCK_SLACK
    return unless(held, "taken_at", row.taken_at, f"must not be after now, {now:%Y-%m-%dT%H:%MZ}")


def _driver(row: Row, _: Context) -> Fault | None:
    facts = row.environment
    held = device_type(facts.arch) == "cpu" or None not in (facts.driver, facts.cuda)
    rule = "must be known on a GPU"
    return unless(held, "environment.driver, cuda", (facts.driver, facts.cuda), rule)


def _versions(row: Row, _: Context) -> Fault | None:
    external = isinstance(row, PairRow) or row.role == "external"
    held = bool(row.versions) or not external or row.outcome != "ok"
    rule = "must name the distribution of what ran, with its version"
    return unless(held, "versions", row.versions, rule)


def _environment(row: Row, context: Context) -> Fault | None:
    if context.environment is None or row.environment == context.environment:
        return None
    found = "; ".join(row.environment.differences(context.environment))
    return Fault("environment", row.environment.digest[:16], f"is another: {found}")


def _runs_on(route: str, arch: str) -> bool:
    """Whether a route of that name can run there, as the kernel packages have it."""
    native = _NATIVE.fullmatch(route)
    if native is None or not _ARCH.fullmatch(arch):
        return True
    if arch == "cpu":
        return False
    built, here = int(native[1]), int(arch.removeprefix("sm_"))
    # PTX of 8.0 runs on what is later; the later packages use what only their own has.
    return built == here or built == 80 <= here


def _route_arch(row: Row, _: Context) -> Fault | None:
    arch, ran = row.environment.arch, [side.contender for side in sides_of(row)]
    wrong = [route for route in ran if not _runs_on(route, arch)]
    held = not wrong or (isinstance(row, PairRow) and row.outcome != "ok")
    return unless(held, "resolved", ", ".join(wrong), f"cannot have run on {arch}")


def _resolved(row: EvidenceRow) -> Fault | None:
    held = row.resolved == row.requested or (not row.resolved and row.outcome != "ok")
    rule = f"{row.requested} was asked for: what else ran says nothing of it"
    return unless(held, "resolved", row.resolved, rule, row.requested)


def _registered(row: Row, context: Context) -> Fault | None:
    if context.routes is None or (isinstance(row, PairRow) and row.outcome != "ok"):
        return None
    ran = [side.contender for side in sides_of(row) if side.contender]
    unknown = [name for name in ran if name not in context.routes]
    rule = f"must be registered: one of {', '.join(context.routes)}"
    return unless(not unknown, "resolved", ", ".join(unknown), rule)


def _role(row: EvidenceRow) -> Fault | None:
    native = _NATIVE.fullmatch(row.requested) is not None
    rule = "must be native for routes named after an architecture, and for no others"
    return unless((row.role == "native") == native, "role", row.role, f"{row.requested}: {rule}")


def _reason(row: Row, _: Context) -> Fault | None:
    says = any(each.strip() and each.strip() not in OUTCOMES for each in row.reasons)
    rule = f"must say why it is {row.outcome}"
    return unless(row.outcome == "ok" or says, "reasons", row.reasons, rule)


def _filled(name: str, rule: str) -> Find:
    return of_any(
        lambda row, _: unless(bool(getattr(row, name).strip()), name, getattr(row, name), rule)
    )


PROVENANCE_RULES = (
    RefusalRule("commit", of_any(_commit)),
    RefusalRule("local_changes", of_any(_local_changes)),
    RefusalRule("other_commit", of_any(_other_commit)),
    RefusalRule("command", _filled("command", "must be the command line that measured")),
    RefusalRule(
        "taken_at",
        of_any(
            lambda row, _: unless(
                time_of(row) is not None,
                "taken_at",
                row.taken_at,
                "must be a time in UTC with seconds",
                "'2025-01-31T12:00:00Z'",
            )
        ),
    ),
    RefusalRule("taken_in_future", of_any(_taken_in_future)),
    RefusalRule(
        "arch",
        of_any(
            lambda row, _: unless(
                _ARCH.fullmatch(row.environment.arch) is not None,
                "environment.arch",
                row.environment.arch,
                "must be cpu, or as sm_90",
            )
        ),
    ),
    RefusalRule("driver", of_any(_driver)),
    RefusalRule("versions", of_any(_versions)),
    RefusalRule("environment", of_any(_environment)),
    RefusalRule("route_arch", of_any(_route_arch)),
    RefusalRule("resolved", of_single(_resolved)),
    RefusalRule("registered", of_any(_registered)),
    RefusalRule("role", of_single(_role)),
    RefusalRule("reason", of_any(_reason)),
)
