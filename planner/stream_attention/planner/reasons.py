"""A ranking in words: why a route was chosen, and why each other legal one was not."""

from __future__ import annotations

from stream_attention.core.backend_plan import Rejection
from stream_attention.planner.ranking import ORDER_TOKENS, Candidate, Ranking


def slower(rest: tuple[Candidate, ...], chosen: Candidate) -> tuple[Rejection, ...]:
    """Legal candidates that lost, with the comparison that they lost by."""
    return tuple(Rejection(other.record.route, (_why_lost(other, chosen),)) for other in rest)


def _why_lost(other: Candidate, chosen: Candidate) -> str:
    route = chosen.record.route
    times = f"{other.order_us:.1f} us against {_ordered_by(chosen)} of {route}"
    if chosen.capturable and not other.capturable:
        return f"legal, but cannot be captured in a CUDA graph (estimated at {times})"
    if chosen.measured and not other.measured:
        return (
            f"legal, but without evidence here, so behind {route}, which has it ({other.why}; "
            f"estimated at {other.order_us:.1f} us by cost model, {route} at "
            f"{_ordered_by(chosen)} by evidence)"
        )
    by = ", both by evidence" if chosen.measured else ""
    return f"legal, but estimated at {times}{by}"


def _ordered_by(candidate: Candidate) -> str:
    alone = candidate.order_us != candidate.estimate_us
    return f"{candidate.order_us:.1f} us" + (
        f", for one query over {ORDER_TOKENS} tokens" if alone else ""
    )


def why_chosen(chosen: Candidate, ranking: Ranking, refused: int) -> str:
    """The reason in words: how many routes were legal and by what the choice was made.

    refused: how many of those before it refused to build.
    """
    peers, kind = ranking.candidates, ""
    if any(other.measured != chosen.measured for other in peers):
        peers = tuple(other for other in peers if other.measured == chosen.measured)
        kind = " with evidence here" if chosen.measured else " without evidence here"
    if any(other.order_us < chosen.order_us for other in peers if not other.capturable):
        peers = tuple(other for other in peers if other.capturable)
        kind += " that a CUDA graph can hold"
    text = f"{chosen.record.route} is the only legal route{kind}"
    if len(peers) > 1:
        text = (
            f"{chosen.record.route} has the lowest estimate ({_ordered_by(chosen)}) "
            f"of {len(peers)} legal routes{kind}"
        )
    if refused:
        text += f" once {refused} refused to build"
    return f"{text} ({basis(chosen, ranking)})"


def basis(candidate: Candidate, ranking: Ranking) -> str:
    """What a candidate's place rests on: rows of evidence, or its cost model and why."""
    if not candidate.measured:
        return f"by cost model: {candidate.why}"
    database = ranking.found.database
    assert database is not None and database.environment is not None
    rows = f", rows {', '.join(candidate.rows)}" if candidate.rows else ""
    return f"by evidence of {database.environment.device}{rows}"


def state_of(candidate: Candidate) -> str:
    """A legal candidate in a list of all, with its estimate."""
    by = " by evidence" if candidate.measured else ""
    return f"legal, estimated at {candidate.estimate_us:.1f} us{by}"
