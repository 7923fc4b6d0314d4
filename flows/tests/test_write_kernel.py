"""The write launch, through Triton's CPU interpreter, against `interpret_cache`."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import math

import pytest
import torch

from stream_attention.flows import (
    Add,
    CMean,
    Field,
    Flow,
    GeMV,
    Load,
    Mean,
    Save,
    load_flow,
    registered_flows,
    topK,
)
from stream_attention.flows.interpreter import interpret_cache
from stream_attention.flows.op_table import OPS
from stream_attention.flows.pool import FlowPool
from stream_attention.flows.testing.every_op import EveryOp
from stream_attention.flows.write_kernel import write_source
from stream_attention.flows.write_ops import EMIT

FP8 = torch.float8_e4m3fn
EPSILONS = {torch.float32: 2**-21, torch.float16: 2**-10, torch.bfloat16: 2**-7, FP8: 2**-3}
"""Two roundings of a field's dtype: sums in another order may round to the neighbour."""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("STREAM_ATTENTION_CACHE", str(tmp_path_factory.getbasetemp()))


def raw(tensor):
    """The bits, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


def hostile(pool, seed=0):
    """NaN in every slot and summary, 7 in every state, as earlier requests may leave them."""
    for tensor in (pool.key, pool.value):
        tensor.view(torch.uint8).fill_(0x7F) if pool.dtype == FP8 else tensor.fill_(math.nan)
    for field in pool.graph.declared:
        pool.fields[field.name].copy_(torch.tensor(7.0 if field.kind == "state" else math.nan))


def stored(new, pool, scale):
    """Tokens as the pool has them: rounded once."""
    if pool.dtype != FP8:
        return new.to(pool.dtype)
    return (new.float() / scale[:, None]).clamp(-448, 448).to(FP8)


def meant(tensor, scale):
    """[num_pages, page_size, num_kv_heads, D] float32."""
    return tensor.float() if scale is None else tensor.float() * scale[:, None]


def expected(pool, appends, page_table):
    """What the pool is to hold: (key, value, fields), NHD. appends: (request, first, k, v)."""
    nhd = [pool.fields[name].transpose(1, 2).clone() for name in ("k", "v")]
    written: dict[int, list[int]] = {}
    for request, first, *news in appends:
        for token in range(len(news[0])):
            place, slot = divmod(first + token, pool.page_size)
            page = int(page_table[request, place])
            for tensor, new, scale in zip(
                nhd, news, (pool.key_scale, pool.value_scale), strict=True
            ):
                row = stored(new[token], pool, scale)
                tensor.view(torch.uint8)[page, slot] = row.view(torch.uint8)
            written.setdefault(page, [slot, 0])[1] = slot + 1
    fields = {f.name: pool.fields[f.name].clone() for f in pool.graph.declared}
    scales = pool.key_scale, pool.value_scale
    k, v = (meant(tensor, scale) for tensor, scale in zip(nhd, scales, strict=True))
    slots = torch.tensor(list(written.values())).reshape(-1, 2)
    pages = torch.tensor(list(written), dtype=torch.int64)
    interpret_cache(pool.graph, fields, k, v, pages, slots[:, 1], slots[:, 0])
    return (*nhd, fields)


def check(pool, want, what=""):
    key, value, fields = want
    for name, tensor in (("k", key), ("v", value)):
        assert torch.equal(raw(pool.fields[name].transpose(1, 2)), raw(tensor)), (what, name)
    for name, tensor in fields.items():
        got, wanted = pool.fields[name].double(), tensor.double()
        assert torch.equal(got.isnan(), wanted.isnan()), (what, name)
        largest = float(wanted[wanted.isfinite()].abs().max()) if wanted.isfinite().any() else 0.0
        bound = EPSILONS[tensor.dtype] * wanted.abs() + 2**-20 * max(1.0, largest)
        close = (got - wanted).abs() <= bound
        assert (close | wanted.isnan() | (got == wanted)).all(), (what, name)


def table_of(pool, counts, max_pages, seed=0):
    """Shuffled pages for requests; −1 and ids that are nowhere past them."""
    order = torch.randperm(pool.num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(counts), max_pages), 2**30, dtype=torch.int32)
    table[::2] = -1
    for request, count in enumerate(counts):
        table[request, :count] = torch.tensor([order.pop() for _ in range(count)])
    return table


def random_tokens(batch, n, pool, dtype=torch.bfloat16, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shape = (batch, n, pool.num_kv_heads, pool.head_dim)
    return [torch.randn(shape, generator=rng).to(dtype) for _ in range(2)]


def run_steps(pool, lengths, steps, dtype=torch.bfloat16):
    """Append `steps` tokens at a time to requests of these lengths, checked after each.

    Lengths: −1 is a padded row. What requests hold before is written in the same way.
    """
    size, most = pool.page_size, sum(steps)
    counts = [0 if n < 0 else -(-(n + most) // size) for n in lengths]
    table = table_of(pool, counts, max(counts) + 1)
    hostile(pool)
    held = torch.tensor([min(n, 0) for n in lengths], dtype=torch.int32)
    prompt = [max(n, 0) for n in lengths]
    indptr = torch.tensor([0, *torch.tensor(prompt).cumsum(0)], dtype=torch.int32)
    k, v = (each[0] for each in random_tokens(1, int(indptr[-1]), pool, dtype, seed=9))
    appends = [
        (r, 0, k[indptr[r] : indptr[r + 1]], v[indptr[r] : indptr[r + 1]])
        for r in range(len(lengths))
    ]
    want, after = expected(pool, appends, table), torch.empty_like(held)
    pool.write(k, v, table, held, indptr=indptr, max_new=max(1, *prompt), lengths_after=after)
    check(pool, want, "prompt")
    assert after.tolist() == list(lengths)
    for step, n in enumerate(steps):
        k, v = random_tokens(len(lengths), n, pool, dtype, seed=step)
        before = after.clone()
        live = [r for r in range(len(lengths)) if lengths[r] >= 0]
        want = expected(pool, [(r, int(before[r]), k[r], v[r]) for r in live], table)
        pool.write(k, v, table, before, lengths_after=after)
        check(pool, want, f"step {step}")
        assert after.tolist() == [m if m < 0 else m + n for m in before.tolist()]


def _library_cases():
    dims, heads = (64, 80, 128), (1, 3)
    at = 0
    for name, flow in sorted(registered_flows().items()):
        if not flow.__module__.startswith("stream_attention.flows.library") or "template" in name:
            continue
        for page_size in flow.page_sizes or (1, 16, 32):
            yield name, page_size, dims[at % 3], heads[at % 2]
            at += 1


CASES = list(_library_cases())


def test_the_cases_are_the_eleven_flows():
    assert len({name for name, *_ in CASES}) == 11


@pytest.mark.parametrize(("name", "page_size", "head_dim", "num_kv_heads"), CASES)
def test_library_flows_equal_the_interpreter(name, page_size, head_dim, num_kv_heads):
    pool = FlowPool(load_flow(name), 20, page_size, num_kv_heads, head_dim)
    lengths = (0, page_size - 1, -1, page_size, 2 * page_size + 1)
    run_steps(pool, lengths, steps=(1, 3) if page_size > 1 else (2,))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FP8])
def test_every_storage_dtype_and_layout(dtype, layout):
    scales = {"k_scale": torch.tensor([0.01, 0.3]), "v_scale": 0.5} if dtype == FP8 else {}
    flow = load_flow("value_energy_centroid")
    for fields_dtype, new in ((None, torch.float32), (torch.float32, torch.bfloat16)):
        pool = FlowPool(
            flow, 9, 5, 2, 48, dtype, layout=layout, fields_dtype=fields_dtype, **scales
        )
        run_steps(pool, (0, 4, 11), steps=(2,), dtype=new)


@pytest.mark.parametrize("fields_dtype", [torch.float16, FP8])
def test_summaries_in_narrow_dtypes(fields_dtype):
    flow = load_flow("hybrid_quest_centroid")
    run_steps(FlowPool(flow, 8, 16, 1, 64, fields_dtype=fields_dtype), (15, 17), steps=(1,))


def test_fp8_saturates_and_keeps_nan():
    pool = FlowPool(load_flow("gqa_quest_sparse_attention"), 1, 1, 1, 4, FP8, k_scale=0.5)
    k = torch.tensor([1e9, -300.0, math.inf, math.nan]).reshape(1, 1, 1, 4)
    pool.write(k, k, torch.zeros((1, 1), dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert pool.key.float().flatten().tolist()[:3] == [448, -448, 448]
    assert pool.fields["M"].flatten().tolist()[:3] == [224, -224, 224]
    assert pool.key.float()[..., 3].isnan().all() and pool.fields["M"][..., 3].isnan().all()


def test_every_op_of_the_cache_side_is_written():
    memory = {"load", "fill", "store"}
    assert set(EMIT) == {n for n, rule in OPS.items() if "cache" in rule.sides} - memory


@pytest.mark.parametrize(("page_size", "head_dim"), [(1, 48), (7, 48), (16, 64)])
def test_every_op_equals_the_interpreter(page_size, head_dim):
    for fields_dtype in (torch.float32, torch.bfloat16):
        pool = FlowPool(EveryOp(), 6, page_size, 2, head_dim, fields_dtype=fields_dtype)
        lengths = (0, page_size - 1, page_size + page_size // 2)
        run_steps(pool, lengths, steps=(1,))


def pool_of_states(num_kv_heads, page_size, num_pages=64):
    class States(Flow):
        """Two states, one with a shape and an init of its own, and a summary."""

        def create_cache(self, page_size, head_dim):
            wide = Field((2, 3), torch.bfloat16, "state", init=-1.5)
            return {"r": Field((1, 1), init=0.25), "wide": wide, "c": (1, head_dim)}

        def forward_cache(self, cache, loc, ctx):
            CMean(dim=1)(cache["k"], cache["c"], loc=loc, ctx=ctx)

        def forward_indexer(self, q, o, cache, ctx):
            at = {"ctx": ctx}
            score = GeMV()(Mean(dim=1)(q, **at), cache["c"], **at)
            score = Add()(score, Load()(cache["r"], **at), **at)
            Save()(score, cache["r"], **at)
            Save()(Add()(Load()(cache["wide"], **at), score, **at), cache["wide"], **at)
            topK()(score, o, **at)

    return FlowPool(States(), num_pages, page_size, num_kv_heads, 16)


@pytest.mark.parametrize("num_kv_heads", [1, 8])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_write_touches_exactly_the_pages_written(page_size, num_kv_heads):
    """Pages 3, 5, 11 and 40 of a pool full of 7.5; whatever else there is stays, bit for bit."""
    pool = pool_of_states(num_kv_heads, page_size)
    names = ("k", "v", "r", "wide", "c")
    for name in names:
        pool.fields[name].fill_(7.5)
    before = {name: pool.fields[name].clone() for name in names}
    pages = [3, 5, 11, 40]
    table = torch.tensor([[page, 50] for page in pages], dtype=torch.int32)
    k, v = random_tokens(4, page_size, pool)
    pool.write(k, v, table, torch.zeros(4, dtype=torch.int32))
    others = [page for page in range(64) if page not in pages]
    for name in names:
        assert torch.equal(pool.fields[name][others], before[name][others]), name
        assert not (pool.fields[name][pages] == 7.5).any(), name
    assert (pool.fields["r"][pages] == 0.25).all()
    assert (pool.fields["wide"][pages] == -1.5).all()


def test_states_start_with_slot_0_and_stay_with_the_others():
    pool = pool_of_states(2, 4, num_pages=8)
    table = torch.tensor([[3, 1], [6, 2], [0, 7]], dtype=torch.int32)
    for name in ("r", "wide"):
        pool.fields[name].fill_(7.5)
    k, v = random_tokens(3, 3, pool)
    pool.write(k, v, table, torch.tensor([0, 2, 4], dtype=torch.int32))
    started = [page for page in range(8) if (pool.fields["r"][page] == 0.25).all()]
    assert started == [2, 3, 7]
    assert (pool.fields["r"][[0, 1, 4, 5, 6]] == 7.5).all()


def test_pages_are_recycled_among_live_requests():
    """A runs and is freed; B takes its pages between a live C's: B starts at init, C stays."""
    pool = FlowPool(load_flow("running_average_block"), 6, 4, 2, 16)
    hostile(pool)
    a, c = pool.allocate(2), pool.allocate(2)
    tables = {"a": [a], "c": [c]}
    zero = torch.zeros(1, dtype=torch.int32)
    for pages in tables.values():
        pool.write(*random_tokens(1, 7, pool), torch.tensor(pages, dtype=torch.int32), zero)
    for page in (*a, *c):
        pool.fields["r"][page] = 3.0 + page  # what decode steps gathered
    pool.release(a)
    c += pool.allocate(1)
    b = pool.allocate(2)
    assert set(b) & set(a), "B has a page of A's"
    before = {name: pool.fields[name][c[:2]].clone() for name in pool.fields}
    table = torch.tensor([b], dtype=torch.int32)
    pool.write(*random_tokens(1, 6, pool, seed=3), table, zero)
    assert (pool.fields["r"][b] == 0).all()
    for name, tensor in before.items():
        assert torch.equal(raw(pool.fields[name][c[:2]]), raw(tensor)), name


