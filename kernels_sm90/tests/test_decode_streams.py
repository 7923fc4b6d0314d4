"""sm90_decode beside other work: streams, aborted launches, producers just before, consumers after.

Every expected result is that of a launch with the device to itself. A launch that never ends would
hang the process that waits for it, so waiting has a limit, after which the whole run is given up.
"""

import itertools
import math

import pytest
import torch

from stream_attention.core.testing.checks import capture, launch, wait_for_device
from stream_attention.core.testing.golden import golden
from stream_attention.core.testing.native_library import require
from stream_attention.core.testing.problems import Case, build
from stream_attention.kernels_sm90 import decode
from stream_attention.kernels_sm90.library import LIBRARY

DEVICE = "cuda"
RECORD = decode.RECORD
NUM_STATES = 6
INVARIANT = pytest.mark.parametrize("invariant", [False, True])
LARGE_DIM = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim_qk": decode.HEAD_DIMS[-1]}
MANY_ROWS = {"num_qo_heads": 24, "num_kv_heads": 2, "head_dim_qk": 128}

# Pairs that run at the same time. Grids that fill the device each compete for its SMs.
PAIRS = {
    "two_large": (
        Case(qo_lens=(1,) * 16, kv_lens=(2048,) * 16, spare=0, call="batch", **LARGE_DIM),
        Case(qo_lens=(2,) * 8, kv_lens=(4000,) * 8, spare=0, call="block", **LARGE_DIM),
    ),
    "two_long": (
        Case(qo_lens=(1,), kv_lens=(24_000,), spare=0, call="batch", **LARGE_DIM),
        Case(qo_lens=(1,), kv_lens=(32_768,), spare=0, call="batch", num_qo_heads=16),
    ),
    "large_and_small": (
        Case(qo_lens=(1,) * 40, kv_lens=(1024,) * 40, spare=0, call="batch", **LARGE_DIM),
        Case(qo_lens=(4,) * 3, kv_lens=(512,) * 3, spare=0, call="block", num_qo_heads=32),
    ),
    "many_rows": (
        Case(qo_lens=(1,) * 9, kv_lens=(4096,) * 9, spare=0, call="batch", **MANY_ROWS),
        Case(qo_lens=(5,) * 3, kv_lens=(3000,) * 3, spare=0, call="block", **MANY_ROWS),
    ),
    "two_small": (
        Case(qo_lens=(1,) * 8, kv_lens=(800,) * 8, spare=0, call="batch", **LARGE_DIM),
        Case(qo_lens=(5,) * 2, kv_lens=(4000,) * 2, spare=0, call="block"),
    ),
}


@pytest.fixture(autouse=True)
def library():
    require(LIBRARY)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def wait(what):
    wait_for_device(what, STREAMS)


STREAMS = []


@pytest.fixture(name="streams")
def streams_fixture():
    STREAMS[:] = [torch.cuda.Stream(), torch.cuda.Stream()]
    yield STREAMS
    STREAMS.clear()


class Plan:
    """A launch over memory whose contents go through `NUM_STATES` states, with known results.

    A state is q and kv_lens. `differing` counts, on the device, bytes that are not as expected.
    """

    def __init__(self, case, seed, **options):
        self.built = build(case, seed, DEVICE)
        self.step, self.described = launch(RECORD, self.built, **options)
        bound = self.described.bound
        self.outputs = (bound.out, bound.lse)
        self.memory = (self.built.q, self.built.cache.sequence_lengths)
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        options = {"generator": generator, "device": DEVICE}
        most = case.max_kv_len
        self.states, self.expected = [], []
        for state in range(NUM_STATES):
            q = torch.empty_like(self.built.q).normal_(generator=generator)
            lens = torch.randint(0, most + 1, self.memory[1].shape, **options)
            if state < 2:
                lens[:] = (most, 5)[state]
            self.states.append((q, lens.to(torch.int32)))
        self.differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for state in range(NUM_STATES):
            self.enter(state)
            wait("writing inputs")
            self.step.run()
            wait("a launch with the device to itself")
            self.expected.append([output.view(torch.uint8).clone() for output in self.outputs])
        want = golden(self.built.q, self.built.cache, **self.built.options)
        want.check(self.described.result(), self.described.result_lse())

    def enter(self, state):
        """Poison the outputs, then write the state's inputs, all on the current stream."""
        for output in self.outputs:
            output.fill_(math.nan)
        for memory, content in zip(self.memory, self.states[state], strict=True):
            memory.copy_(content)

    def compare(self, state):
        """Add to `differing`, on the current stream."""
        for output, expected in zip(self.outputs, self.expected[state], strict=True):
            self.differing += (output.view(torch.uint8) != expected).sum()

    def check(self):
        assert int(self.differing) == 0


