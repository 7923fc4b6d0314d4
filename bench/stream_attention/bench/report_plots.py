"""Plots of a phase database, as PNG: time over floor, speed-up over peers, times over bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from stream_attention.bench.report_data import CellView, ReportData, format_bytes, time_of

_OURS = {"native": "#0b6e4f", "portable": "#3d7dca"}
_PEERS = ("#b0b0b0", "#8a7f72", "#9a86a4", "#7f9a94", "#a89a5a", "#6f7f9a", "#9a6f6f", "#5f6f5f")
_MARKS = ("o", "s", "^", "v", "D", "P", "X", "*")
LOSS = "#c0262d"
WIN = "#0b6e4f"
_DPI = 110
_MOST_CELLS = 40  # of one plot, so that its rows can be read


def plots(data: ReportData) -> dict[str, bytes]:
    """File name → PNG. A plot that has nothing to show is left out."""
    floored = [cell for cell in data.cells if cell.floor_us is not None and cell.timed]
    beside = [cell for cell in floored if cell.peer is not None]
    alone = [cell for cell in floored if cell.peer is None]
    parts = [alone[start : start + _MOST_CELLS] for start in range(0, len(alone), _MOST_CELLS)]
    drawn = {
        "over_floor.png": _over_floor(data, beside, "Time against floor"),
        **{
            f"over_floor_alone_{index}.png": _over_floor(
                data, part, f"Time against floor, no peer was asked ({index + 1} of {len(parts)})"
            )
            for index, part in enumerate(parts)
        },
        "speed_up.png": _speed_up(data),
        **{
            f"times_{index}.png": _times(data, family) for index, family in enumerate(data.families)
        },
    }
    return {name: png for name, png in drawn.items() if png is not None}


def _figure(width: float, height: float) -> tuple[Any, Any]:
    # Figures of their own, not pyplot's: no window system is asked for, and none is kept alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _looks(data: ReportData) -> dict[str, dict[str, Any]]:
    """Colour and mark of each contender: ours stand out, peers are muted, the same in all plots."""
    roles = {each.route: each.role for cell in data.cells for each in cell.timed}
    looks, peers = {}, 0
    for route in sorted(roles):
        if roles[route] in _OURS:
            looks[route] = {"color": _OURS[roles[route]], "marker": "o", "s": 42, "zorder": 3}
            continue
        # Colour and mark have different periods, so that many peers stay apart.
        mark = _MARKS[1 + peers % (len(_MARKS) - 1)]
        looks[route] = {"color": _PEERS[peers % len(_PEERS)], "marker": mark, "s": 26, "zorder": 2}
        peers += 1
    return looks


def _by_cell(cells: Sequence[CellView]) -> tuple[Any, Any]:
    figure, axes = _figure(11, 1.6 + 0.3 * len(cells))
    axes.set_yticks(range(len(cells)), [cell.name for cell in cells], fontsize=8)
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.grid(axis="x", which="both", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _over_floor(data: ReportData, cells: Sequence[CellView], title: str) -> bytes | None:
    if not cells:
        return None
    figure, axes = _by_cell(cells)
    for route, look in _looks(data).items():
        points = [
            (cell.over_floor(each), place)
            for place, cell in enumerate(cells)
            for each in cell.timed
            if each.route == route
        ]
        axes.scatter(*zip(*points, strict=True), label=route, **look) if points else None
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    # Between powers of ten there is room for these, whatever the range.
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("time over the time to read the bytes (1 = floor, log scale)")
    axes.set_title(title)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _png(figure)


def _speed_up(data: ReportData) -> bytes | None:
    cells = [cell for cell in data.cells if cell.speed_up is not None]
    if not cells:
        return None
    figure, axes = _by_cell(cells)
    for place, cell in enumerate(cells):
        speed_up, own, peer = cell.speed_up, cell.own, cell.peer
        assert speed_up is not None and own is not None and peer is not None
        axes.barh(place, speed_up - 1, left=1, color=LOSS if cell.is_loss else WIN, height=0.62)
        text = f"{speed_up:.2f}  {own.route} over {peer.route}"
        axes.text(max(speed_up, 1) + 0.01, place, text, va="center", fontsize=7)
    low = min(1.0, *(cell.speed_up or 1 for cell in cells))
    high = max(1.0, *(cell.speed_up or 1 for cell in cells))
    axes.set_xlim(low - 0.05, high + max(0.5, 0.6 * (high - low)))
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("best peer's time over ours (below 1, red: a loss)")
    axes.set_title("Speed-up over the best peer")
    return _png(figure)


def _times(data: ReportData, family: str) -> bytes | None:
    cells = sorted(
        (cell for cell in data.cells if cell.family == family and cell.timed),
        key=lambda cell: (cell.kv_bytes, cell.name),
    )
    sizes = [cell.kv_bytes for cell in cells if cell.kv_bytes > 0]
    if not sizes:
        return None
    figure, axes = _figure(9, 5.2)
    for route, look in _looks(data).items():
        points = [
            (cell.kv_bytes, time_of(each))
            for cell in cells
            for each in cell.timed
            if each.route == route and cell.kv_bytes > 0
        ]
        axes.scatter(*zip(*points, strict=True), label=route, **look) if points else None
    floors = sorted({(c.kv_bytes, c.floor_us) for c in cells if c.floor_us and c.kv_bytes > 0})
    if floors:
        axes.plot(*zip(*floors, strict=True), color="black", linewidth=1, label="floor")
    for crossover in data.crossovers:
        if crossover.family == family and crossover.low_bytes > 0:
            middle = (crossover.low_bytes * crossover.high_bytes) ** 0.5
            axes.axvline(middle, color=LOSS, linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.set_xlabel("K and V of all requests")
    axes.set_ylabel("microseconds (log scale)")
    changes = any(crossover.family == family for crossover in data.crossovers)
    told = "the fastest contender changes at dotted lines" if changes else "one is the fastest"
    axes.set_title(f"{family}\n{told}", fontsize=8)
    axes.grid(which="major", color="#e4e4e4", linewidth=0.6)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _png(figure)
