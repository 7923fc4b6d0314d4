"""Peers without their packages: the reasons they give, and the calls that their adapters make."""

import dataclasses
import sys
import types
from typing import ClassVar

import pytest
import torch

from stream_attention.bench import contenders as contenders_lib
from stream_attention.bench.cases import FP8, AttentionCase
from stream_attention.bench.lengths import parse_lengths, uniform
from stream_attention.bench.peers import _flashinfer, _shared, flash_attn_4
from stream_attention.bench.pools import KEY_SCALE, VALUE_SCALE, build_pools
from stream_attention.core import oracle

CPU = torch.device("cpu")
PEERS = contenders_lib.load_peers().peers
FLASHINFER = ("fa2_cuda_core", "fa2_tensor_core", "fa3", "cudnn", "xqa", "holistic")
SDPA = ("gather", "gather_packed", "flash", "cudnn", "efficient", "math")
BASE = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}


def case_of(lengths="33,16", queries=None, **fields):
    drawn = None if queries is None else parse_lengths(queries)
    lengths = parse_lengths(lengths)
    batch = max(2, len(lengths.numbers))
    return AttentionCase(
        **{**BASE, "batch": batch, "lengths": lengths, "q_lengths": drawn, **fields}
    )


def saying(text, names, prefix, **fields):
    """Peers among `names` that give a reason with `text`."""
    case = case_of(**fields)
    return {n for n in names if any(text in r for r in PEERS[prefix + n].reasons(case, CPU))}


ALL = set(FLASHINFER)


@pytest.mark.parametrize(
    ("fields", "reason", "who"),
    [
        ({}, "device=cpu: FlashInfer needs CUDA; use cuda", ALL),
        ({"cache": "contiguous"}, "cache=contiguous: FlashInfer reads pages here; use paged", ALL),
        (
            {"cache": "contiguous", "lengths": "32", "q_len": 4},
            "cache=contiguous",
            {"fa2_cuda_core", "xqa", "holistic"},
        ),
        (
            {"cache": "contiguous", "lengths": "33,16", "q_len": 4, "capacity": 48},
            "without a gap; use lengths=48",
            {"fa2_tensor_core", "fa3", "cudnn"},
        ),
        (
            {"cache": "contiguous", "lengths": "32", "q_len": 4, "layout": "HND"},
            "layout=HND: ragged K and V are [tokens, heads, head_dim]; use NHD",
            {"fa2_tensor_core", "fa3", "cudnn"},
        ),
        (
            {"kv_dtype": FP8},
            "kv_dtype=float8_e4m3fn: K and V in q's dtype only; use bfloat16",
            {"fa3", "cudnn", "holistic"},
        ),
        ({"page_size": 1}, "page_size=1: one of (16, 32, 64, 128); use 16", {"xqa"}),
        ({"page_size": 256}, "page_size=256: one of (16, 32, 64, 128); use 128", {"xqa"}),
        ({"batch_invariant": True}, "the peer makes no such promise", ALL),
        ({"capacity": 4096}, "capacity", set()),
        ({"q_len": 3}, "q_len=3: one query a request; use 1", {"fa2_cuda_core", "xqa"}),
        ({"queries": "3,1"}, "q_lengths=3,1: one query a request", {"fa2_cuda_core", "xqa"}),
        ({"queries": "1"}, "one query a request", set()),
        ({"queries": "0,1"}, "q_lengths=0,1: FlashInfer needs a query a request", ALL),
        ({"queries": "3,17"}, "q_lengths=3,17: FlashInfer needs a token a row", ALL),
        ({"queries": "3,17", "causal": False}, "needs a token a row", set()),
        ({"lengths": "33,0"}, "lengths=33,0: FlashInfer needs a token a request", ALL),
        ({"dtype": "float32"}, "dtype=float32: FlashInfer takes bfloat16", ALL),
        ({"num_qo_heads": 14}, "num_qo_heads=14: a KV head serves one of", {"fa2_cuda_core"}),
        ({"head_dim": 96}, "head_dim=96: fa3 takes one of (64, 128, 256); use 64", {"fa3"}),
        ({"head_dim": 320}, "head_dim=320: at most 256; use 256", {"holistic"}),
    ],
)
def test_flashinfer_says_what_it_cannot_serve(fields, reason, who):
    assert saying(reason, FLASHINFER, "flashinfer_", **fields) == who


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "device=cpu: FlashAttention-4 needs CUDA; use cuda"),
        ({"kv_dtype": FP8}, "kv_dtype=float8_e4m3fn: K and V in q's dtype only"),
        ({"dtype": "float32"}, "dtype=float32: FlashAttention-4 takes bfloat16"),
        ({"head_dim": 72}, "head_dim=72: a multiple of 16, at most 256; use 80"),
        ({"head_dim": 320}, "head_dim=320: a multiple of 16, at most 256; use 256"),
        ({"queries": "3,17"}, "q_lengths=3,17: FlashAttention-4 needs a token a row"),
    ],
)
def test_flash_attention_4_says_what_it_cannot_serve(fields, reason):
    assert saying(reason, ("flash_attn_4",), "", **fields)
    assert not saying(
        reason, ("flash_attn_4",), "", **({"lengths": "64"} if fields else fields)
    ) or (not fields)


