"""The capability record of sm90_decode: what it serves, what it refuses and why; its geometry."""

import ctypes
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from stream_attention.core.errors import UnsupportedProblem
from stream_attention.core.native import NativeLaunchError
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import Registry
from stream_attention.core.testing.checks import H200, bind, find_record
from stream_attention.core.testing.native_library import require
from stream_attention.core.testing.problems import Case, build
from stream_attention.kernels_sm90 import capabilities, decode
from stream_attention.kernels_sm90.library import LIBRARY

PROBLEM = AttentionProblem(
    batch=4,
    total_qo_len=4,
    max_qo_len=1,
    kv_capacity=4096,
    num_qo_heads=32,
    num_kv_heads=8,
    head_dim_qk=128,
    head_dim_vo=128,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
    out_dtype="bfloat16",
    sm_scale=0.1,
)


@pytest.fixture(autouse=True)
def library():
    require(LIBRARY)


def problem(**changes):
    return dataclasses.replace(PROBLEM, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim_qk": 64, "head_dim_vo": 64, "num_qo_heads": 14, "num_kv_heads": 2},
        {"q_dtype": "float16", "kv_dtype": "float16", "out_dtype": "float16"},
        {"total_qo_len": 20, "max_qo_len": 5, "phase": "verify"},
        {"cache_kind": "contiguous", "page_size": 4096},
        {"page_size": 3, "layout": "HND", "per_head_lists": True},
        {"window_left": 0, "logits_soft_cap": 3.0, "has_sink": True, "return_lse": True},
        {"causal": False},
        {"batch_invariant": True, "total_qo_len": 20, "max_qo_len": 5},
        *({"head_dim_qk": dim, "head_dim_vo": dim} for dim in decode.HEAD_DIMS),
        {"kv_dtype": "float8_e4m3fn", "kv_scales": "tensor"},
        {"kv_dtype": "float8_e4m3fn", "kv_scales": "head", "head_dim_qk": 80, "head_dim_vo": 80},
    ],
)
def test_serves(changes):
    assert decode.RECORD.reasons(problem(**changes), H200) == ()


FP32 = {"q_dtype": "float32", "kv_dtype": "float32", "out_dtype": "float32"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (FP32, "dtypes (q, kv, out)=('float32', 'float32', 'float32'): q and out must be one of"),
        ({"out_dtype": "float32"}, "dtypes"),
        ({"head_dim_qk": 88, "head_dim_vo": 88}, "head_dim (qk, vo)=(88, 88): must be equal and"),
        ({"head_dim_vo": 64}, "head_dim (qk, vo)=(128, 64)"),
        ({"total_qo_len": 5, "max_qo_len": 2}, "qo_indptr: every request must have the same"),
        ({"total_qo_len": 68, "max_qo_len": 17}, "max_qo_len=17: queries times group size 4"),
        ({"causal": False, "window_right": 3}, "window_right=3"),
        ({"kv_capacity": (1 << 31) - 1}, "kv_capacity=2147483647: must be at most 2147479551"),
        (
            {"batch": 1 << 16, "total_qo_len": 1 << 16, "kv_capacity": (1 << 20) + 1},
            "batch * kv_capacity=68719542272: must be at most 68719476736",
        ),
        ({"kv_capacity": 0}, "(batch, total_qo_len, kv_capacity)=(4, 4, 0): each must be at least"),
        ({"mask": "bool"}, "differentiable or mask"),
        ({"sm_scale": 3e38}, "(sm_scale, logits_soft_cap)=(3e+38, None): the scale times"),
        ({"logits_soft_cap": 3e38}, "(sm_scale, logits_soft_cap)=(0.1, 3e+38)"),
        ({"sm_scale": 10.0, "logits_soft_cap": 1.2e-38}, "(sm_scale, logits_soft_cap)"),
    ],
)
def test_refuses_with_the_reason(changes, words):
    (reason,) = decode.RECORD.reasons(problem(**changes), H200)
    assert reason.startswith(words)


@pytest.mark.parametrize("change", ["pool", "out"])
def test_build_refuses_memory_that_the_kernel_cannot_take(change):
    built = build(Case(kv_lens=(40,), call="batch"), 0)
    described = bind(built)
    bound, kv = described.bound, described.bound.kv
    if change == "pool":
        bound = dataclasses.replace(bound, kv=dataclasses.replace(kv, key=kv.key[:0]))
        words = "the pool holds no page"
    else:
        shifted = torch.empty(bound.out.numel() + 1, dtype=bound.out.dtype)[1:]
        bound = dataclasses.replace(bound, out=shifted.view(bound.out.shape))
        words = "must be a multiple of 8"
    with pytest.raises(UnsupportedProblem, match=words) as caught:
        decode.build(described.problem, None, H200, bound)
    assert decode.RECORD.refuses(described.problem, bound) == str(caught.value)


