"""Pairs of contenders: which are asked for, both checked, and reasons that name who fails."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from stream_attention.bench import pairs, pools, runner
from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Contender, Work
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.lengths import parse_lengths
from stream_attention.bench.pairs import Pairing, parse_pairing
from stream_attention.bench.peers.sdpa import build_gather
from stream_attention.bench.results import Row
from stream_attention.bench.timing import Timing

CPU = torch.device("cpu")
CURVE = ReadCurve((ReadPoint(1, 1e-3, "sum"),), "cpu_cold")
CASE = AttentionCase(
    batch=2,
    lengths=parse_lengths("37,16"),
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=16,
    dtype="float32",
)
GOOD = Contender("good", "route", build_gather)


@pytest.fixture
def setting(monkeypatch):
    """Three pools of `CASE`, which are a cold rotation here."""
    for module in (pools, runner):
        monkeypatch.setattr(module, "cold_rotation_bytes", lambda device: 2 * CASE.kv_bytes + 1)
    settings = runner.Settings(pairs=6, max_seconds=1.0)
    return runner.prepare(CASE, CPU, settings, CURVE)


def peer(build, **options):
    return Contender("other", "peer", build, **options)


def raising(error):
    def build(case, found, device):
        raise error

    return build


def spoilt(act):
    """Right works whose output `act` spoils after each run."""

    def build(case, found, device):
        works = build_gather(case, found, device)
        return [Work(lambda work=work: (work.run(), act(work.out)), work.out) for work in works]

    return build


def test_both_sides_are_timed_and_checked(setting):
    row = pairs.run_pair(GOOD, peer(build_gather), setting)
    assert (row.outcome, row.first, row.second, row.case) == ("ok", "good", "other", CASE)
    assert (row.timing.n, row.timing.method, row.timing.first.num_pools) == (6, "cpu_cold", 3)
    assert all(check.ok and check.rows_checked == 2 for check in row.checks)
    assert row.resolved == ("good", "other") and row.seconds > 0


@pytest.mark.parametrize(
    ("build", "outcome", "reason"),
    [
        (raising(RuntimeError("no luck")), "failed", "other: RuntimeError: no luck"),
        (raising(SystemExit(3)), "failed", "other: SystemExit: 3"),
        (lambda *given: [], "failed", "other: ValueError: build gave 0 works for 3 pools"),
        (spoilt(lambda out: out.fill_(float("nan"))), "wrong", "other: after the timed runs: pool"),
        (spoilt(lambda out: out.mul_(2)), "wrong", "other: after the timed runs: "),
    ],
)
def test_a_side_that_fails_is_named(setting, build, outcome, reason):
    row = pairs.run_pair(GOOD, peer(build), setting)
    assert row.outcome == outcome and row.reasons[0].startswith(reason), row.reasons
    assert (row.timing is None) == (outcome == "failed")


def test_work_that_is_left_out_when_timed_is_wrong(setting):
    def build(case, found, device):
        works = build_gather(case, found, device)
        for work in works:
            work.run()  # right so far, and never again
        return [Work(lambda: None, work.out) for work in works]

    row = pairs.run_pair(peer(build), GOOD, setting)
    assert row.outcome == "wrong" and not row.checks[0].ok and row.checks[1].ok
    assert "poison" in row.reasons[0]


def test_a_pair_that_cannot_be_says_who_refuses(setting):
    no = peer(build_gather, supports=lambda case, device: ("page 16", "never"))
    row = pairs.run_pair(GOOD, no, setting)
    assert (row.outcome, row.reasons) == ("unsupported", ("other: page 16", "other: never"))


def test_a_time_that_reading_cannot_take_is_wrong(setting):
    slow = dataclasses.replace(setting, least_us=1e12)
    row = pairs.run_pair(GOOD, peer(build_gather), slow)
    assert row.outcome == "wrong" and len(row.reasons) == 2
    assert row.reasons[0].startswith("good: implausible: a median of ")


def fills(setting, *contenders):
    seen = []
    wrapped = []
    for contender in contenders:

        def build(case, found, device):
            seen.append(float(found[0].cache.key[found[0].unused_pages].flatten()[0]))
            return build_gather(case, found, device)

        wrapped.append(dataclasses.replace(contender, build=build))
    pairs.run_pair(*wrapped, setting)
    return seen


def test_unused_slots_hold_nan_only_for_two_that_promised_not_to_look(setting):
    other = dataclasses.replace(GOOD, name="also_ours")
    assert str(fills(setting, GOOD, other)) == "[nan, nan]"
    assert fills(setting, GOOD, peer(build_gather)) == [1000.0, 1000.0]


KNOWN = {name: Contender(name, "peer", build_gather) for name in ("torch", "sdpa", "xqa")}


def test_pairs_by_name_and_best():
    assert parse_pairing(None, KNOWN) == Pairing()
    assert parse_pairing("best", KNOWN) == Pairing(best=True)
    found = parse_pairing("torch:sdpa, torch:xqa,best,torch:sdpa", KNOWN)
    assert found == Pairing((("torch", "sdpa"), ("torch", "xqa")), True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bset", "--paired='bset': must be best or ROUTE:PEER; use --paired=best"),
        ("", "--paired='': must be best or ROUTE:PEER"),
        ("torch:", "--paired='torch:': must be best or ROUTE:PEER"),
        ("torch:sdap", "--paired='sdap': must name a contender out of torch, sdpa, xqa; use sdpa"),
        ("torch:torch", "--paired='torch:torch': must name two contenders"),
        ("a:b,c", "3 faults"),
    ],
)
def test_other_pairs_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_pairing(text, KNOWN)


def test_best_sets_each_right_native_route_beside_the_best_peer_of_the_case():
    def row(name, kind, us, outcome="ok"):
        reasons = () if outcome == "ok" else ("why",)
        return Row(name, kind, outcome, reasons, Timing((us,), "cpu_warm"))

    facts = runner.case_facts(CASE, CPU, runner.Settings(), CURVE)
    rows = (
        row("native", "route", 3.0),
        row("broken", "route", 1.0, "wrong"),
        row("torch", "route", 2.0),
        row("slow", "peer", 9.0),
        row("fast", "peer", 5.0),
    )
    result = dataclasses.replace(facts, rows=rows)
    native = {"native", "broken"}
    assert Pairing(best=True).of(result, native) == (("native", "fast"),)
    both = Pairing((("torch", "slow"), ("native", "fast")), True)
    assert both.of(result, native) == (("torch", "slow"), ("native", "fast"))
    alone = dataclasses.replace(facts, rows=rows[:3])
    assert Pairing(best=True).of(alone, native) == ()
    allocates = (dataclasses.replace(rows[4], timed_allocations=1),)
    free = (dataclasses.replace(rows[3], timed_allocations=0),)
    mixed = dataclasses.replace(facts, rows=(*rows[:3], *free, *allocates))
    assert Pairing(best=True).of(mixed, native) == (("native", "fast"), ("native", "slow"))


def test_native_routes_are_those_whose_record_says_so():
    class Records:
        def attention_records(self):
            return [
                SimpleNamespace(route="a", native=True),
                SimpleNamespace(route="b", native=False),
            ]

    assert pairs.native_routes(Records()) == {"a"}
    assert pairs.native_routes().isdisjoint({"torch", "triton"})
