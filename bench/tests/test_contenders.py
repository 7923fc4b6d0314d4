"""Outcomes of contenders, and that routes and peers arrive without an edit of the harness."""

import dataclasses
import re
import sys

import pytest
import torch

from stream_attention.bench import contenders as contenders_lib
from stream_attention.bench import pools, routes, runner
from stream_attention.bench.cases import FP8, AttentionCase
from stream_attention.bench.check import Check, worst
from stream_attention.bench.contenders import Contender, PeerRegistry, Work, choose, peer
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.lengths import parse_lengths, uniform
from stream_attention.core import oracle
from stream_attention.core.backend_plan import AttentionBackendPlan
from stream_attention.core.errors import UnsupportedProblem
from stream_attention.core.registry import AttentionRecord, CapabilityRule, Registry

CPU = torch.device("cpu")
CURVE = ReadCurve((ReadPoint(1, 1.0, "sum"),), "cpu_cold")
SETTINGS = runner.Settings(replays=5, cold=False, max_seconds=0.2)
CASE = AttentionCase(
    batch=3,
    lengths=parse_lengths("37,16,1"),
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=16,
    page_size=8,
    dtype="float32",
)


def oracle_work(pool, spoil=lambda out: None):
    """A right contender: the oracle itself, with a fault to order."""
    out = torch.empty_like(pool.q)

    def run():
        out.copy_(oracle.attention(pool.q, pool.cache))
        spoil(out)

    return Work(run, out, note="slow")


def contender(build_one, kind="peer", **fields):
    def build(case, pools, device):
        return [build_one(pool) for pool in pools]

    return Contender("mine", kind, build, **fields)


def row_of(entry, case=CASE, settings=SETTINGS):
    (row,) = runner.run_case(case, [entry], CPU, settings, CURVE).rows
    return row


def fail(error):
    def raiser(*args):
        raise error

    return raiser


def test_a_right_contender_is_ok_with_timing_and_check():
    row = row_of(contender(oracle_work))
    assert row.outcome == "ok" and row.reasons == () and row.note == "slow"
    assert row.timing.n == 5 and row.timing.method == "cpu_warm"
    assert row.check.ok and row.check.rows_checked == 3
    assert row.check.max_error < row.check.max_bound


def spoil_value(out):
    out[1, 2, 3] += 0.01


def spoil_row(out):
    out[2] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(spoil_value, "max error 1.0"), (spoil_row, "1 of 3 rows hold NaN.* first row 2")],
)
def test_a_wrong_contender_loses_its_row_and_is_not_timed(spoil, message):
    row = row_of(contender(lambda pool: oracle_work(pool, spoil)))
    assert row.outcome == "wrong" and row.timing is None
    assert re.search(message, row.reasons[0]), row.reasons


def test_an_output_that_is_never_written_is_wrong():
    row = row_of(contender(lambda pool: Work(lambda: None, torch.zeros_like(pool.q))))
    assert row.outcome == "wrong" and "3 of 3 rows hold NaN, Inf or poison" in row.reasons[0]


def test_what_is_judged_was_written_by_the_timed_runs():
    runs = []

    def build_one(pool):
        good = oracle_work(pool)

        def run():
            runs.append(1)
            if len(runs) <= 2:  # the probe and the warm-up are right, the timed runs do nothing
                good.run()

        return Work(run, good.out)

    row = row_of(contender(build_one))
    assert row.outcome == "wrong" and row.reasons[0].startswith("after the timed runs: 3 of 3 rows")


def test_wrong_shape_and_dtype_are_wrong():
    row = row_of(contender(lambda pool: Work(lambda: None, pool.q[:1].half())))
    assert "output is (1, 4, 16) torch.float16, want (3, 4, 16) torch.float32" in row.reasons[0]


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (RuntimeError("no\n  luck"), "failed", "RuntimeError: no luck"),
        (SystemExit(3), "failed", "SystemExit: 3"),
        (UnsupportedProblem("not this one"), "unsupported", "UnsupportedProblem: not this one"),
    ],
)
@pytest.mark.parametrize("when", ["build", "run"])
def test_an_exception_is_an_outcome_and_the_next_contender_runs(error, outcome, reason, when):
    def build_one(pool):
        if when == "build":
            raise error
        return Work(fail(error), torch.empty_like(pool.q))

    bad = contender(build_one)
    good = Contender("good", "peer", contender(oracle_work).build)
    first, second = runner.run_case(CASE, [bad, good], CPU, SETTINGS, CURVE).rows
    assert (first.outcome, first.reasons) == (outcome, (reason,))
    assert second.outcome == "ok"