def test_packed_queries_that_are_batch_invariant_are_refused():
    """The route of a request may not depend on how many queries others have."""
    built = build(Case(qo_lens=(2,), kv_lens=(40,)), 0)
    described = bind(built, batch_invariant=True)
    assert decode.RECORD.reasons(described.problem, H200) == ()
    with pytest.raises(UnsupportedProblem, match="qo_indptr with batch_invariant=True") as caught:
        decode.build(described.problem, None, H200, described.bound)
    assert decode.RECORD.refuses(described.problem, described.bound) == str(caught.value)


@pytest.mark.parametrize("strides", [(1 << 36, 64, 64, 1), (4096, 1 << 36, 64, 1)])
def test_what_is_refused_is_known_without_memory(strides):
    described = bind(build(Case(kv_lens=(40,), call="batch"), 0))
    bound, kv = described.bound, described.bound.kv
    meta = dataclasses.replace(
        bound,
        q=bound.q.to("meta"),
        out=bound.out.to("meta"),
        kv=dataclasses.replace(kv, key=kv.key.to("meta"), value=kv.value.to("meta")),
    )
    assert decode.RECORD.refuses(described.problem, meta) is None
    far = torch.empty_strided((3, 9, 1, 64), strides, dtype=torch.bfloat16, device="meta")
    meta = dataclasses.replace(meta, kv=dataclasses.replace(meta.kv, value=far))
    reason = decode.RECORD.refuses(described.problem, meta)
    assert reason is not None and reason.startswith("value.stride()=")


def test_a_batch_invariant_problem_has_the_same_best_route_in_any_batch():
    portable = [find_record(name) for name in ("triton", "torch")]
    shapes = itertools.product((1, 7, 500), (1, 5, 16), (16, 4096, 1 << 19, 1 << 20))
    for batch, queries, capacity in shapes:
        for window in (None, 0, 1000, 4096, 1 << 20):
            asked = problem(
                batch=batch, total_qo_len=batch * queries, max_qo_len=queries, kv_capacity=capacity,
                window_left=window, batch_invariant=True,
            )  # fmt: skip
            others = [record.estimate_us(asked, H200) for record in portable]
            assert decode.estimate_us(asked, H200) < min(others), asked


def test_what_a_window_hides_is_not_estimated():
    asked = problem(kv_capacity=1 << 20, window_left=999)
    shown = problem(kv_capacity=1000, window_left=999)
    assert decode.estimate_us(asked, H200) == decode.estimate_us(shown, H200)
    assert decode.estimate_us(problem(kv_capacity=1 << 20), H200) > decode.estimate_us(asked, H200)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_refuses_other_devices(capability):
    device = dataclasses.replace(H200, compute_capability=capability)
    (reason,) = decode.RECORD.reasons(PROBLEM, device)
    assert "needs compute capability 9.0" in reason


def test_is_registered_beside_the_merge():
    registry = Registry(discover=False)
    capabilities.register(registry)
    assert [record.route for record in registry.attention_records()] == ["sm90_decode"]
    assert registry.attention_records()[0].native