@pytest.mark.parametrize(
    ("fields", "reason", "who"),
    [
        ({"lengths": "33,0"}, "lengths=33,0: SDPA needs a token a request", set(SDPA)),
        ({"q_len": 40}, "q_len=40: SDPA needs a token a row; use q_len <= lengths", set(SDPA)),
        ({"queries": "0,1"}, "a query a request", set()),
        ({"q_len": 2}, "one query a request", {"gather_packed"}),
        ({}, "needs CUDA", {"cudnn", "efficient"}),
        ({"dtype": "float32"}, "dtype=float32", {"cudnn"}),
        ({"head_dim": 20}, "head_dim=20: must be a multiple of 8; use 24", {"cudnn", "efficient"}),
    ],
)
def test_sdpa_says_what_it_cannot_serve(fields, reason, who):
    assert saying(reason, SDPA, "sdpa_", **fields) == who


@pytest.mark.parametrize("name", ["flashinfer_fa3", "flash_attn_4"])
def test_kernels_of_one_architecture_say_so(name, monkeypatch):
    module = sys.modules[f"stream_attention.bench.peers.{name}"]
    for arch, refused in (("sm_80", True), ("sm_90", False)):
        monkeypatch.setattr(
            module, "device_facts", lambda device, arch=arch: types.SimpleNamespace(arch=arch)
        )
        reasons = PEERS[name].reasons(case_of(), torch.device("cuda"))
        assert any(r.startswith(f"device={arch}") for r in reasons) == refused


