"""Every pool's output is looked at, and no time is believed that reading the bytes cannot take."""

import dataclasses
import re

import pytest
import torch

from stream_attention.bench import check, pools, runner
from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Contender, Work
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.lengths import parse_lengths
from stream_attention.bench.pools import build_pool
from stream_attention.core import oracle

CPU = torch.device("cpu")
CURVE = ReadCurve((ReadPoint(1, 1e-3, "sum"),), "cpu_cold")
COLD = runner.Settings(replays=4, max_seconds=0.2)
NUM_POOLS = 4
CASE = AttentionCase(
    batch=3,
    lengths=parse_lengths("37,16,1"),
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=16,
    page_size=8,
    dtype="float32",
)


@pytest.fixture(autouse=True)
def _small_rotation(monkeypatch):
    """`NUM_POOLS` pools of `CASE` are a cold rotation."""
    for module in (pools, runner):
        monkeypatch.setattr(
            module, "cold_rotation_bytes", lambda device: (NUM_POOLS - 1) * CASE.kv_bytes + 1
        )


def rows_of(build, settings=COLD, curve=CURVE, kind="peer"):
    contender = Contender("mine", kind, build)
    return runner.run_case(CASE, [contender], CPU, settings, curve)


def row_of(build, **options):
    (row,) = rows_of(build, **options).rows
    return row


def compute(pool):
    return oracle.attention(pool.q, pool.cache).to(pool.q.dtype)


def into_own(pool):
    """A right work, into an output of its own."""
    out = torch.empty_like(pool.q)
    return Work(lambda: out.copy_(compute(pool)), out)


def fresh(pool):
    """A right work that returns a new tensor each time."""
    kept = []
    return Work(lambda: kept.append(compute(pool)), output=lambda: kept[-1])


def idle(work):
    """The same output, and a call that does nothing."""
    return Work(lambda: None, work.out, work.output)


def with_middle(make, spoil):
    """Right works for the first and the last pool, spoilt ones for those between."""

    def build(case, found, device):
        works = [make(pool) for pool in found]
        return [spoil(w) if 0 < i < len(works) - 1 else w for i, w in enumerate(works)]

    return build


@pytest.mark.parametrize("make", [into_own, fresh])
def test_right_works_on_every_pool_are_ok(make):
    found = rows_of(lambda case, every, device: [make(pool) for pool in every])
    (row,) = found.rows
    assert row.outcome == "ok", row.reasons
    assert found.cold and row.timing.num_pools == NUM_POOLS and not row.check.rerun


def test_a_middle_work_that_does_nothing_is_wrong():
    row = row_of(with_middle(into_own, idle))
    assert row.outcome == "wrong" and row.timing is None
    wanted = "after the timed runs: pool 2 of 4: 3 of 3 rows hold NaN, Inf or poison"
    assert row.reasons[0].startswith(wanted), row.reasons


def test_a_middle_work_that_returns_what_it_returned_before_is_wrong():
    def stale(work):
        work.run()
        return idle(work)

    row = row_of(with_middle(fresh, stale))
    assert row.outcome == "wrong"
    assert row.reasons[0].startswith("after the timed runs: pool 2 of 4: 3 of 3 rows"), row.reasons


def test_a_middle_output_with_one_row_left_out_is_wrong():
    def leave_out(work):
        def run():
            work.run()
            work.out[1, 2] = float("inf")

        return Work(run, work.out)

    row = row_of(with_middle(into_own, leave_out))
    assert "pool 2 of 4: 1 of 3 rows hold NaN" in row.reasons[0]
    assert row.reasons[0].endswith("first row 1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out[:2], r"output is \(2, 4, 16\) torch.float32, want \(3, 4, 16\)"),
        (lambda out: out.double(), r"output is \(3, 4, 16\) torch.float64, want .* torch.float32"),
    ],
)
def test_a_middle_output_of_a_wrong_form_is_wrong(change, message):
    def reshape(work):
        return Work(work.run, output=lambda: change(work.out))

    row = row_of(with_middle(into_own, reshape))
    assert row.outcome == "wrong" and re.search(f"pool 2 of 4: {message}", row.reasons[0])