def runner(plan, how):
    return capture(plan.step.run).replay if how == "graph" else plan.step.run


@INVARIANT
@pytest.mark.parametrize("hows", [("eager", "eager"), ("graph", "graph"), ("graph", "eager")])
@pytest.mark.parametrize("name", sorted(PAIRS))
def test_two_plans_on_two_streams(name, hows, invariant, streams):
    """600 launches each, with contents changing, neither differ nor block each other for ever."""
    pair = enumerate(PAIRS[name])
    plans = [Plan(case, seed, batch_invariant=invariant) for seed, case in pair]
    runs = [runner(plan, how) for plan, how in zip(plans, hows, strict=True)]
    for turn in range(600):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                state = (turn + which) % NUM_STATES
                plans[which].enter(state)
                runs[which]()
                plans[which].compare(state)
        if turn % 20 == 19:
            wait(f"{name}, {hows}, turn {turn}")
    for plan in plans:
        plan.check()


@pytest.mark.parametrize("hows", [("eager", "eager"), ("graph", "graph")])
def test_bursts_on_two_streams(hows, streams):
    """Ten launches in a row on each stream, with nothing between them."""
    plans = [Plan(case, seed) for seed, case in enumerate(PAIRS["two_large"])]
    runs = [runner(plan, how) for plan, how in zip(plans, hows, strict=True)]
    for turn in range(60):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                plans[which].enter(turn % NUM_STATES)
                for _ in range(10):
                    runs[which]()
                plans[which].compare(turn % NUM_STATES)
        wait(f"bursts, turn {turn}")
    for plan in plans:
        plan.check()


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("name", ["two_large", "two_small"])
def test_beside_a_long_product_of_another_stream(name, how, streams):
    """Blocks that find few free SMs, or none for a while."""
    plan = Plan(PAIRS[name][0], 0)
    run = runner(plan, how)
    factor = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    product = torch.empty_like(factor)
    for turn in range(20):
        with torch.cuda.stream(streams[0]):
            for _ in range(4):
                torch.mm(factor, factor, out=product)
        with torch.cuda.stream(streams[1]):
            for state in range(NUM_STATES):
                plan.enter(state)
                run()
                plan.compare(state)
        wait(f"beside a product, turn {turn}")
    plan.check()


def workspace(step, described):
    """The tensors that a launch owns on the device, found in its attributes."""
    bound = described.bound
    lent = [bound.q, bound.out, bound.lse, bound.attn_sink, bound.qo_indptr, bound.kv.key]
    lent += [bound.kv.value, bound.kv.page_table, bound.kv.kv_lens]
    lent += [bound.kv.key_scale, bound.kv.value_scale]
    storages = {t.untyped_storage().data_ptr() for t in lent if t is not None}
    names = [*getattr(step, "__dict__", ()), *getattr(type(step), "__slots__", ())]
    found, todo = [], [getattr(step, name) for name in names]
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            own = value.untyped_storage().data_ptr() not in storages
            if own and value.numel() and value.device.type == DEVICE:
                found.append(value)
        elif isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, (tuple, list)):
            todo.extend(value)
    return found