def test_padded_requests_and_masked_ones_write_nothing():
    pool = FlowPool(load_flow("gqa_quest_sparse_attention"), 4, 4, 1, 16)
    hostile(pool)
    before = {name: pool.fields[name].clone() for name in pool.fields}
    table = torch.tensor([[0], [1], [2]], dtype=torch.int32)
    lengths, after = (torch.tensor(n, dtype=torch.int32) for n in ([1, -1, -1], [9, 9, 9]))
    active = torch.tensor([0, 1, 1], dtype=torch.int32)
    k, v = random_tokens(3, 2, pool)
    launch = pool.write_launch(k, v, table, lengths, active=active, lengths_after=after)
    launch.run()
    assert after.tolist() == [1, -1, -1]
    for name, tensor in before.items():
        assert torch.equal(raw(pool.fields[name]), raw(tensor))
    lengths[2], active[0] = 0, 5  # in place, with no new launch
    launch.run()
    assert after.tolist() == [3, -1, 2]
    held = pool.fields["M"].isfinite().all(-1).flatten().tolist()
    assert held == [False, False, True, False]  # page 0 has a NaN of slot 0 in its envelope
    assert pool.key[0, 1:3].isfinite().all() and pool.key[1].isnan().all()


def test_what_is_beyond_the_table_or_the_pool_is_not_written():
    pool = FlowPool(load_flow("gqa_quest_sparse_attention"), 5, 4, 1, 16)
    pool.num_pages = 4  # page 4 is the guard
    hostile(pool)
    table = torch.tensor([[0, 4], [2, -5], [3, 1]], dtype=torch.int32)[:2]
    lengths, after = torch.tensor([2, 6], dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    # Of request 0, tokens of positions 4 to 7 are in the guard page, those from 8 on are past the
    # table's row, where the first page of request 1 comes next; of request 1, none has a place.
    pool.write(*random_tokens(2, 9, pool), table, lengths, lengths_after=after)
    assert after.tolist() == [8, 8]
    assert pool.key[0, 2:].isfinite().all() and pool.key[0, :2].isnan().all()
    for name in ("k", "v", "M", "m"):
        assert pool.fields[name][1:].isnan().all(), name


def test_lengths_that_include_the_new_tokens():
    flow = load_flow("value_energy_centroid")
    pools = [FlowPool(flow, 6, 4, 2, 16) for _ in range(2)]
    table = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
    before = torch.tensor([0, 3, -1], dtype=torch.int32)  # at last 1, of 2: it cannot be
    for pool, lengths in zip(pools, (before, before + 2), strict=True):
        k, v = random_tokens(3, 2, pool)
        pool.write(k, v, table, lengths, lengths_include_new=lengths is not before)
    for name in pools[0].fields:
        assert torch.equal(raw(pools[0].fields[name]), raw(pools[1].fields[name]))


def test_of_more_packed_tokens_than_max_new_the_first_are_written():
    flow = load_flow("value_energy_centroid")
    pools = [FlowPool(flow, 6, 4, 2, 16) for _ in range(2)]
    table, zero = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32), torch.zeros(2).int()
    k, v = random_tokens(2, 7, pools[0])
    pools[0].write(k[:, :5], v[:, :5], table, zero)
    indptr, after = torch.tensor([0, 7, 14], dtype=torch.int32), zero.clone()
    packed = (k.flatten(0, 1), v.flatten(0, 1))
    pools[1].write(*packed, table, zero, indptr=indptr, max_new=5, lengths_after=after)
    assert after.tolist() == [5, 5]
    for name in pools[0].fields:
        assert torch.equal(raw(pools[0].fields[name]), raw(pools[1].fields[name]))