def test_a_package_that_is_missing_or_broken_is_a_reason(tmp_path, monkeypatch):
    assert _shared.load("no_such_module_of_ours", "thing") == (
        None,
        "thing is not installed (No module named 'no_such_module_of_ours')",
    )
    (tmp_path / "broken_module_of_ours.py").write_text("raise OSError('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    found, reason = _shared.load("broken_module_of_ours", "thing")
    assert (found, reason) == (None, "thing failed to import: OSError: no driver")
    with pytest.raises(ImportError, match="no driver"):
        _shared.loaded("broken_module_of_ours", "thing")


def test_private_modules_bring_no_peer_and_every_public_one_does():
    assert not contenders_lib.default_peers().missing
    assert {f"flashinfer_{n}" for n in FLASHINFER} | {f"sdpa_{n}" for n in SDPA} | {
        "flash_attn_4"
    } == set(PEERS)
    assert not any("peers._" in entry.build.__module__ for n, entry in PEERS.items() if n[0] != "s")


def test_every_peer_tells_the_versions_that_it_computes_with():
    for name, entry in PEERS.items():
        assert entry.versions()["torch"], name


class Wrapper:
    """A wrapper of FlashInfer's: computes by the oracle from what plan and run are given."""

    made: ClassVar[list] = []

    def __init__(self, *args, **options):
        self.args, self.options = args, options
        Wrapper.made.append(self)

    def plan(self, *args, **options):
        self.planned = args, options


class Decode(Wrapper):
    queries = None

    def run(self, q, store, *, out, k_scale=1.0, v_scale=1.0):
        (indptr, indices, last, _, _, _, page, *_), options = self.planned
        step = options.get("q_len_per_req", 1)
        queries = torch.arange(len(last) + 1) * step
        paged(q, store, queries, indptr, indices, last, page, self, out, True, k_scale, v_scale)


class Prefill(Wrapper):
    def run(self, q, store, *, out, k_scale=1.0, v_scale=1.0):
        (queries, indptr, indices, last, _, _, _, page), options = self.planned
        causal = options["causal"]
        paged(q, store, queries, indptr, indices, last, page, self, out, causal, k_scale, v_scale)


class Ragged(Wrapper):
    def run(self, q, key, value, *, out):
        (queries, starts, *_), options = self.planned
        assert key.shape[0] == starts[-1] and options["sm_scale"] == q.shape[-1] ** -0.5
        rows_from(q, queries, [(key[a:b], value[a:b]) for a, b in pairs(starts)], out, options)


class Holistic(Wrapper):
    def plan(self, queries, indptr, indices, lens, hq, hkv, dim, dim_vo, page, **options):
        last = (lens - 1) % page + 1
        self.planned = (queries, indptr, indices, last, hq, hkv, dim, page), options

    def run(self, q, store, *, out, lse):
        assert lse.shape == q.shape[:2] and lse.dtype == torch.float32
        (queries, indptr, indices, last, _, _, _, page), options = self.planned
        paged(q, store, queries, indptr, indices, last, page, self, out, options["causal"])


def pairs(offsets):
    numbers = offsets.tolist()
    return list(zip(numbers, numbers[1:], strict=False))


def paged(q, store, queries, indptr, indices, last, page, wrapper, out, causal, k=1.0, v=1.0):
    key, value = (part.float() * scale for part, scale in zip(store, (k, v), strict=True))
    if wrapper.options["kv_layout"] == "HND":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    seen = []
    for request, (a, b) in enumerate(pairs(indptr)):
        ids = indices[a:b].long()
        tokens = (b - a - 1) * page + int(last[request])
        seen.append((key[ids].flatten(0, 1)[:tokens], value[ids].flatten(0, 1)[:tokens]))
    rows_from(q, queries, seen, out, {"causal": causal})


def rows_from(q, queries, stores, out, options):
    for (a, b), (key, value) in zip(pairs(queries), stores, strict=True):
        pair = (key.unsqueeze(0).float(), value.unsqueeze(0).float())
        found = oracle.attention(q[a:b].unsqueeze(0).float(), pair, causal=options["causal"])
        out[a:b] = found[0].to(out.dtype)


def xqa(q, store, workspace, table, lens, longest, *, bmm1_scale, bmm2_scale, out, kv_layout):
    assert workspace.dtype == torch.uint8 and not workspace.any() and longest >= int(lens.max())
    page = store[0].shape[1 if kv_layout == "NHD" else 2]
    used = -(-lens // page)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), used.cumsum(0)])
    indices = table[torch.arange(table.shape[1]) < used.unsqueeze(1)]
    wrapper = types.SimpleNamespace(options={"kv_layout": kv_layout})
    queries = torch.arange(len(lens) + 1)
    key_scale = bmm1_scale * q.shape[-1] ** 0.5
    last = (lens - 1) % page + 1
    paged(q, store, queries, indptr, indices, last, page, wrapper, out, True, key_scale, bmm2_scale)


@pytest.fixture
def flashinfer(monkeypatch):
    """A module of that name, workspaces of a few bytes, and the wrappers that were made."""
    fake = types.ModuleType("flashinfer")
    fake.__version__ = "0"
    fake.BatchDecodeWithPagedKVCacheWrapper = Decode
    fake.BatchPrefillWithPagedKVCacheWrapper = Prefill
    fake.BatchPrefillWithRaggedKVCacheWrapper = Ragged
    fake.BatchAttention = Holistic
    fake.decode = types.ModuleType("flashinfer.decode")
    fake.decode.xqa_batch_decode_with_kv_cache = xqa
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", fake.decode)
    monkeypatch.setattr(_flashinfer, "_DECODE_WORKSPACE_BYTES", 64)
    monkeypatch.setattr(_flashinfer, "_PREFILL_WORKSPACE_BYTES", 96)
    monkeypatch.setattr(
        sys.modules["stream_attention.bench.peers.flashinfer_xqa"], "_WORKSPACE_BYTES", 32
    )
    monkeypatch.setattr(Wrapper, "made", [])
    _shared.load.cache_clear()
    yield fake
    _shared.load.cache_clear()


def judge(name, case):
    """Build on pools whose unused slots hold what peers get, run, and compare with the oracle."""
    pools = build_pools(case, CPU, cold=False)
    (work,) = PEERS[name].build(case, pools, CPU)
    for pool in pools:
        pool.fill_unused(contenders_lib.PEER_POISON)
    work.run()
    (pool,) = pools
    shape = pool.q.shape if pool.qo_indptr is not None else (case.batch, -1, *pool.q.shape[1:])
    want = oracle.attention(pool.q.view(shape), pool.cache, pool.qo_indptr, causal=case.causal)
    assert work.result().shape == pool.q.shape and work.result().dtype == pool.q.dtype
    torch.testing.assert_close(
        work.result().double(), want.view(pool.q.shape).double(), atol=2e-2, rtol=2e-2
    )
    return work


DECODE = case_of()
VERIFY = case_of(q_len=3, layout="HND", page_size=8)
MIXED = case_of("40,33,16,1", "20,1,3,1")
FULL = case_of("40,33,16,1", "20,1,3,1", causal=False)
PREFILL = case_of("32", q_len=32, cache="contiguous")
GAP = case_of("32,20", "8,3", cache="contiguous")
WIDE = dataclasses.replace(DECODE, kv_dtype=FP8, capacity=512)


@pytest.mark.parametrize(
    ("name", "case", "made", "backend"),
    [
        ("fa2_cuda_core", DECODE, Decode, "fa2"),
        ("fa2_cuda_core", WIDE, Decode, "fa2"),
        ("fa2_tensor_core", WIDE, Decode, "fa2"),
        ("fa2_tensor_core", VERIFY, Prefill, "fa2"),
        ("fa2_tensor_core", MIXED, Prefill, "fa2"),
        ("fa2_tensor_core", FULL, Prefill, "fa2"),
        ("fa2_tensor_core", PREFILL, Ragged, "fa2"),
        ("fa2_tensor_core", GAP, Ragged, "fa2"),
        ("fa3", DECODE, Decode, "fa3"),
        ("fa3", MIXED, Prefill, "fa3"),
        ("fa3", PREFILL, Ragged, "fa3"),
        ("cudnn", DECODE, Decode, "cudnn"),
        ("cudnn", VERIFY, Decode, "cudnn"),
        ("cudnn", FULL, Prefill, "cudnn"),
        ("cudnn", PREFILL, Ragged, "cudnn"),
        ("holistic", DECODE, Holistic, None),
        ("holistic", VERIFY, Holistic, None),
        ("holistic", MIXED, Holistic, None),
        ("holistic", FULL, Holistic, None),
    ],
)
def test_flashinfer_is_given_the_problem_of_the_pool(flashinfer, name, case, made, backend):
    judge(f"flashinfer_{name}", case)
    (wrapper,) = Wrapper.made
    assert type(wrapper) is made
    _, options = wrapper.planned
    if backend is not None:
        assert wrapper.options["backend"] == backend and wrapper.options["use_cuda_graph"] is True
        assert wrapper.args[0].numel() > 0 and not wrapper.args[0].any()
        assert options["q_data_type"] == torch.bfloat16
    if made is Decode:
        assert wrapper.options["use_tensor_cores"] == (name in ("fa2_tensor_core", "fa3"))
        assert "q_len_per_req" not in options or options["q_len_per_req"] == case.q_len == 3
    if made in (Prefill, Ragged):
        assert options.get("uniform_q_len") == (case.uniform_q_len if backend == "fa2" else None)
    if backend == "cudnn" and made is not Ragged:
        assert options["block_tables"].shape == (case.batch, case.max_pages)
        assert int(options["block_tables"].max()) < 2**20  # no id that a kernel must not follow


@pytest.mark.parametrize("case", [DECODE, WIDE, case_of(layout="HND", page_size=32)])
def test_xqa_is_given_the_problem_of_the_pool(flashinfer, case):
    judge("flashinfer_xqa", case)
    assert (KEY_SCALE, VALUE_SCALE) != (1.0, 1.0)


def test_flashinfer_tells_its_version_where_only_the_module_is_there(flashinfer):
    assert PEERS["flashinfer_fa3"].versions()["flashinfer-python"] == "0"
    reasons = PEERS["flashinfer_fa3"].reasons(DECODE, CPU)
    assert reasons == ("device=cpu: FlashInfer needs CUDA; use cuda",)


def dense(q, key, value, *, softmax_scale, causal):
    assert softmax_scale == q.shape[-1] ** -0.5
    found = oracle.attention(q.float(), (key.float(), value.float()), causal=causal)
    return found.to(q.dtype), None


def varlen(q, key, value, *, seqused_k, max_seqlen_k, softmax_scale, causal, **options):
    table, offsets = options.pop("page_table", None), options.pop("cu_seqlens_q", None)
    longest = options.pop("max_seqlen_q", None)
    assert not options and max_seqlen_k == int(seqused_k.max())
    assert key.stride(-1) == 1 and (offsets is None) == (longest is None)
    packed = q if offsets is not None else q.flatten(0, 1)
    if offsets is None:
        offsets = torch.arange(q.shape[0] + 1) * q.shape[1]
    else:
        assert longest == int(offsets.diff().max()) and offsets.dtype == torch.int32
    stores = []
    for request, tokens in enumerate(seqused_k.tolist()):
        found = [store[request] for store in (key, value)]
        if table is not None:
            assert table.dtype == torch.int32 and int(table.max()) < key.shape[0]
            found = [store[table[request].long()].flatten(0, 1) for store in (key, value)]
        stores.append([store[:tokens] for store in found])
    out = torch.empty_like(packed)
    rows_from(packed, offsets, stores, out, {"causal": causal})
    return out.view(q.shape)


@pytest.mark.parametrize(
    ("case", "called"),
    [
        (DECODE, "varlen"),
        (VERIFY, "varlen"),
        (MIXED, "varlen"),
        (FULL, "varlen"),
        (dataclasses.replace(MIXED, layout="HND", page_size=8), "varlen"),
        (case_of("33,16", "3"), "varlen"),
        (GAP, "varlen"),
        (PREFILL, "dense"),
        (dataclasses.replace(PREFILL, layout="HND", causal=False), "dense"),
        (dataclasses.replace(PREFILL, capacity=64), "varlen"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name.replace(" ", "-"),
)
def test_flash_attention_4_is_given_the_problem_of_the_pool(monkeypatch, case, called):
    calls = []

    def noted(function):
        return lambda *args, **options: calls.append(function) or function(*args, **options)

    fake = types.SimpleNamespace(flash_attn_func=noted(dense), flash_attn_varlen_func=noted(varlen))
    monkeypatch.setattr(flash_attn_4, "loaded", lambda module, package: fake)
    judge("flash_attn_4", case)
    assert [function.__name__ for function in calls] == [called]


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_a_forced_backend_is_the_one_that_torch_may_use(monkeypatch, backend):
    from stream_attention.bench.peers import sdpa

    enabled = []
    original = sdpa.scaled_dot_product_attention

    def noting(*args, **options):
        flags = torch.backends.cuda
        enabled.append((flags.flash_sdp_enabled(), flags.math_sdp_enabled()))
        return original(*args, **options)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", noting)
    judge(f"sdpa_{backend}", MIXED)
    assert set(enabled) == {(backend == "flash", backend == "math")}


@pytest.mark.parametrize(
    ("message", "error"),
    [("No available kernel. Aborting execution.", NotImplementedError), ("boom", RuntimeError)],
)
def test_a_call_that_a_forced_backend_refuses_is_not_supported(monkeypatch, message, error):
    from stream_attention.bench.peers import sdpa

    def refuse(*args, **options):
        raise RuntimeError(message)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", refuse)
    with pytest.raises(error) as caught:
        judge("sdpa_math", DECODE)
    assert type(caught.value) is error


def test_sdpa_of_a_gpu_pads_no_lengths_for_flash_and_needs_no_mask_for_the_last_queries():
    from stream_attention.bench.peers import _sdpa

    ragged = case_of("40,38,40,40,40", "1,1,3,3,40")
    pools = build_pools(ragged, CPU, cold=False)
    found = []

    def attend(q, key, value, piece):
        found.append((piece.seen, piece.mask is not None, q.shape[0]))
        return torch.zeros_like(q)

    _sdpa.work(ragged, pools[0], attend, masks=False, lower_right=True).run()
    one = [("all", False, 1)] * 2
    assert found == [*one, ("lower_right", False, 2), ("square", False, 1)]
    found.clear()
    _sdpa.work(ragged, pools[0], attend).run()
    assert found == [("mask", True, 2), ("lower_right", True, 2), ("square", False, 1)]


def test_the_efficient_backend_repeats_heads_and_takes_the_last_queries_unmasked():
    from stream_attention.bench.peers import _sdpa, sdpa

    case = dataclasses.replace(case_of("32", q_len=3), dtype="float32")
    (pool,) = build_pools(case, CPU, cold=False)
    _sdpa_work = _sdpa.work(case, pool, sdpa._attend_repeated, lower_right=True)
    _sdpa_work.run()
    q = pool.q.view(case.batch, 3, *pool.q.shape[1:])
    want = oracle.attention(q, pool.cache).view(pool.q.shape)
    torch.testing.assert_close(_sdpa_work.result().double(), want.double(), atol=1e-5, rtol=1e-5)


def test_uniform_lengths_are_enough_for_a_ragged_tensor():
    case = AttentionCase(batch=3, lengths=uniform(32), q_len=4, cache="contiguous", **BASE)
    assert not list(_flashinfer.prefill_gaps(case))
