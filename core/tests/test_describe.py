"""`describe`: the problem and the memory that a call's tensors mean; its errors are tested with the
public functions, in the planner.
"""

import pytest
import torch

from stream_attention.core.cache import ContiguousKVCache, PagedKVCache
from stream_attention.core.describe import describe, phase_of
from stream_attention.core.problem import AttentionProblem


def paged(batch=3, layout="NHD", **options):
    pool = torch.zeros(12, 16, 2, 32) if layout == "NHD" else torch.zeros(12, 2, 16, 32)
    return PagedKVCache(
        key=pool,
        value=pool.clone(),
        page_table=torch.zeros(batch, 4, dtype=torch.int32),
        sequence_lengths=torch.zeros(batch, dtype=torch.int32),
        layout=layout,
        **options,
    )


def test_the_problem_of_a_plain_decode_call():
    described = describe(torch.zeros(3, 1, 8, 32), paged())
    assert described.problem == AttentionProblem(
        phase="decode",
        batch=3,
        total_qo_len=3,
        max_qo_len=1,
        kv_capacity=64,
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim_qk=32,
        head_dim_vo=32,
        q_dtype="float32",
        kv_dtype="float32",
        out_dtype="float32",
        cache_kind="paged",
        page_size=16,
        sm_scale=32**-0.5,
    )


def test_every_option_reaches_the_problem():
    problem = describe(
        torch.zeros(3, 8, 32),
        paged(layout="HND"),
        sm_scale=0.0,
        causal=False,
        window_left=4,
        window_right=5,
        logits_soft_cap=6.0,
        attn_sink=torch.zeros(8),
        return_lse=True,
        batch_invariant=True,
        out=torch.empty(3, 8, 32, dtype=torch.bfloat16),
    ).problem
    assert (problem.sm_scale, problem.causal, problem.layout) == (0.0, False, "HND")
    assert (problem.window_left, problem.window_right, problem.logits_soft_cap) == (4, 5, 6.0)
    assert problem.has_sink
    assert problem.return_lse
    assert problem.batch_invariant
    assert problem.out_dtype == "bfloat16"