def test_stated_reasons_make_it_unsupported_without_a_build():
    row = row_of(contender(fail(AssertionError), supports=lambda case, device: ("odd", "even")))
    assert row.outcome == "unsupported" and row.reasons == ("odd", "even")


@pytest.mark.parametrize(("kind", "finite"), [("route", False), ("peer", True)])
def test_unused_slots_hold_nan_for_routes_and_a_number_for_peers(kind, finite):
    seen = []

    def build_one(pool):
        seen.append(bool(pool.cache.key.isfinite().all()))
        return oracle_work(pool)

    assert row_of(contender(build_one, kind)).outcome == "ok"
    assert set(seen) == {finite}


def test_both_ends_of_the_rotation_are_checked():
    def build(case, pools, device):
        return [oracle_work(pools[0]) for _ in pools]  # every plan bound to the first pool

    row = row_of(
        Contender("stuck", "peer", build), settings=runner.Settings(replays=5, max_seconds=0.2)
    )
    assert row.outcome == "wrong"


def test_the_worst_verdict_counts():
    fine = Check(True, 1.0, 2.0, 1.0, 2.0, 1, 1)
    tight = Check(True, 1.9, 2.0, 1.0, 2.0, 1, 1)
    bad = Check(False, 1.0, 2.0, 3.0, 2.0, 1, 1, "rms")
    assert worst([fine, tight]) is tight and worst([fine, bad, tight]) is bad


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        AttentionCase(batch=2, lengths=uniform(24), layout="HND", head_dim=8, dtype="float32"),
        AttentionCase(batch=3, lengths=parse_lengths("90,80,75"), head_dim=8, dtype="float32"),
        AttentionCase(batch=2, lengths=parse_lengths("20,9"), head_dim=8, q_len=3, dtype="float32"),
        AttentionCase(
            batch=2, lengths=uniform(8), num_qo_heads=2, num_kv_heads=2, dtype="bfloat16"
        ),
        AttentionCase(batch=2, lengths=uniform(24), head_dim=16, cache="contiguous", capacity=48),
        AttentionCase(
            batch=3, lengths=parse_lengths("90,80,3"), head_dim=8, cache="contiguous", layout="HND"
        ),
        AttentionCase(batch=2, lengths=parse_lengths("40,39"), head_dim=16, kv_dtype=FP8),
        AttentionCase(
            batch=2, lengths=uniform(40), head_dim=16, kv_dtype=FP8, cache="contiguous", q_len=2
        ),
        AttentionCase(batch=2, lengths=uniform(40), head_dim=16, capacity=4096, layout="HND"),
    ],
    ids=lambda case: case.name.replace(" ", "-"),
)
@pytest.mark.parametrize("name", ["sdpa_gather", "sdpa_gather_packed"])
def test_gather_and_sdpa_agree_with_the_oracle(case, name):
    row = row_of(contenders_lib.load_peers().peers[name], case)
    if case.q_len > 1 and name == "sdpa_gather_packed":
        assert row.outcome == "unsupported" and "q_len" in row.reasons[0]
    else:
        assert row.outcome == "ok", row.reasons


def test_sdpa_says_that_it_cannot_serve_an_empty_request():
    case = AttentionCase(batch=2, lengths=parse_lengths("4,0"), dtype="float32")
    row = row_of(contenders_lib.load_peers().peers["sdpa_gather"], case)
    assert row.outcome == "unsupported" and "use lengths >= 1" in row.reasons[0]


@pytest.mark.parametrize(
    ("kind", "promise", "outcome"),
    [("peer", False, "unsupported"), ("peer", True, "ok"), ("route", False, "ok")],
)
def test_a_peer_serves_an_invariant_case_only_by_its_promise(kind, promise, outcome):
    case = dataclasses.replace(CASE, batch_invariant=True)
    row = row_of(contender(oracle_work, kind, batch_invariant=promise), case)
    assert row.outcome == outcome
    assert (row.reasons == ()) == (outcome == "ok")