def shared(spoil=lambda works: works):
    """Right works that all write into one output."""

    def build(case, found, device):
        out = torch.empty_like(found[0].q)
        works = [Work(lambda p=pool: out.copy_(compute(p)), out) for pool in found]
        return spoil(works)

    return build


def test_works_that_share_an_output_are_judged_one_by_one():
    row = row_of(shared())
    assert row.outcome == "ok" and row.check.rerun, row.reasons
    assert row.check.rows_checked == CASE.num_rows


@pytest.mark.parametrize(
    ("index", "message"),
    [(0, "3 of 3 rows hold NaN"), (2, "pool 3 of 4: 3 of 3 rows hold NaN"), (3, "3 of 3 rows")],
)
def test_a_work_that_does_nothing_shows_in_a_shared_output(index, message):
    def spoil(works):
        if len(works) == 1:
            return works  # the probe
        return [idle(work) if i == index else work for i, work in enumerate(works)]

    row = row_of(shared(spoil))
    assert row.outcome == "wrong" and message in row.reasons[0], row.reasons


def test_a_shared_output_bound_to_the_wrong_pool_is_wrong():
    row = row_of(shared(lambda works: [works[0]] * len(works)))
    assert row.outcome == "wrong" and "max error" in row.reasons[0], row.reasons


def test_one_verdict_syncs_once_for_all_whole_outputs(monkeypatch):
    looked = []
    monkeypatch.setattr(check, "unwritten", lambda out: looked.append(out) or "")
    found = [build_pool(CASE, CPU, seed) for seed in range(NUM_POOLS)]
    works = [Work(lambda: None, torch.zeros_like(pool.q)) for pool in found]
    assert check._fault_of_any([work.result() for work in works], found) is None
    assert looked == []


def test_poison_of_a_fresh_output_is_seen_and_one_that_is_not_there_is_no_error():
    kept = []
    work = Work(lambda: kept.append(torch.ones(2)), output=lambda: kept[-1])
    work.poison()
    work.run()
    work.poison()
    assert work.result().isnan().all()


def bound_to(order, make=into_own):
    """Works of which the i-th computes the answer of pool `order[i]`."""

    def build(case, found, device):
        if len(found) == 1:
            return [make(found[0])]  # the probe
        return [make(found[index]) for index in order]

    return build


def noisy(pool):
    """A right work, but for rounding that is never the same twice."""
    out = torch.empty_like(pool.q)
    return Work(lambda: out.copy_(compute(pool) * (1 + 1e-3 * torch.randn(out.shape))), out)


@pytest.mark.parametrize("make", [into_own, fresh])
@pytest.mark.parametrize(
    ("order", "fault"),
    [
        ([0, 0, 2, 3], "pool 2 of 4: gave pool 1's output"),
        ([0, 3, 2, 3], "pool 2 of 4: gave pool 4's output"),
        ([0, 1, 1, 3], "pool 3 of 4: gave pool 2's output"),
    ],
)
def test_a_middle_work_bound_to_another_pool_is_wrong(order, fault, make):
    row = row_of(bound_to(order, make))
    assert (row.outcome, row.reasons) == ("wrong", (f"after the timed runs: {fault}",))


def test_a_shared_output_bound_to_another_pool_in_the_middle_is_wrong():
    row = row_of(shared(lambda works: [works[i] for i in (0, 0, 2, 3)[: len(works)]]))
    assert row.outcome == "wrong" and "pool 2 of 4: gave pool 1's output" in row.reasons[0]


def test_two_outputs_of_one_pool_are_the_same_though_rounded_otherwise():
    found = [build_pool(CASE, CPU, seed) for seed in range(3)]
    works = [noisy(found[index]) for index in (0, 0, 2)]
    for work in works:
        work.run()
    samples = [check._sample(work.out, CASE) for work in works]
    assert "pool 2 of 3: gave pool 1's output" in check.mixed_up(samples, found).message


