"""A phase database as a page and plots: what is computed, and that all of it is shown."""

from __future__ import annotations

import dataclasses
import io
import re
import statistics
from html.parser import HTMLParser

import pytest
from PIL import Image

from stream_attention.bench.report_data import format_bytes, format_time, report_data
from stream_attention.bench.report_page import page, summary_lines
from stream_attention.bench.report_plots import LOSS, plots
from stream_attention.planner.evidence import EvidenceRow
from stream_attention.planner.evidence_testing import (
    floor_us,
    good_cell,
    good_fingerprint,
    good_row,
)
from stream_attention.planner.phase_db import (
    CandidateOutcome,
    CellDecision,
    PhaseDatabase,
    Ratio,
    RefusedRow,
)

NATIVE, PORTABLE, PEER = "sm90_decode", "triton", "flashinfer_cudnn"


def decided(name: str, tokens: int, **ratios: float) -> tuple[CellDecision, list[EvidenceRow]]:
    """A cell whose contenders took `ratios` of its floor; the fastest is chosen."""
    cell = good_cell((tokens,) * 2)
    rows = [good_row(cell, route, ratio * floor_us(cell)) for route, ratio in ratios.items()]
    candidates = [
        CandidateOutcome(
            route=row.resolved,
            role=row.role,
            outcome="ok",
            p50_us=statistics.median(row.timing.samples_us),
            row=row.id,
            allocation_free=True,
        )
        for row in rows
    ]
    lost = CandidateOutcome(
        route="flash_attn_4", role="external", outcome="failed", reasons=("<boom> & more",)
    )
    chosen = min(candidates, key=lambda each: each.p50_us)
    decision = CellDecision(
        cell=cell,
        name=name,
        status=chosen.role,
        chosen=chosen.route,
        reason=f"{chosen.route} is the fastest",
        candidates=(*candidates, lost),
    )
    return decision, rows


def database(*decisions: CellDecision, **changes: object) -> PhaseDatabase:
    ordered = tuple(sorted(decisions, key=lambda decision: decision.name))
    fields = {
        "arch": "sm_90",
        "environment": good_fingerprint(),
        "cells": ordered,
        "evidence": (("sm_90-0123.jsonl", "ab" * 32),),
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "compiled_at": "2026-01-02T03:04:05Z",
    }
    return PhaseDatabase(**{**fields, **changes})


@pytest.fixture
def data():
    won, won_rows = decided("small cell", 1024, sm90_decode=1.1, triton=1.4, flashinfer_cudnn=1.32)
    lost, lost_rows = decided("big cell", 8192, sm90_decode=1.5, triton=1.4, flashinfer_cudnn=1.25)
    return report_data(database(won, lost), [*won_rows, *lost_rows])


def test_ratios_are_of_our_fastest_route_and_the_best_peer(data):
    small, big = data.cells  # by bytes, not by name
    assert (small.name, big.name) == ("small cell", "big cell")
    assert (small.own.route, big.own.route) == (NATIVE, PORTABLE)
    assert small.speed_up == pytest.approx(1.2)
    assert big.speed_up == pytest.approx(1.25 / 1.4)
    assert data.speed_up == pytest.approx((1.2 * 1.25 / 1.4) ** 0.5)
    assert [cell.name for cell in data.losses] == ["big cell"]


def test_floors_are_the_rows_own(data):
    cell, rows = decided("cell", 4096, sm90_decode=2.0, flashinfer_cudnn=2.5)
    view = report_data(database(cell), rows).cells[0]
    assert view.floor_us == pytest.approx(floor_us(cell.cell))
    assert view.over_floor(view.own) == pytest.approx(2.0)
    assert report_data(database(cell), []).cells[0].floor_us is None


def test_a_crossover_lies_between_the_neighbours_where_the_fastest_changes(data):
    (crossover,) = data.crossovers
    assert (crossover.below, crossover.above) == (NATIVE, PEER)
    assert (crossover.cell_below, crossover.cell_above) == ("small cell", "big cell")
    assert crossover.low_bytes < crossover.high_bytes


def test_a_peer_without_a_route_of_ours_is_a_loss():
    cell, rows = decided("cell", 1024, flashinfer_cudnn=1.2)
    found = report_data(database(cell), rows)
    assert [view.name for view in found.losses] == ["cell"]
    assert found.speed_up is None