def corrupt(step, described, pattern):
    """Leave the launch's workspace as no finished launch would: one byte all over, or noise."""
    owned = workspace(step, described)
    held = sum(tensor.numel() * tensor.element_size() for tensor in owned)
    assert held >= step.backend_plan.workspace_bytes, "some of the workspace was not found"
    for tensor in owned:
        raw = tensor.flatten().view(torch.uint8)
        assert raw.data_ptr() == tensor.data_ptr(), "a copy would be filled"
        if pattern == "noise":
            raw.random_(0, 256)
        else:
            raw.fill_(pattern)


@INVARIANT
@pytest.mark.parametrize("pattern", [1, 0x7F, 0x80, 0xFF, "noise"])
@pytest.mark.parametrize("name", ["two_large", "two_long", "two_small", "many_rows"])
def test_reset_after_an_aborted_launch(name, pattern, invariant):
    """Whatever is left in the workspace: after `reset()` eager runs and old graphs are right."""
    plan = Plan(PAIRS[name][1], 0, batch_invariant=invariant)
    replay = capture(plan.step.run).replay
    for state in range(NUM_STATES):
        corrupt(plan.step, plan.described, pattern)
        plan.step.reset()
        for run in (plan.step.run, plan.step.run, replay)[:: (1, -1)[state % 2]]:
            plan.enter(state)
            run()
            plan.compare(state)
        wait("after a reset")
    plan.check()