def test_tokens_may_have_any_strides_but_the_last():
    flow = load_flow("value_energy_centroid")
    pools = [FlowPool(flow, 6, 4, 2, 16) for _ in range(2)]
    table, zero = torch.tensor([[0], [1]], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    k, v = random_tokens(2, 3, pools[0])
    pools[0].write(k, v, table, zero)
    fused = torch.cat([k, v, k], dim=2)  # of one projection
    apart = v.transpose(1, 2).contiguous().transpose(1, 2)
    assert apart.stride() != v.stride()
    pools[1].write(fused[:, :, :2], apart, table, zero)
    for name in pools[0].fields:
        assert torch.equal(raw(pools[0].fields[name]), raw(pools[1].fields[name]))


def refused(change, match):
    pool = FlowPool(load_flow("gqa_quest_sparse_attention"), 3, 4, 2, 16)
    k, v = random_tokens(2, 2, pool)
    given = {"k_new": k, "v_new": v, "page_table": torch.zeros((2, 3), dtype=torch.int32)}
    given["sequence_lengths"] = torch.zeros(2, dtype=torch.int32)
    given |= change(given) if callable(change) else change
    with pytest.raises(ValueError, match=match):
        pool.write_launch(**given)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"k_new": None}, r"k_new=<class 'NoneType'>: must be a dense tensor"),
        (
            lambda g: {"k_new": g["k_new"][:1]},
            r"k_new.shape=\(1, 2, 2, 16\): must be \[2, n_new >= 1, 2, 16\]",
        ),
        (
            lambda g: {"v_new": g["v_new"][:, :1]},
            r"v_new.shape=\(2, 1, 2, 16\): must be k_new.shape \(2, 2, 2, 16\)",
        ),
        (
            lambda g: {"k_new": g["k_new"].double()},
            r"k_new.dtype=torch.float64: must be one of bfloat16, float16, float32; use",
        ),
        (
            lambda g: {"k_new": g["k_new"].transpose(2, 3).contiguous().transpose(2, 3)},
            r"k_new.stride=.*: the last axis must be contiguous; use k_new.contiguous\(\)",
        ),
        (
            lambda g: {"page_table": g["page_table"][:, None]},
            r"page_table.shape=\(2, 1, 3\): must be \[batch, max_pages\]",
        ),
        (
            lambda g: {"sequence_lengths": g["sequence_lengths"].long()},
            r"sequence_lengths.dtype=torch.int64: must be torch.int32",
        ),
        (
            {"active": torch.ones(3, dtype=torch.int32)},
            r"active.shape=\(3,\): must be \[2\]; use \(2,\)",
        ),
        (
            lambda g: {"lengths_after": g["sequence_lengths"]},
            r"lengths_after='sequence_lengths': must be other memory, .*; use torch.empty_like",
        ),
        ({"max_new": 3}, r"max_new=3: belongs to packed tokens, with indptr"),
        (
            lambda g: {
                "indptr": torch.tensor([0, 2, 4], dtype=torch.int32),
                "k_new": g["k_new"].flatten(0, 1),
                "v_new": g["v_new"].flatten(0, 1),
            },
            r"max_new=None: must be an int >= 1 beside indptr: .*; use 4",
        ),
        (
            {"page_table": torch.zeros((2, 3), dtype=torch.int32, device="meta")},
            r"page_table.device='meta': must be the pool's",
        ),
    ],
)
def test_launches_that_are_not_legal_are_refused(change, match):
    refused(change, match)


def test_a_page_that_no_tile_takes_is_refused():
    graph = load_flow("gqa_quest_sparse_attention").trace(1 << 14, 128)
    with pytest.raises(ValueError, match=r"page_size=16384: .* more than 1048576 .*; use 8192"):
        write_source(graph, {"M": "bfloat16", "m": "bfloat16"})


def test_the_source_names_the_lines_of_the_flow():
    graph = load_flow("value_energy_centroid").trace(16, 128)
    source = write_source(graph, {"c": "bfloat16", "e": "float32"})
    for _, node in graph.cache:
        assert os.path.basename(node.source) in source
    compile(source, "generated", "exec")