class EchoLaunch:
    """A route's launch that computes by the oracle."""

    def __init__(self, bound, arch):
        self.bound = bound
        self.backend_plan = AttentionBackendPlan(route="echo", backend="test", arch=arch, splits=3)

    def run(self):
        view, q = self.bound.kv, self.bound.q
        for request in range(view.batch):
            tokens = int(view.kv_lens[request, 0])
            ids = view.page_table[request, 0, : -(-tokens // view.page_size)].long()
            key = view.key[ids].flatten(0, 1)[:tokens].unsqueeze(0)
            value = view.value[ids].flatten(0, 1)[:tokens].unsqueeze(0)
            one = slice(request, request + 1)
            self.bound.out[one] = oracle.attention(q[one], (key, value)).to(q.dtype)


def echo_record(**fields):
    return AttentionRecord(
        route="echo",
        backend="test",
        package="test",
        rules=fields.pop("rules", ()),
        estimate_us=lambda problem, device: 1.0,
        build=lambda problem, tiles, device, bound: EchoLaunch(bound, device.arch),
        **fields,
    )


def test_a_new_route_is_timed_by_being_registered():
    registry = Registry()
    registry.register_attention(echo_record())
    found = {c.name: c for c in routes.route_contenders(registry)}
    assert list(found)[-1] == "engine" and "torch" in found
    row = row_of(found["echo"])
    assert (row.kind, row.outcome, row.note) == ("route", "ok", "3 splits")


def test_a_routes_own_rules_are_its_reasons():
    rule = CapabilityRule("never", lambda problem, device: f"phase={problem.phase}: no; use none")
    registry = Registry()
    registry.register_attention(echo_record(rules=(rule,)))
    found = {c.name: c for c in routes.route_contenders(registry)}
    row = row_of(found["echo"])
    assert row.outcome == "unsupported" and row.reasons == ("phase=decode: no; use none",)


@pytest.mark.parametrize("name", ["torch", "engine"])
@pytest.mark.parametrize(
    "fields",
    [
        {"kv_dtype": FP8, "dtype": "bfloat16"},
        {"cache": "contiguous"},
        {"cache": "contiguous", "layout": "HND", "kv_dtype": FP8, "capacity": 64},
        {"capacity": 131072},
        {"batch_invariant": True},
    ],
    ids=str,
)
def test_our_portable_route_serves_every_form_of_a_case(name, fields):
    found = {c.name: c for c in routes.route_contenders()}
    row = row_of(found[name], dataclasses.replace(CASE, page_size=16, **fields))
    assert row.outcome == "ok", row.reasons


def test_batch_invariance_is_asked_of_routes_and_of_the_engine():
    asked = []

    def build_echo(problem, tiles, device, bound):
        asked.append(problem.batch_invariant)
        return EchoLaunch(bound, device.arch)

    registry = Registry()
    registry.register_attention(dataclasses.replace(echo_record(), build=build_echo))
    found = {c.name: c for c in routes.route_contenders(registry)}
    assert row_of(found["echo"], dataclasses.replace(CASE, batch_invariant=True)).outcome == "ok"
    assert set(asked) == {True}
    rule = CapabilityRule("variant", lambda p, device: "no" if p.batch_invariant else None)
    registry.unregister("echo")
    registry.register_attention(echo_record(rules=(rule,)))
    found = {c.name: c for c in routes.route_contenders(registry)}
    row = row_of(found["echo"], dataclasses.replace(CASE, batch_invariant=True))
    assert row.outcome == "unsupported" and row.reasons == ("no",)


def test_a_new_peer_arrives_in_a_module_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "my_peers.py").write_text(
        "from stream_attention.bench.contenders import Work, peer\n"
        "from stream_attention.core import oracle\n"
        "@peer('mine_by_module')\n"
        "def build(case, pools, device):\n"
        "    kept = {}\n"
        "    def work(pool):\n"
        "        def run():\n"
        "            kept[0] = oracle.attention(pool.q, pool.cache).to(pool.q.dtype)\n"
        "        return Work(run, output=lambda: kept[0])\n"
        "    return [work(pool) for pool in pools]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry = contenders_lib.load_peers(["my_peers"])
    try:
        assert row_of(registry.peers["mine_by_module"]).outcome == "ok"
    finally:
        registry.peers.pop("mine_by_module", None)
        sys.modules.pop("my_peers", None)


def test_names_are_unique_and_unknown_names_get_the_nearest():
    registry = PeerRegistry()
    peer("one", registry=registry)(fail(AssertionError))
    with pytest.raises(ValueError, match="name='one': a contender of that name is registered"):
        peer("one", registry=registry)(fail(AssertionError))
    assert [c.name for c in choose(registry.peers, None, "--peers")] == ["one"]
    assert choose(registry.peers, (), "--peers") == ()
    with pytest.raises(ValueError, match=r"--peers='oen': must be 'all', 'none' or .*; use one"):
        choose(registry.peers, ("oen",), "--peers")


def test_a_case_too_large_is_skipped_with_its_reason(monkeypatch):
    monkeypatch.setattr(pools, "available_bytes", lambda device: 1000)
    result = runner.run_case(CASE, [contender(oracle_work)], CPU, SETTINGS, CURVE)
    assert result.rows == () and "free on cpu" in result.skipped