@pytest.mark.parametrize(
    ("changes", "num_sms", "blocks_per_head", "row_groups"),
    [
        ({}, 132, 16, 1),
        ({}, 114, 14, 1),
        ({"num_qo_heads": 16, "num_kv_heads": 2}, 132, 64, 1),
        ({"num_qo_heads": 3, "num_kv_heads": 3}, 132, 42, 1),
        ({"num_qo_heads": 256, "num_kv_heads": 256}, 132, 1, 1),
        ({"total_qo_len": 20, "max_qo_len": 5}, 132, 16, 1),
        ({"total_qo_len": 32, "max_qo_len": 8}, 132, 16, 1),
        ({"total_qo_len": 64, "max_qo_len": 16}, 132, 8, 2),
        ({"total_qo_len": 20, "max_qo_len": 5, "kv_dtype": "float8_e4m3fn"}, 132, 8, 2),
    ],
)
def test_geometry_shares_the_device_between_heads(changes, num_sms, blocks_per_head, row_groups):
    asked = problem(**changes)
    form = decode.geometry(asked, num_sms)
    heads = asked.num_kv_heads * row_groups
    assert (form.blocks_per_head, form.row_groups) == (blocks_per_head, row_groups)
    assert form.grid == blocks_per_head * heads
    items = -(-2 * (form.rows * asked.head_dim_vo // 4 + blocks_per_head) // 4) * 4  # of a region
    assert form.scratch_floats == (2 * form.grid * 6 * items if blocks_per_head > 1 else 0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("batch", 0, "must be >= 1"),
        ("page_size", 0, "must be >= 1"),
        ("qo_len", 17, "at most 64"),
        ("capacity", -1, "capacity"),
        ("capacity", (1 << 31) - 1, "capacity"),
        ("head_dim", 88, "head_dim: must be 64, 80, 96, 128, 192 or 256"),
        ("dtype", 0, "dtype: must be 1"),
        ("kv_dtype", 2, "kv_dtype: 0"),
    ],
)
def test_the_library_refuses_bad_params_itself(field, value, words):
    params = decode.shape_params(PROBLEM)
    setattr(params, field, value)
    status = decode.functions().stream_attention_decode_geometry(
        params, 132, decode.DecodeGeometry()
    )
    with pytest.raises(NativeLaunchError, match=words):
        decode.check("stream_attention_decode_geometry", status)


def prepare(params, num_sms):
    """Prepare in memory of the size and alignment that the library asks for."""
    call_bytes = decode.functions().stream_attention_decode_struct_bytes(decode.CALL_STRUCT)
    call = (ctypes.c_char * call_bytes)()
    return decode.functions().stream_attention_decode_prepare(
        params, num_sms, ctypes.byref(call), call_bytes
    )


def test_the_library_refuses_missing_and_misaligned_memory():
    params = decode.shape_params(PROBLEM)
    with pytest.raises(NativeLaunchError, match="pointer is null"):
        decode.check("prepare", prepare(params, 132))
    for name in ("q", "key", "value", "out", "scratch"):
        setattr(params, name, 1 << 20)
    params.num_pages = params.batch
    for name, offset in (("key", 8), ("scratch", 16), ("out", 4)):
        setattr(params, name, (1 << 20) + offset)
        with pytest.raises(NativeLaunchError, match="aligned to 16 bytes, out to 8, scratch to 32"):
            decode.check("prepare", prepare(params, 132))
        setattr(params, name, 1 << 20)


def test_the_library_refuses_pools_that_cannot_hold_the_requests():
    params = decode.shape_params(PROBLEM)
    for name in ("q", "key", "value", "out", "scratch"):
        setattr(params, name, (1 << 20) + 4)  # what is enough is refused for its address
    for table, enough in ((None, params.batch), (1 << 20, 1)):
        params.page_table = table
        for pages, words in ((-1, "num_pages"), (enough - 1, "num_pages"), (enough, "aligned")):
            params.num_pages = pages
            with pytest.raises(NativeLaunchError, match=words):
                decode.check("prepare", prepare(params, 132))


def test_the_library_refuses_more_tiles_than_it_counts():
    params = decode.shape_params(problem(batch=1 << 16, total_qo_len=1 << 16))
    params.capacity = 1 << 24
    status = decode.functions().stream_attention_decode_geometry(
        params, 132, decode.DecodeGeometry()
    )
    for refused in (status, prepare(params, 132)):
        with pytest.raises(NativeLaunchError, match="tiles of the batch: below"):
            decode.check("stream_attention_decode", refused)


def test_strides_of_single_elements_count_as_nothing():
    key = torch.zeros(2, 3, 128, 1).transpose(2, 3)
    assert key.stride() == (384, 128, 1, 1)
    assert decode._strides(key) == [384, 128, 0, 1]


def bound_with(key=(2048, 128, 128, 1), table=(4, 4, 1)):
    """Tensors as `build` looks at them, with the strides given."""
    tokens = torch.empty_strided((2, 16, 1, 128), key, dtype=torch.bfloat16, device="meta")
    ids = torch.empty_strided((3, 1, 4), table, dtype=torch.int32, device="meta")
    kv = SimpleNamespace(key=tokens, value=tokens, page_table=ids)
    return SimpleNamespace(kv=kv, out=torch.empty(0), qo_indptr=None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": (1 << 35, 128, 128, 1)}, "key.stride"),
        ({"key": (2048, 1 << 35, 128, 1)}, "below 64 GiB"),
        ({"table": (1 << 32, 4, 1)}, "page_table.stride"),
    ],
)
def test_strides_past_what_the_kernel_counts_are_refused(changes, reason):
    with pytest.raises(UnsupportedProblem, match=reason):
        decode.build(problem(), None, None, bound_with(**changes))