def test_a_middle_work_that_writes_zeros_is_wrong():
    row = row_of(with_middle(into_own, lambda work: Work(lambda: work.out.zero_(), work.out)))
    wanted = "after the timed runs: pool 2 of 4: a request with tokens has a row of zeros"
    assert (row.outcome, row.reasons) == ("wrong", (wanted,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("lengths", "heads", "dim", "q_len"),
    [("1,1,1", 1, 16, 1), ("0,0,0", 2, 16, 1), ("0,2,0", 1, 16, 4), ("1,1,1", 1, 1, 1)],
)
def test_right_outputs_of_many_pools_are_never_alike(lengths, heads, dim, q_len, dtype, kv_dtype):
    case = dataclasses.replace(
        CASE,
        lengths=parse_lengths(lengths),
        num_qo_heads=2,
        num_kv_heads=heads,
        head_dim=dim,
        q_len=q_len,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    found = [build_pool(case, CPU, seed) for seed in range(128)]
    samples = []
    for pool in found:
        q = pool.q.view(case.batch, q_len, *pool.q.shape[1:])
        out = oracle.attention(q, pool.cache, causal=q_len > 1).to(pool.q.dtype)
        samples.append(check._sample(out.view_as(pool.q), case))
    assert check.mixed_up(samples, found) is None


def copying(pool):
    """Runs once; what it gives is a copy, so that poison never reaches the output."""
    work, ran = into_own(pool), []
    return Work(lambda: ran or ran.append(work.run()), output=lambda: work.out.clone())


def test_an_output_that_takes_no_poison_is_said_to_take_none():
    row = row_of(lambda case, every, device: [copying(pool) for pool in every])
    assert row.outcome == "ok" and not row.check.poisoned
    row = row_of(lambda case, every, device: [fresh(pool) for pool in every])
    assert row.outcome == "ok" and row.check.poisoned


SLOW_READ = ReadCurve((ReadPoint(1, 1e9, "sum"),), "cpu_cold")


@pytest.mark.parametrize("kind", ["peer", "route"])
def test_a_cold_time_far_below_the_floor_is_wrong(kind):
    build = with_middle(into_own, lambda work: work)
    row = row_of(build, curve=SLOW_READ, kind=kind)
    assert row.outcome == "wrong" and row.timing.n >= 4 and row.check.ok
    assert re.match(
        "implausible: a median of .* us, and reading the bytes of the case takes more than ",
        row.reasons[0],
    )


def test_a_warm_time_may_be_below_the_floor():
    warm = runner.Settings(replays=4, max_seconds=0.2, cold=False)
    build = with_middle(into_own, lambda work: work)
    assert row_of(build, settings=warm, curve=SLOW_READ).outcome == "ok"


def test_a_rotation_that_fits_the_cache_is_read_as_warm(monkeypatch):
    monkeypatch.setattr(runner, "cold_rotation_bytes", lambda device: 1 << 40)
    build = with_middle(into_own, lambda work: work)
    found = rows_of(build, curve=SLOW_READ)
    assert not found.cold and found.rows[0].outcome == "ok"


def test_the_least_plausible_time_is_a_share_of_the_floor_where_the_curve_reaches():
    moved = CASE.moved_bytes
    curve = ReadCurve((ReadPoint(moved, 8.0, "a"), ReadPoint(2 * moved, 9.0, "a")), "x")
    beyond = ReadCurve((ReadPoint(moved + 1, 8.0, "a"),), "x")
    assert runner.least_plausible_us(CASE, curve, torch.device("cuda")) == 4.0
    assert runner.least_plausible_us(CASE, curve, CPU) == pytest.approx(0.8)
    assert runner.least_plausible_us(CASE, beyond, torch.device("cuda")) == 0.0


@pytest.mark.parametrize(("kind", "outcome"), [("route", "failed"), ("peer", "unsupported")])
@pytest.mark.parametrize("when", ["build", "run"])
def test_a_route_that_refuses_what_its_rules_accept_has_failed(kind, outcome, when):
    def refuse(*args):
        raise NotImplementedError("not this one")

    def build(case, found, device):
        if when == "build":
            refuse()
        return [Work(refuse, torch.empty_like(pool.q)) for pool in found]

    row = row_of(build, kind=kind)
    assert (row.outcome, row.reasons) == (outcome, ("NotImplementedError: not this one",))
