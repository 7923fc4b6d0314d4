"""A batch as data: its rules, its counts, and the problem that its tensors are described as."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_attention.core.cache import ContiguousKVCache, PagedKVCache
from stream_attention.core.describe import describe
from stream_attention.core.dtypes import torch_dtype
from stream_attention.core.problem import AttentionProblem
from stream_attention.planner.differentiable import prefill_problem, train_problem
from stream_attention.planner.page_tables import PageLayout
from stream_attention.planner.workloads import WorkloadBatch, WorkloadRequest


def decode(*kv_lens, **fields):
    return tuple(WorkloadRequest(kv_len=n, **fields) for n in kv_lens)


@st.composite
def requests(draw, page_size=4, paged=True):
    """A request of any serving phase, with a prefix of 1 page in group 0 where it has room."""
    phase = draw(st.sampled_from(["decode", "verify", "append", "prefill"]))
    qo_len = 1 if phase == "decode" else draw(st.integers(1, 6))
    kv_len = qo_len if phase == "prefill" else qo_len + draw(st.integers(0, 12))
    fields = {}
    if paged and kv_len >= page_size and draw(st.booleans()):
        fields = {"prefix_group": 0, "prefix_len": page_size}
    if phase == "verify" and draw(st.booleans()):
        tree = (-1, *(draw(st.integers(0, child - 1)) for child in range(1, qo_len)))
        fields["tree"] = tree
    return WorkloadRequest(phase=phase, qo_len=qo_len, kv_len=kv_len, **fields)


@st.composite
def batches(draw):
    paged = draw(st.booleans())
    chosen = draw(st.lists(requests(paged=paged), min_size=1, max_size=4))
    branches = any(request.branches for request in chosen)
    return WorkloadBatch(
        requests=tuple(chosen),
        num_qo_heads=4,
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim_qk=16,
        head_dim_vo=draw(st.sampled_from([None, 8])),
        cache_kind="paged" if paged else "contiguous",
        layout=draw(st.sampled_from(["NHD", "HND"])),
        page_size=4 if paged else 16,
        capacity=draw(st.sampled_from([None, 24])),
        window_left=None if branches else draw(st.sampled_from([None, 0, 5])),
        logits_soft_cap=draw(st.sampled_from([None, 30])),
        has_sink=draw(st.booleans()),
        return_lse=draw(st.booleans()),
        batch_invariant=draw(st.booleans()),
    )


def tensors(batch):
    """`(q, cache, qo_indptr)` of a batch, contents left as they come."""
    dtype, heads, tokens = torch_dtype(batch.q_dtype), batch.num_kv_heads, batch.max_tokens
    if batch.paged:
        table, pages = batch.page_table(0)
        shape = (pages, batch.page_size, heads)
    else:
        shape = (batch.batch, tokens, heads)
    if batch.layout == "HND":
        shape = (shape[0], heads, shape[1])
    common = {
        "key": torch.empty(*shape, batch.head_dim_qk, dtype=dtype),
        "value": torch.empty(*shape, batch.dim_vo, dtype=dtype),
        "sequence_lengths": torch.tensor(batch.kv_lens, dtype=torch.int32),
        "layout": batch.layout,
    }
    cache = PagedKVCache(page_table=table, **common) if batch.paged else ContiguousKVCache(**common)
    q = torch.empty(batch.num_qo_tokens, batch.num_qo_heads, batch.head_dim_qk, dtype=dtype)
    ends = torch.tensor((0, *batch.qo_lens)).cumsum(0).to(torch.int32)
    return q, cache, ends


@settings(max_examples=80, deadline=None)
@given(batches())
def test_a_batch_has_the_problem_that_its_tensors_are_described_as(batch):
    q, cache, ends = tensors(batch)
    found = describe(
        q,
        cache,
        ends,
        max_qo_len=max(batch.qo_lens),
        window_left=batch.window_left,
        logits_soft_cap=batch.logits_soft_cap,
        attn_sink=torch.zeros(batch.num_qo_heads) if batch.has_sink else None,
        return_lse=batch.return_lse,
        batch_invariant=batch.batch_invariant,
    ).problem
    want = batch.problem()
    if any(request.branches for request in batch.requests):
        assert want.mask == "bool"
        want = dataclasses.replace(want, mask=None)
    if want.phase == "prefill" != found.phase:  # what `prefill` says beside `describe`
        assert all(request.phase == "prefill" for request in batch.requests)
        want = dataclasses.replace(want, phase=found.phase)
    assert want == found


@settings(max_examples=50, deadline=None)
@given(batches())
def test_repr_evaluates_back(batch):
    assert eval(repr(batch)) == batch


def test_whole_sequences_have_the_problems_of_prefill_and_train():
    common = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 16, "cache_kind": "contiguous"}
    q = torch.empty(3, 8, 4, 16, dtype=torch.bfloat16)
    k = torch.empty(3, 8, 2, 16, dtype=torch.bfloat16)
    row = WorkloadRequest(phase="prefill", qo_len=8, kv_len=8)
    batch = WorkloadBatch(requests=(row,) * 3, causal=False, **common)
    assert batch.problem() == prefill_problem(q, k, k, None, False, causal=False)
    row = WorkloadRequest(phase="train", qo_len=8, kv_len=8)
    batch = WorkloadBatch(requests=(row,) * 3, dropout_p=0.1, dropout_seed=7, **common)
    assert batch.problem() == train_problem(q, k, k, None, 0.1, None)


def test_counts_hold_a_shared_prefix_once_or_once_a_request():
    batch = WorkloadBatch(
        requests=(*decode(100, 64, prefix_group=3, prefix_len=64), *decode(10)),
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim_qk=64,
        head_dim_vo=32,
        kv_dtype="float8_e4m3fn",
    )
    assert (batch.num_qo_tokens, batch.num_rows) == (3, 24)
    assert (batch.num_kv_tokens, batch.num_distinct_kv_tokens) == (174, 110)
    assert batch.kv_bytes == 174 * 2 * (64 + 32)
    assert batch.distinct_kv_bytes == 110 * 2 * (64 + 32)
    assert batch.kv_bytes == 174 * batch.problem().kv_token_bytes


def test_capacity_is_the_longest_request_in_whole_pages_unless_given():
    assert WorkloadBatch(requests=decode(17, 0)).problem().kv_capacity == 32
    assert WorkloadBatch(requests=decode(0)).problem().kv_capacity == 16
    assert WorkloadBatch(requests=decode(0), cache_kind="contiguous").max_tokens == 1
    wide = WorkloadBatch(requests=decode(17), capacity=4096)
    assert (wide.max_pages, wide.problem().kv_capacity) == (256, 4096)


def test_a_tree_mask_sees_the_context_and_its_ancestors():
    tree = WorkloadRequest(phase="verify", qo_len=4, kv_len=6, tree=(-1, 0, 0, 2))
    chain = WorkloadRequest(phase="verify", qo_len=3, kv_len=6, tree=(-1, 0, 1))
    batch = WorkloadBatch(requests=(tree, chain))
    assert batch.tree_mask(0).int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 1],
    ]
    assert batch.tree_mask(1) is None
    assert batch.problem().mask == "bool"
    assert WorkloadBatch(requests=(chain,)).problem().mask is None


def test_many_requests_are_one_object_many_times():
    batch = WorkloadBatch(requests=decode(1) * 65536)
    assert len(repr(batch)) < 100 and eval(repr(batch)) == batch
    assert isinstance(batch.problem(), AttentionProblem)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"phase": "mixed"}, "phase='mixed': must be one of .*use 'append'"),
        ({"qo_len": 2}, "qo_len=2: a decode request has one query token; use 1"),
        ({"phase": "prefill", "qo_len": 0}, "qo_len=0: .* at least one query"),
        ({"phase": "append", "qo_len": 9}, "kv_len='8 with qo_len=9': must be at least qo_len"),
        ({"phase": "verify", "qo_len": 9}, "kv_len='8 with qo_len=9'.*use 9"),
        ({"kv_len": True}, "kv_len=True: must be an int"),
        ({"kv_len": 2**31}, "kv_len=2147483648: must be an int.*use 2147483647"),
        ({"prefix_len": 8}, "prefix_len='8 with prefix_group=None': .*use 0"),
        ({"prefix_group": 1}, "prefix_len='0 with prefix_group=1'"),
        ({"prefix_group": -1, "prefix_len": 8}, "prefix_group=-1: must be None or an int >= 0"),
        ({"prefix_group": 1, "prefix_len": 9}, "prefix_len=9: must be at most kv_len; use 8"),
        ({"tree": (-1,)}, "only a verify request has one"),
        ({"phase": "verify", "qo_len": 3, "tree": (-1, 0)}, "use qo_len=2"),
        ({"phase": "verify", "qo_len": 3, "tree": (-1, 2, 0)}, r"use \(-1, 0, 0\)"),
        ({"phase": "verify", "qo_len": 2, "tree": (-1, -1)}, r"one root.*use \(-1, 0\)"),
        ({"phase": "verify", "qo_len": 2, "tree": [-1, 0]}, r"tree=\[-1, 0\]: must be None or a"),
        ({"label": None}, "label=None: must be a str"),
    ],
)
def test_each_rule_of_a_request_names_its_fault(fields, message):
    with pytest.raises(ValueError, match=message):
        WorkloadRequest(**{"kv_len": 8, **fields})


TREE = WorkloadRequest(phase="verify", qo_len=3, kv_len=8, tree=(-1, 0, 0))
TRAIN = WorkloadRequest(phase="train", qo_len=8, kv_len=8)
FLAT = {"cache_kind": "contiguous"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"requests": ()}, "requests='0 requests': must be a tuple of 1"),
        ({"requests": list(decode(8))}, "requests='list': must be a tuple"),
        ({"requests": (*decode(8), 3)}, "requests=3: must be a tuple of"),
        ({"num_qo_heads": 7}, r"num_qo_heads=\(7, 2\): must be a multiple of num_kv_heads; use 6"),
        ({"head_dim_qk": 0}, "head_dim_qk=0"),
        ({"head_dim_vo": 513}, "head_dim_vo=513"),
        ({"q_dtype": "float8_e4m3fn"}, "q_dtype='float8_e4m3fn': must be one of"),
        ({"kv_dtype": "float16"}, "kv_dtype='float16': must be None"),
        ({"out_dtype": "int8"}, "out_dtype='int8'"),
        ({"kv_scales": "head"}, "scales belong to float8"),
        ({"sm_scale": float("nan")}, "sm_scale=nan: must be None"),
        ({"window_right": 3}, "window_right=3: a causal problem sees nothing to the right"),
        ({"page_size": 0}, "page_size=0: must be an int >= 1"),
        ({"page_size": 64, **FLAT}, "page_size=64: a contiguous cache has no pages"),
        ({"page_layout": "shuffled"}, "page_layout='shuffled': must be a PageLayout"),
        ({"page_layout": PageLayout("sequential"), **FLAT}, "the default, PageLayout"),
        ({"capacity": 17}, "capacity='17 with longest kv_len 8.*use 32"),
        ({"capacity": 4, **FLAT}, "capacity='4 with longest kv_len 8.*use 8"),
        (
            {"requests": decode(32, 48, prefix_group=5, prefix_len=16), **FLAT},
            r"requests='prefix groups \[5\]': only a paged cache shares prefixes",
        ),
        (
            {"requests": decode(32, prefix_group=5, prefix_len=24)},
            r"groups \{5: \[24\]\} with page_size=16': a prefix is shared in whole pages; use 16",
        ),
        (
            {
                "requests": (
                    *decode(32, prefix_group=5, prefix_len=16),
                    *decode(32, prefix_group=5, prefix_len=32),
                )
            },
            r"prefix groups \{5: \[16, 32\]\}': all requests .* one length; use 16 tokens",
        ),
        ({"requests": (TRAIN,)}, "training has equal lengths"),
        ({"requests": (TRAIN, *decode(8)), **FLAT}, "training has equal lengths"),
        ({"requests": (TRAIN,), "capacity": 9, **FLAT}, "training has equal lengths"),
        ({"requests": (TREE,), "window_left": 4}, "a tree that branches has a mask of its own"),
        ({"requests": (TREE,), "causal": False}, "a tree that branches has a mask of its own"),
        (
            {"dropout_p": 0.5, "dropout_seed": 1},
            "dropout_p=0.5: must be in .*, and 0 unless",
        ),
        ({"requests": (TRAIN,), "dropout_p": 0.5, **FLAT}, "dropout_seed=None: must be an int"),
        ({"dropout_seed": 1}, "dropout_seed=1: must be an int >= 0 where"),
        ({"label": 3}, "label=3: must be a str"),
    ],
)
def test_each_rule_of_a_batch_names_its_fault(fields, message):
    common = {"requests": decode(8), "num_qo_heads": 4, "num_kv_heads": 2}
    with pytest.raises(ValueError, match=message):
        WorkloadBatch(**{**common, **fields})


def test_all_faults_of_a_batch_are_reported_at_once():
    with pytest.raises(ValueError, match="WorkloadBatch: 3 faults") as error:
        WorkloadBatch(requests=(), layout="DHN", batch_invariant=1)
    text = str(error.value)
    assert "requests=" in text and "layout='DHN'" in text and "batch_invariant=1" in text


def test_a_contiguous_batch_has_no_page_table():
    with pytest.raises(ValueError, match="has no page table; use 'paged'"):
        WorkloadBatch(requests=decode(8), cache_kind="contiguous").page_table(0)
    with pytest.raises(ValueError, match="seed='a': must be an int"):
        WorkloadBatch(requests=decode(8)).page_table("a")