class Tags(HTMLParser):
    """Checks that tags close in order; keeps texts by class of their row, and what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.rows: dict[str, str] = {}
        self.sources: list[str] = []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "img":
            self.sources.append(found["src"])
        if tag not in ("meta", "img"):
            self.open.append((tag, found.get("class", "")))
        assert not {"href", "srcset", "action"} & set(found)
        assert tag not in ("script", "link", "iframe")

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, text):
        for tag, kind in self.open:
            if tag == "tr":
                self.rows[kind] = self.rows.get(kind, "") + text + "|"


def test_the_page_is_whole_and_needs_nothing_beside_it(data):
    drawn = plots(data)
    tags = Tags()
    text = page(data, drawn)
    tags.feed(text)
    assert not tags.open
    assert len(tags.sources) == len(drawn) == 3
    assert all(source.startswith("data:image/png;base64,") for source in tags.sources)
    assert "http" not in re.sub(r"base64,[^\"]*", "", text)


def test_losses_are_red_and_nothing_else_is(data):
    tags = Tags()
    tags.feed(page(data, {}))
    assert tags.rows["loss"].startswith("big cell|")
    assert "small cell" not in tags.rows["loss"]


def test_every_outcome_reason_row_and_source_is_on_the_page():
    cell, rows = decided("cell <1>", 1024, sm90_decode=1.1, flashinfer_cudnn=1.3)
    refused = RefusedRow(row="feed", contender="triton", cell="cell", reasons=("no driver",))
    text = page(report_data(database(cell, refused=(refused,)), rows), {})
    assert "cell &lt;1&gt;" in text and "cell <1>" not in text
    assert "&lt;boom&gt; &amp; more" in text
    for word in ("failed", "feed", "no driver", "ab" * 32, rows[0].id, "Device of sm_90", "580.1"):
        assert word in text, word


def test_what_is_unresolved_says_what_is_missing():
    base, rows = decided("cell", 1024, sm90_decode=1.1)
    cell = CellDecision(
        cell=base.cell,
        name="cell",
        status="unresolved",
        missing=("flashinfer_xqa",),
        reason="a baseline has no outcome",
        candidates=base.candidates,
    )
    found = report_data(database(cell), rows)
    assert "1 cells, 0 resolved, 1 unresolved." in summary_lines(found)
    tags = Tags()
    tags.feed(page(found, {}))
    assert "cell|flashinfer_xqa|" in tags.rows["unresolved"]


def test_the_interval_of_a_paired_ratio_is_shown():
    cell, rows = decided("cell", 1024, sm90_decode=1.1, flashinfer_cudnn=1.3)
    ratio = Ratio(
        first=NATIVE,
        second=PEER,
        p50=0.846,
        low=0.84,
        high=0.851,
        level=0.95,
        num_pairs=25,
        row="f",
    )
    fields = {name: getattr(cell, name) for name in cell.__dataclass_fields__}
    found = report_data(database(CellDecision(**{**fields, "ratio": ratio})), rows)
    assert "0.846 (0.840–0.851)" in page(found, {})


def test_plots_have_ink_and_losses_are_drawn_in_red(data):
    red = tuple(bytes.fromhex(LOSS[1:]))
    for name, png in plots(data).items():
        image = Image.open(io.BytesIO(png)).convert("RGB")
        colours = {colour: count for count, colour in image.getcolors(1 << 24)}
        assert image.width > 600 and len(colours) > 10, name
        if name == "speed_up.png":
            assert colours[red] > 500


def test_cells_without_peers_have_plots_of_their_own_that_can_be_read(data):
    one = data.cells[0]
    alone = (dataclasses.replace(one, peer=None),) * 85
    beside = tuple(cell for cell in data.cells if cell.peer is not None)
    drawn = plots(dataclasses.replace(data, cells=(*beside, *alone)))
    names = [name for name in drawn if name.startswith("over_floor")]
    assert names == ["over_floor.png", *(f"over_floor_alone_{index}.png" for index in range(3))]
    shown = plots(dataclasses.replace(data, cells=beside))
    assert drawn["over_floor.png"] == shown["over_floor.png"]


def test_a_database_without_times_has_a_page_and_no_plots():
    found = report_data(PhaseDatabase(arch="sm_80"))
    assert plots(found) == {}
    assert "no device" in page(found, {})
    assert summary_lines(found)[0] == "0 cells, 0 resolved, 0 unresolved."


def test_the_same_data_gives_the_same_bytes(data):
    assert plots(data) == plots(data)


@pytest.mark.parametrize(
    ("count", "text"),
    [(512, "512 B"), (16 << 20, "16 MiB"), (2 << 30, "2 GiB"), (1536, "1.5 KiB")],
)
def test_bytes_are_told_in_the_largest_unit(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(("us", "text"), [(None, "–"), (7.238, "7.24"), (472.4, "472")])
def test_times_have_three_digits(us, text):
    assert format_time(us) == text