@pytest.mark.parametrize("shape", [(3, 8, 32), (3, 1, 8, 32), (3, 5, 8, 32)])
def test_q_is_viewed_and_results_have_its_shape(shape):
    q = torch.zeros(shape)
    described = describe(q, paged(), return_lse=True)
    assert described.bound.q.shape == (q.numel() // 256, 8, 32)
    assert described.bound.q.data_ptr() == q.data_ptr()
    assert described.bound.q._base is q
    assert described.result().shape == shape
    assert described.result().data_ptr() == described.bound.out.data_ptr()
    assert described.result_lse().shape == shape[:-1]


def test_strided_queries_are_viewed_too():
    wide = torch.zeros(3, 1, 16, 64)
    q = wide[:, :, ::2, :32]
    described = describe(q, paged())
    assert described.bound.q.stride() == (1024, 128, 1)
    assert described.bound.q.data_ptr() == wide.data_ptr()


def test_packed_queries_keep_their_offsets():
    offsets = torch.tensor([0, 2, 2, 7], dtype=torch.int32)
    described = describe(torch.zeros(7, 8, 32), paged(), offsets)
    assert described.bound.qo_indptr is offsets
    assert (described.problem.total_qo_len, described.problem.max_qo_len) == (7, 7)
    assert described.problem.phase == "mixed"
    assert describe(torch.zeros(7, 8, 32), paged(), offsets, max_qo_len=5).problem.max_qo_len == 5


@pytest.mark.parametrize(
    ("arguments", "phase"),
    [
        ((0, 0, 0, 64), "decode"),
        ((3, 3, 1, 64), "decode"),
        ((0, 3, 0, 64), "decode"),
        ((6, 3, 2, 64), "verify"),
        ((48, 3, 16, 64), "verify"),
        ((51, 3, 17, 64), "append"),
        ((192, 3, 64, 64), "prefill"),
        ((51, 3, 17, 9), "prefill"),
        ((7, 3, 5, 64), "mixed"),
        ((7, 1, 7, 64), "verify"),
    ],
)
def test_the_phase_is_a_function_of_the_query_lengths(arguments, phase):
    assert phase_of(*arguments) == phase


def test_given_outputs_are_bound():
    out, lse = torch.empty(3, 8, 32), torch.empty(3, 8)
    described = describe(torch.zeros(3, 8, 32), paged(), out=out, lse=lse, return_lse=True)
    assert described.result().data_ptr() == out.data_ptr()
    assert described.result_lse().data_ptr() == lse.data_ptr()
    assert described.problem.out_dtype == "float32"


def test_lse_is_absent_unless_asked_for():
    described = describe(torch.zeros(3, 8, 32), paged())
    assert described.bound.lse is None
    assert described.result_lse() is None


def test_allocate_false_takes_no_memory_for_results():
    described = describe(torch.zeros(3, 8, 32), paged(), return_lse=True, allocate=False)
    assert described.bound.out.device.type == "meta"
    assert described.bound.lse.device.type == "meta"
    assert described.result().shape == (3, 8, 32)


def test_a_pair_of_tensors_is_a_contiguous_cache():
    k, v = torch.zeros(3, 20, 2, 32), torch.zeros(3, 20, 2, 16)
    described = describe(torch.zeros(3, 8, 32), k, v_cache=v)
    assert isinstance(described.cache, ContiguousKVCache)
    problem = described.problem
    assert (problem.cache_kind, problem.kv_capacity, problem.head_dim_vo) == ("contiguous", 20, 16)


@pytest.mark.parametrize(
    ("scales", "kind"),
    [
        ({}, None),
        ({"key_scale": 2.0}, "tensor"),
        ({"value_scale": torch.ones(1)}, "tensor"),
        ({"key_scale": 2.0, "value_scale": torch.ones(2)}, "head"),
    ],
)
def test_scales_have_a_kind(scales, kind):
    pool = torch.zeros(12, 16, 2, 32).to(torch.float8_e4m3fn)
    cache = PagedKVCache(
        key=pool,
        value=pool,
        page_table=torch.zeros(3, 4, dtype=torch.int32),
        sequence_lengths=torch.zeros(3, dtype=torch.int32),
        **scales,
    )
    assert describe(torch.zeros(3, 8, 32), cache).problem.kv_scales == kind


def test_lists_per_head_are_a_schedule_of_the_caller():
    pool = torch.zeros(12, 16, 2, 32)
    cache = PagedKVCache(
        key=pool,
        value=pool.clone(),
        page_table=torch.zeros(3, 2, 4, dtype=torch.int32),
        sequence_lengths=torch.zeros(3, 2, dtype=torch.int32),
    )
    problem = describe(torch.zeros(3, 8, 32), cache).problem
    assert problem.per_head_lists
    assert problem.guarantee == "schedule_exact"


def test_rows_narrower_than_16_bytes_need_only_their_own_alignment():
    k = torch.zeros(2, 4, 2, 3, dtype=torch.float16)
    q = torch.zeros(2 * 4 * 3 + 1, dtype=torch.float16)[1:].view(2, 4, 3)
    assert describe(q, k, v_cache=k.clone()).problem.head_dim_qk == 3


def test_gradients_are_accepted_where_none_are_recorded():
    q = torch.zeros(3, 8, 32, requires_grad=True)
    k = torch.zeros(3, 9, 2, 32, requires_grad=True)
    sink = torch.zeros(8, requires_grad=True)
    with torch.no_grad():
        bound = describe(q, k, v_cache=k, attn_sink=sink).bound
    tensors = (bound.q, bound.kv.key, bound.kv.value, bound.attn_sink)
    assert [t.requires_grad for t in tensors] == [False] * 4
    assert bound.kv.key.data_ptr() == k.data_ptr()


def test_calls_without_requests_or_tokens_are_legal():
    assert describe(torch.zeros(0, 8, 32), paged(batch=0)).result().shape == (0, 8, 32)
    assert describe(torch.zeros(3, 0, 8, 32), paged()).problem.total_qo_len == 0
    k = torch.zeros(3, 0, 2, 32)
    assert describe(torch.zeros(3, 8, 32), k, v_cache=k).problem.kv_capacity == 0
