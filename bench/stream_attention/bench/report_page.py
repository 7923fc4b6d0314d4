"""A phase database as one HTML page that needs nothing beside it: styles and plots are inside."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence

from stream_attention.bench.report_data import (
    CellView,
    ReportData,
    format_bytes,
    format_ratio,
    format_time,
)
from stream_attention.planner.phase_db import CandidateOutcome, Regret

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem;
       color: #1c1c1c; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 0.85rem; display: block; overflow-x: auto; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid #e2e2e2; text-align: left;
         vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.loss td { color: #c0262d; } tr.unresolved td { color: #8a5a00; }
img { max-width: 100%; height: auto; } details { margin: 0.4rem 0; }
code { font-size: 0.85em; word-break: break-all; }
"""


def page(data: ReportData, plots: Mapping[str, bytes]) -> str:
    """The text of the page. plots: file name → PNG, shown in that order."""
    database = data.database
    device = database.environment.device if database.environment else "no device"
    title = f"Evidence of {database.arch}: {device}"
    parts = [
        f"<h1>{_text(title)}</h1>",
        _summary(data),
        "<h2>Cells</h2>",
        _cells([cell for cell in data.cells if cell.timed]),
        "<h2>Not decided yet</h2>",
        _unresolved(data),
        *(_plot(name, png) for name, png in plots.items()),
        "<h2>Where the fastest contender changes</h2>",
        _crossovers(data),
        "<h2>Ranges that models cover</h2>",
        _models(data),
        "<h2>Every outcome</h2>",
        *(_outcomes(cell) for cell in data.cells),
        "<h2>Rows that did not count</h2>",
        _refused(data),
        "<h2>Environment and sources</h2>",
        _environment(data),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def summary_lines(data: ReportData) -> tuple[str, ...]:
    """What the evidence comes to, a sentence a line; for the page and for a terminal."""
    resolved = len(data.cells) - len(data.unresolved)
    lines = [f"{len(data.cells)} cells, {resolved} resolved, {len(data.unresolved)} unresolved."]
    if data.over_floor is not None:
        lines.append(f"Our fastest route: {data.over_floor:.3f} × floor (geometric mean).")
    if data.speed_up is not None:
        compared = [cell for cell in data.cells if cell.speed_up is not None]
        lines.append(
            f"Best peer over ours: {data.speed_up:.3f} × (geometric mean of {len(compared)} "
            f"cells), slower than a peer in {len(data.losses)}."
        )
    for what, regret in (
        ("held-out cells", data.database.all_regret.hold_out),
        ("cells left out one at a time", data.database.all_regret.leave_one_out),
    ):
        lines.append(f"Regret of the choice by models, {what}: {_regret(regret)}.")
    return tuple(lines)


def _regret(regret: Regret) -> str:
    if regret.geometric_mean is None or regret.worst is None:
        return "no cell"
    return (
        f"{regret.geometric_mean:.2%} geometric mean, {regret.worst:.2%} worst "
        f"({regret.worst_cell}), {regret.num_cells} cells"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _summary(data: ReportData) -> str:
    return "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in summary_lines(data)) + "</ul>"


def _table(
    head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], numbers: Sequence[int] = ()
) -> str:
    """rows: (class of the row, texts of its cells). numbers: columns that are set to the right."""

    def line(tag: str, texts: Sequence[str], kind: str) -> str:
        cells = (
            f'<{tag} class="number">{_text(text)}</{tag}>'
            if place in numbers
            else f"<{tag}>{_text(text)}</{tag}>"
            for place, text in enumerate(texts)
        )
        opening = f'<tr class="{kind}">' if kind else "<tr>"
        return f"{opening}{''.join(cells)}</tr>"

    body = [line("td", texts, kind) for kind, texts in rows]
    if not body:
        return "<p>None.</p>"
    return f"<table>{line('th', head, '')}{''.join(body)}</table>"


def _cells(cells: Sequence[CellView]) -> str:
    head: tuple[str, ...] = ("cell", "K and V", "floor, us", "ours", "us", "× floor", "best peer")
    head += ("us", "speed-up", "paired ratio, 95 %", "decision")
    return _table(head, (_cell(cell) for cell in cells), numbers=(1, 2, 4, 5, 7, 8, 9))


def _cell(cell: CellView) -> tuple[str, tuple[str, ...]]:
    own, peer, decision = cell.own, cell.peer, cell.decision
    kind = "loss" if cell.is_loss else "unresolved" if decision.status == "unresolved" else ""
    ratio = decision.ratio
    chosen = f"{decision.status} {decision.chosen}".strip()
    return kind, (
        decision.name + (" (held out)" if decision.hold_out else ""),
        format_bytes(cell.kv_bytes),
        format_time(cell.floor_us),
        own.route if own else "–",
        format_time(own.p50_us if own else None),
        format_ratio(cell.over_floor(own) if own else None),
        peer.route if peer else "–",
        format_time(peer.p50_us if peer else None),
        format_ratio(cell.speed_up),
        f"{ratio.p50:.3f} ({ratio.low:.3f}–{ratio.high:.3f})" if ratio else "–",
        chosen,
    )


def _unresolved(data: ReportData) -> str:
    rows = (
        ("unresolved", (each.name, ", ".join(each.decision.missing))) for each in data.unresolved
    )
    return _table(("cell", "what is missing"), rows)


def _plot(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<p><img alt="{_text(name)}" src="data:image/png;base64,{data}"></p>'


def _crossovers(data: ReportData) -> str:
    head = ("family", "fastest below", "at", "fastest above", "at")
    rows = (
        (
            "",
            (
                each.family,
                each.below,
                f"{format_bytes(each.low_bytes)} ({each.cell_below})",
                each.above,
                f"{format_bytes(each.high_bytes)} ({each.cell_above})",
            ),
        )
        for each in data.crossovers
    )
    return _table(head, rows)


def _models(data: ReportData) -> str:
    head = ("route", "family", "cells", "error, median", "error, worst", "range")
    rows = (
        (
            "",
            (
                model.route,
                model.family,
                str(len(model.points)),
                "–" if model.error_p50 is None else f"{model.error_p50:.1%}",
                "–" if model.error_max is None else f"{model.error_max:.1%}",
                ", ".join(f"{r.feature} {r.low:g}–{r.high:g}" for r in model.ranges),
            ),
        )
        for model in data.database.models
    )
    return _table(head, rows, numbers=(2, 3, 4))


def _outcomes(cell: CellView) -> str:
    def line(each: CandidateOutcome) -> tuple[str, tuple[str, ...]]:
        reason = "; ".join(each.reasons)
        free = {True: "none", False: "some", None: "–"}[each.allocation_free]
        time = format_time(each.p50_us)
        return "", (each.route, each.role, each.outcome, time, free, each.row, reason)

    order = sorted(
        cell.decision.candidates,
        key=lambda each: (each.p50_us is None, each.p50_us or 0.0, each.route),
    )
    head = ("contender", "role", "outcome", "us", "allocations", "row", "reasons")
    table = _table(head, map(line, order), numbers=(3,))
    reason = f"<p>{_text(cell.decision.reason)}</p>"
    return f"<details><summary>{_text(cell.name)}</summary>{reason}{table}</details>"


def _refused(data: ReportData) -> str:
    rows = (
        ("", (each.contender, each.cell, each.row, "; ".join(each.reasons)))
        for each in data.database.refused
    )
    return _table(("contender", "cell", "row", "reasons"), rows)


def _environment(data: ReportData) -> str:
    database, environment = data.database, data.database.environment
    facts: list[tuple[str, object]] = []
    if environment is not None:
        facts += [
            (name, getattr(environment, name)) for name in type(environment).__dataclass_fields__
        ]
    facts += [
        ("commit", database.commit or "none"),
        ("newest row", database.compiled_at or "none"),
        ("database, SHA-256", database.digest),
        *((f"evidence file {name}", sha256) for name, sha256 in database.evidence),
    ]
    rows = (("", (name, "unknown" if value is None else str(value))) for name, value in facts)
    return _table(("fact", "value"), rows)