@pytest.mark.parametrize("bits", [-1, 0x7FFF, 0x7F80])  # NaN, all of them set; NaN; bf16's Inf
@pytest.mark.parametrize("where", ["q", "key", "value"])
@pytest.mark.parametrize("shape", [LARGE_DIM, MANY_ROWS], ids=["large_dim", "many_rows"])
@INVARIANT
def test_nan_of_one_request_neither_spreads_nor_stays(invariant, shape, where, bits):
    """Whatever partial states of NaN look like, no block waits for ever, the next run is right."""
    case = Case(qo_lens=(1,) * 6, kv_lens=(3000,) * 6, spare=0, call="batch", **shape)
    built = build(case, 0, DEVICE)
    step, described = launch(RECORD, built, batch_invariant=invariant)
    step.run()
    wait("a clean run")
    want = [t.clone() for t in (described.result(), described.result_lse())]
    assert all(t.isfinite().all() for t in want)
    page = int(built.cache.page_table[2, 70])
    memory = {"q": built.q[2], "key": built.cache.key[page], "value": built.cache.value[page]}
    kept = memory[where].clone()
    memory[where].view(torch.int16).fill_(bits)
    for _ in range(3):
        step.run()
        wait(f"a run with {bits} in {where}")
    got = described.result(), described.result_lse()
    assert bits == 0x7F80 or got[0][2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert all(torch.equal(a[others], b[others]) for a, b in zip(got, want, strict=True))
    memory[where].copy_(kept)
    step.run()
    wait("a clean run again")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Produced:
    """A plan whose q, K and lengths are written from `NUM_STATES` sources just before each run."""

    def __init__(self, case, seed=0):
        self.built = build(case, seed, DEVICE)
        self.step, self.described = launch(RECORD, self.built)
        self.outputs = (self.described.bound.out, self.described.bound.lse)
        cache = self.built.cache
        self.differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
        self.writers, self.expected = [], []
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        for state in range(NUM_STATES):
            memory = (self.built.q, cache.key)
            q, key = (torch.empty_like(t).normal_(generator=generator) for t in memory)
            lens = torch.full_like(cache.sequence_lengths, case.max_kv_len - 13 * state)
            self.writers.append((q, key, lens))
            self._write(self.writers[-1], range(3))
            wait("writing inputs")
            self.step.run()
            wait("a launch with the device to itself")
            want = golden(self.built.q, cache, **self.built.options)
            assert want.out.isfinite().all()
            want.check(self.described.result(), self.described.result_lse(), f"state {state}: ")
            self.expected.append([output.view(torch.uint8).clone() for output in self.outputs])
            # Equal results could hide that old values were read.
            assert not state or not torch.equal(self.expected[state][0], self.expected[0][0])

    def _write(self, content, order):
        cache = self.built.cache
        memory = (self.built.q, cache.key, cache.sequence_lengths)
        for index in order:
            memory[index].copy_(content[index])

    def turn(self, state, order):
        """Poison, write in the order given, run, compare; nothing between the last two writes."""
        for output in self.outputs:
            output.fill_(math.nan)
        self._write(self.writers[state], order)
        self.step.run()
        for output, expected in zip(self.outputs, self.expected[state], strict=True):
            self.differing += (output.view(torch.uint8) != expected).sum()


PRODUCED = {
    "small": Case(qo_lens=(1,) * 2, kv_lens=(2048,) * 2, spare=0, call="batch", num_qo_heads=16),
    "large": Case(qo_lens=(1,) * 4, kv_lens=(8192,) * 4, spare=0, call="batch", **LARGE_DIM),
    "many_rows": Case(qo_lens=(1,) * 5, kv_lens=(3000,) * 5, spare=0, call="batch", **MANY_ROWS),
    "verify": Case(qo_lens=(5,) * 3, kv_lens=(1024,) * 3, spare=0, call="block"),
}
ORDERS = list(itertools.permutations(range(3)))


@pytest.mark.parametrize("name", sorted(PRODUCED))
def test_values_written_just_before_are_seen(name):
    """500 times: whichever of q, K and lengths comes last, the launch waits for it."""
    produced = Produced(PRODUCED[name])
    for turn in range(500):
        produced.turn(turn % NUM_STATES, ORDERS[turn // NUM_STATES % len(ORDERS)])
    wait("producers and launches")
    assert int(produced.differing) == 0


@pytest.mark.parametrize("name", sorted(PRODUCED))
def test_values_written_just_before_are_seen_in_a_graph(name):
    produced = Produced(PRODUCED[name])
    turns = [(n * 5 % NUM_STATES, ORDERS[n % len(ORDERS)]) for n in range(25)]
    replay = capture(lambda: [produced.turn(*each) for each in turns]).replay
    for _ in range(20):
        replay()
    wait("producers and launches in a graph")
    assert int(produced.differing) == 0


class Chained:
    """Launches in a row: x = attention(q), y = attention(x), with x written again at once.

    The second launch reads what the first one wrote, and the third overwrites what the second may
    still read: both are our own kernels, which may start before their predecessor has ended.
    """

    def __init__(self, case, num_queries=3):
        self.x = None
        self.links = []
        for seed in range(num_queries):
            first, second = build(case, seed, DEVICE), build(case, 50 + seed, DEVICE)
            if self.x is None:
                self.x = torch.empty_like(first.q)
            into, _ = launch(RECORD, first, out=self.x)
            second = type(second)(second.case, self.x, second.cache, None, second.options)
            out_of, described = launch(RECORD, second)
            self.links.append((into, out_of, described))
        self.expected = []
        for into, out_of, described in self.links:
            into.run()
            wait("a link")
            out_of.run()
            wait("a link")
            self.expected.append(described.bound.out.view(torch.uint8).clone())
        self.differing = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def run(self):
        for _, _, described in self.links:
            described.bound.out.fill_(math.nan)
        for into, out_of, _ in self.links:
            into.run()
            out_of.run()
        for (_, _, described), expected in zip(self.links, self.expected, strict=True):
            self.differing += (described.bound.out.view(torch.uint8) != expected).sum()


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("name", sorted(PRODUCED))
def test_a_launch_reads_what_the_launch_before_wrote(name, how):
    chained = Chained(PRODUCED[name])
    run = capture(chained.run).replay if how == "graph" else chained.run
    for turn in range(200):
        run()
        if turn % 50 == 49:
            wait(f"chain, turn {turn}")
    assert int(chained.differing) == 0
