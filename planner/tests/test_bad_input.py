"""Bad input to a serving call or its cache: ValueError with parameter, value, rule, nearest choice.

What prefill and train refuse is in test_bad_sequences.py.
"""

import math
import re

import pytest
import torch

import stream_attention as stream_attn
from stream_attention import ContiguousKVCache, PagedKVCache, StreamAttnEngine

FP8 = torch.float8_e4m3fn
NAN = math.nan


def _tensors():
    """A legal paged call: 2 requests, 4 query heads, 2 KV heads, head_dim 16, pages of 16."""
    return {
        "q": torch.randn(2, 4, 16),
        "key": torch.randn(8, 16, 2, 16),
        "value": torch.randn(8, 16, 2, 16),
        "page_table": torch.arange(8, dtype=torch.int32).view(2, 4),
        "sequence_lengths": torch.tensor([33, 20], dtype=torch.int32),
    }


def _call(function, tensors, **options):
    q = tensors.pop("q")
    indptr = options.pop("qo_indptr", None)
    cache = options.pop("cache", None)
    cache = PagedKVCache(**tensors) if cache is None else cache
    if function == "decode":
        return stream_attn.decode(q, cache, **options)
    if function == "attention":
        return stream_attn.attention(q, cache, indptr, **options)
    engine = StreamAttnEngine()
    if function == "plan":
        return engine.plan(q, cache, **options)
    return engine.plan_attention(q, cache, indptr, **options)


FUNCTIONS = ("decode", "attention", "plan", "plan_attention")


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def _misaligned(shape):
    return torch.randn(torch.Size(shape).numel() + 1)[1:].view(shape)


def _off_row(shape):
    """Strides of rows that are no multiple of 16 bytes."""
    return torch.randn(*shape[:-1], shape[-1] + 1)[..., : shape[-1]]


# name: (replaced tensors, options, message parts). Each part must be in the message.
CALLS = {
    "q_type": ({"q": [1.0]}, {}, ["q='list': must be a torch.Tensor"]),
    "q_rank": ({"q": torch.zeros(4, 16)}, {}, ["q.shape=(4, 16): must be [batch, ", "rank 3 or 4"]),
    "q_dtype": (
        {"q": torch.zeros(2, 4, 16, dtype=torch.float64)},
        {},
        ["q.dtype=torch.float64: must be one of bfloat16, float16, float32; use torch.bfloat16"],
    ),
    "q_int": ({"q": torch.zeros(2, 4, 16, dtype=torch.int32)}, {}, ["q.dtype=torch.int32"]),
    "q_device": (
        {"q": torch.zeros(2, 4, 16, device="meta")},
        {},
        ["q.device='meta': must be the cache's device; use cpu"],
    ),
    "q_sparse": (
        {"q": torch.zeros(2, 4, 16).to_sparse()},
        {},
        ["q.layout=torch.sparse_coo: must be dense; use q.to_dense()"],
    ),
    "q_sparse_rows": (
        {"q": torch.zeros(2, 4, 16).to_sparse_csr()},
        {},
        ["q.layout=torch.sparse_csr: must be dense"],
    ),
    "q_batch": (
        {"q": torch.zeros(3, 4, 16)},
        {},
        ["q.shape=(3, 4, 16): axis 0 must be the cache's batch = 2", "use (2, 4, 16)"],
    ),
    "q_head_dim": (
        {"q": torch.zeros(2, 4, 24)},
        {},
        ["q.shape=(2, 4, 24): the last axis must be the key's head_dim = 16; use (2, 4, 16)"],
    ),
    "q_group": (
        {"q": torch.zeros(2, 5, 16)},
        {},
        ["num_qo_heads=(5, 2): must be a multiple of num_kv_heads; use 4"],
    ),
    "q_kv_dtype": (
        {"q": torch.zeros(2, 4, 16, dtype=torch.float16)},
        {},
        ["kv_dtype='float32': must equal q_dtype, or be float8_e4m3fn; use 'float16'"],
    ),
    "q_columns": (
        {"q": torch.zeros(2, 16, 4).transpose(1, 2)},
        {},
        ["q.stride=(64, 1, 4): the last axis must be contiguous", "use q.contiguous()"],
    ),
    "q_row_stride": (
        {"q": _off_row((2, 4, 16))},
        {},
        ["q.stride=(68, 17, 1): strides of axes [1] must be multiples of 16 bytes (4 elements)"],
    ),
    "q_base": (
        {"q": _misaligned((2, 4, 16))},
        {},
        ["q.data_ptr() % 16=4: the first element must lie on a multiple of 16 bytes; use q.clone"],
    ),
    "q_not_mergeable": (
        {"q": torch.zeros(2, 5, 4, 16)[:, :3]},
        {},
        [
            "q.stride=(320, 64, 16, 1): axes 0 and 1 must merge into one (stride[0] = 3 * stride"
            "[1] = 192); nothing is copied silently; use q.contiguous()"
        ],
    ),
    "q_gradient": (
        {"q": torch.zeros(2, 4, 16, requires_grad=True)},
        {},
        ["q.requires_grad=True: a serving call returns no gradient; use stream_attention.train"],
    ),
    "key_gradient": (
        {"key": torch.randn(8, 16, 2, 16, requires_grad=True)},
        {},
        ["key.requires_grad=True", "key.detach()"],
    ),
    "key_base": (
        {"key": _misaligned((8, 16, 2, 16))},
        {},
        ["key.data_ptr() % 16=4", "use key.clone()"],
    ),
    "cache_type": ({}, {"cache": "pages"}, ["cache='str': must be a PagedKVCache"]),
    "sm_scale_nan": ({}, {"sm_scale": NAN}, ["sm_scale=nan: must be a finite number", "use 0.25"]),
    "sm_scale_inf": ({}, {"sm_scale": math.inf}, ["sm_scale=inf: must be a finite number"]),
    "sm_scale_type": ({}, {"sm_scale": "1"}, ["sm_scale='1': must be a finite number"]),
    "window_negative": (
        {},
        {"window_left": -1},
        ["window_left=-1: must be None (off) or an int >= 0, inclusive; use None"],
    ),
    "window_type": ({}, {"window_left": 1.5}, ["window_left=1.5: must be None (off) or an int"]),
    "window_right_causal": (
        {},
        {"window_right": 4},
        ["window_right=4: a causal problem sees nothing to the right", "use None, or causal=False"],
    ),
    "cap_zero": (
        {},
        {"logits_soft_cap": 0.0},
        ["logits_soft_cap=0.0: must be None (off) or a fin"],
    ),
    "cap_nan": ({}, {"logits_soft_cap": NAN}, ["logits_soft_cap=nan: must be None (off)"]),
    "causal_type": ({}, {"causal": 1}, ["causal=1: must be a bool; use True"]),
    "sink_type": ({}, {"attn_sink": 0.5}, ["attn_sink='float': must be an fp32 tensor [4]"]),
    "sink_shape": (
        {},
        {"attn_sink": torch.zeros(2)},
        ["attn_sink.shape=(2,): must be [num_qo_heads]; use (4,)"],
    ),
    "sink_dtype": (
        {},
        {"attn_sink": torch.zeros(4, dtype=torch.float16)},
        ["attn_sink.dtype=torch.float16: must be torch.float32; use attn_sink.float()"],
    ),
    "sink_device": (
        {},
        {"attn_sink": torch.zeros(4, device="meta")},
        ["attn_sink.device='meta': must be q's device; use cpu"],
    ),
    "sink_nan": (
        {},
        {"attn_sink": torch.tensor([0.0, NAN, 0.0, math.inf])},
        ["attn_sink[1]=nan: query head 1: must be a finite logit", "attn_sink[3]=inf"],
    ),
    "out_type": ({}, {"out": 3}, ["out='int': must be a torch.Tensor"]),
    "out_shape": (
        {},
        {"out": torch.zeros(2, 4, 8)},
        ["out.shape=(2, 4, 8): must fit q; use (2, 4, 16)"],
    ),
    "out_dtype": (
        {},
        {"out": torch.zeros(2, 4, 16, dtype=torch.int32)},
        ["out.dtype=torch.int32: must be one of bfloat16, float16, float32; use torch.float32"],
    ),
    "out_device": (
        {},
        {"out": torch.zeros(2, 4, 16, device="meta")},
        ["out.device='meta': must be q's; use cpu"],
    ),
    "out_strides": (
        {},
        {"out": torch.zeros(4, 2, 16).transpose(0, 1)},
        ["out.stride=(16, 32, 1): must be contiguous"],
    ),
    "out_sparse": (
        {},
        {"out": torch.zeros(2, 4, 16).to_sparse()},
        ["out.layout=torch.sparse_coo: must be dense"],
    ),
    "lse_sparse": (
        {},
        {"lse": torch.zeros(2, 4).to_sparse(), "return_lse": True},
        ["lse.layout=torch.sparse_coo: must be dense"],
    ),
    "out_gradient": (
        {},
        {"out": torch.zeros(2, 4, 16, requires_grad=True)},
        ["out.requires_grad=True: an output is written in place"],
    ),
    "lse_alone": (
        {},
        {"lse": torch.zeros(2, 4)},
        ["return_lse=False: lse is given; use return_lse=True"],
    ),
    "lse_dtype": (
        {},
        {"lse": torch.zeros(2, 4, dtype=torch.float16), "return_lse": True},
        ["lse.dtype=torch.float16: must be torch.float32"],
    ),
    "mode": ({}, {"mode": "exact"}, ["mode='exact': must be one of", "use 'exact_native'"]),
    "length_negative": (
        {"sequence_lengths": _ints(33, -2)},
        {},
        ["sequence_lengths[1]=-2: request 1 must hold 0 … 64 tokens", "use 0"],
    ),
    "length_over_capacity": (
        {"sequence_lengths": _ints(65, 20)},
        {},
        [
            "sequence_lengths[0]=65: request 0 must hold 0 … 64 tokens "
            "(max_pages * page_size = 4 * 16 of the cache); use 64"
        ],
    ),
    "length_huge": ({"sequence_lengths": _ints(33, 2**31 - 1)}, {}, ["[1]=2147483647: request 1"]),
    "page_out_of_range": (
        {"page_table": _ints(0, 1, 8, -1, 4, 5, 6, 7).view(2, 4)},
        {},
        ["page_table[0, 2]=8: request 0, column 2: a page in use must be an id in 0 … 7; use 7"],
    ),
    "page_negative": (
        {"page_table": _ints(0, 1, 2, 3, -1, 5, 6, 7).view(2, 4)},
        {},
        ["page_table[1, 0]=-1: request 1, column 0: a page in use must be an id in 0 … 7; use 0"],
    ),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", CALLS)
def test_bad_call_is_refused_by_name(function, name):
    replaced, options, parts = CALLS[name]
    with pytest.raises(ValueError) as caught:
        _call(function, {**_tensors(), **replaced}, **options)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nested_tensors_are_refused_by_name(function):
    rows = torch.nested.nested_tensor([torch.zeros(4, 16)] * 2)
    with pytest.raises(ValueError, match=r"q\.layout='nested': must be dense; use torch\.nested"):
        _call(function, {**_tensors(), "q": rows})
    with pytest.raises(ValueError, match=r"attn_sink\.layout='nested': must be dense"):
        _call(function, _tensors(), attn_sink=rows)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_fault_is_in_one_message(function):
    bad = {"q": torch.zeros(3, 5, 16)}
    sink = torch.zeros(3)
    with pytest.raises(ValueError, match="5 faults") as caught:
        _call(function, {**_tensors(), **bad}, sm_scale=NAN, window_left=-1, attn_sink=sink)
    for name in ("q.shape", "attn_sink.shape", "num_qo_heads", "sm_scale", "window_left"):
        assert re.search(rf"^  {re.escape(name)}=", str(caught.value), re.MULTILINE)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_bad_mode_joins_the_other_faults(function):
    with pytest.raises(ValueError, match=r"mode='fast': must be one of") as caught:
        _call(function, {**_tensors(), "q": torch.zeros(2, 5, 16)}, mode="fast", sm_scale=NAN)
    assert "num_qo_heads=(5, 2)" in str(caught.value)
    assert "sm_scale=nan" in str(caught.value)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_arguments_come_before_a_mode_that_cannot_be_honoured(function):
    with pytest.raises(ValueError, match="sm_scale=nan"):
        _call(function, _tensors(), mode="seed_only_native", sm_scale=NAN)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_fault_of_the_contents_is_in_one_message(function):
    bad = {
        "page_table": _ints(0, 99, 2, 3, -1, 5, 6, 7).view(2, 4),
        "sequence_lengths": _ints(70, 20),
    }
    with pytest.raises(ValueError, match="3 faults") as caught:
        _call(function, {**_tensors(), **bad})
    for part in ("sequence_lengths[0]=70", "page_table[0, 1]=99", "page_table[1, 0]=-1"):
        assert part in str(caught.value)


def test_long_lists_of_faults_are_capped_and_counted():
    lens = torch.full((40,), 99, dtype=torch.int32)
    k = torch.zeros(40, 8, 2, 16)
    cache = ContiguousKVCache(key=k, value=k.clone(), sequence_lengths=lens)
    with pytest.raises(ValueError) as caught:
        stream_attn.decode(torch.zeros(40, 4, 16), cache)
    assert str(caught.value).count("must hold 0 … 8 tokens") == 8
    assert "sequence_lengths='40 faults': the first 8 are listed" in str(caught.value)


def test_faults_of_lists_per_head_name_the_head():
    tensors = _tensors()
    tensors["page_table"] = tensors["page_table"].unsqueeze(1).repeat(1, 2, 1)
    tensors["page_table"][1, 1, 0] = 50
    tensors["sequence_lengths"] = torch.tensor([[33, 99], [0, 1]], dtype=torch.int32)
    with pytest.raises(ValueError) as caught:
        _call("decode", tensors)
    assert "sequence_lengths[0, 1]=99: request 0, KV head 1 must hold" in str(caught.value)
    assert "page_table[1, 1, 0]=50: request 1, KV head 1, column 0" in str(caught.value)


def test_entries_that_are_not_in_use_are_never_looked_at():
    tensors = _tensors()
    tensors["page_table"] = _ints(0, 1, 2, -1, 4, 5, 2**30, -7).view(2, 4)
    out, _ = _call("decode", tensors)
    assert out.isfinite().all()


def test_validate_false_looks_at_no_contents():
    tensors = _tensors()
    tensors["sequence_lengths"] = _ints(65, -1)
    StreamAttnEngine().plan(tensors.pop("q"), PagedKVCache(**tensors), validate=False)


RAGGED = {
    "list": (
        [0, 1, 2],
        {},
        ["qo_indptr='list': must be an int32 tensor [2 + 1]", "torch.tensor(qo"],
    ),
    "int64": (
        torch.tensor([0, 1, 2]),
        {},
        ["qo_indptr.dtype=torch.int64: must be torch.int32; use qo_indptr.to(torch.int32)"],
    ),
    "short": (_ints(0, 2), {}, ["qo_indptr.shape=(2,): must be [batch + 1]; use (3,)"]),
    "device": (
        torch.zeros(3, dtype=torch.int32, device="meta"),
        {},
        ["qo_indptr.device='meta': must be q's device; use cpu"],
    ),
    "sparse": (
        _ints(0, 1, 2).to_sparse(),
        {},
        ["qo_indptr.layout=torch.sparse_coo: must be dense"],
    ),
    "strided": (_ints(0, 9, 1, 9, 2)[::2], {}, ["qo_indptr.stride=(2,): must be contiguous"]),
    "start": (_ints(1, 1, 2), {}, ["qo_indptr[0]=1: must be 0; use 0"]),
    "end": (
        _ints(0, 1, 3),
        {},
        ["qo_indptr[2]=3: must be total_q, the number of rows of q; use 2"],
    ),
    "descent": (
        _ints(0, 3, 2),
        {},
        ["qo_indptr[2]=2: request 1 starts at 3 and must end in 3 … 5 (offsets never descend"],
    ),
    "too_long": (
        _ints(0, 2, 2),
        {"max_qo_len": 1},
        ["qo_indptr[1]=2: request 0 starts at 0 and must end in 0 … 1", "max_qo_len = 1); use 1"],
    ),
    "max_zero": (_ints(0, 1, 2), {"max_qo_len": 0}, ["max_qo_len=0: must be at most total_qo_len"]),
    "max_large": (_ints(0, 1, 2), {"max_qo_len": 3}, ["max_qo_len=3: must be at most", "use 2"]),
    "max_type": (_ints(0, 1, 2), {"max_qo_len": "2"}, ["max_qo_len='2': must be an int >= 0"]),
}


@pytest.mark.parametrize("function", ["attention", "plan_attention"])
@pytest.mark.parametrize("name", RAGGED)
def test_bad_query_offsets_are_refused_by_name(function, name):
    indptr, options, parts = RAGGED[name]
    with pytest.raises(ValueError) as caught:
        _call(function, _tensors(), qo_indptr=indptr, **options)
    for part in parts:
        assert part in str(caught.value)


def test_packed_queries_have_rank_3():
    tensors = _tensors()
    tensors["q"] = torch.zeros(2, 1, 4, 16)
    with pytest.raises(ValueError, match=re.escape("q.shape=(2, 1, 4, 16): must be packed")):
        _call("attention", tensors, qo_indptr=_ints(0, 1, 2))


def test_max_qo_len_belongs_to_packed_queries():
    with pytest.raises(ValueError, match="max_qo_len=3: only queries packed by qo_indptr take one"):
        _call("attention", _tensors(), max_qo_len=3)


PAIRS = {
    "no_value": (
        torch.zeros(2, 8, 2, 16),
        None,
        ["v_cache=None: a key tensor comes with a value tensor; use v_cache=v, or"],
    ),
    "rank": (
        torch.zeros(2, 8, 32),
        torch.zeros(2, 8, 2, 16),
        ["k_cache.shape=(2, 8, 32): must ha"],
    ),
    "shapes": (
        torch.zeros(2, 8, 2, 16),
        torch.zeros(2, 9, 2, 16),
        ["v_cache.shape=(2, 9, 2, 16): must equal k_cache.shape (2, 8, 2, 16) on all but the last"],
    ),
    "dtypes": (
        torch.zeros(2, 8, 2, 16),
        torch.zeros(2, 8, 2, 16).half(),
        ["v_cache.dtype=torch.float16: must equal k_cache.dtype; use torch.float32"],
    ),
    "devices": (
        torch.zeros(2, 8, 2, 16),
        torch.zeros(2, 8, 2, 16, device="meta"),
        ["v_cache.device='meta': must be the device of k_cache; use cpu"],
    ),
    "int_cache": (
        torch.zeros(2, 8, 2, 16).int(),
        torch.zeros(2, 8, 2, 16).int(),
        ["k_cache.dtype=torch.int32: must be one of", "v_cache.dtype=torch.int32"],
    ),
    "columns": (
        torch.zeros(2, 8, 16, 2).transpose(2, 3),
        torch.zeros(2, 8, 2, 16),
        ["k_cache.stride=(256, 32, 1, 2): the last axis must be contiguous"],
    ),
    "heads": (torch.zeros(2, 8, 3, 16), torch.zeros(2, 8, 3, 16), ["num_qo_heads=(4, 3)", "use 3"]),
}


@pytest.mark.parametrize("function", ["decode", "plan"])
@pytest.mark.parametrize("name", PAIRS)
def test_bad_pairs_of_tensors_are_refused_by_name(function, name):
    key, value, parts = PAIRS[name]
    call = stream_attn.decode if function == "decode" else StreamAttnEngine().plan
    with pytest.raises(ValueError) as caught:
        call(torch.zeros(2, 4, 16), key, value)
    for part in parts:
        assert part in str(caught.value)


def test_a_cache_brings_its_own_values():
    tensors = _tensors()
    q = tensors.pop("q")
    with pytest.raises(ValueError, match="v_cache='Tensor': a cache object brings its own; use No"):
        stream_attn.decode(q, PagedKVCache(**tensors), q)


@pytest.mark.parametrize("other", ["q", "key", "value", "attn_sink"])
def test_an_output_that_overlaps_an_input_is_refused(other):
    tensors = _tensors()
    tensors["attn_sink"] = torch.zeros(64)
    memory = {"q": tensors["q"], "key": tensors["key"], "value": tensors["value"]}
    memory["attn_sink"] = torch.zeros(128)
    sink = memory["attn_sink"][:4]
    out = memory[other].view(-1)[:128].view(2, 4, 16)
    tensors.pop("attn_sink")
    with pytest.raises(ValueError, match=f"out='overlaps {other}': must have memory of its own"):
        _call("decode", tensors, out=out, attn_sink=sink)


def test_out_and_lse_do_not_overlap():
    memory = torch.zeros(128)
    out, lse = memory.view(2, 4, 16), memory[:8].view(2, 4)
    with pytest.raises(ValueError, match="lse='overlaps out'"):
        _call("decode", _tensors(), out=out, lse=lse, return_lse=True)


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_an_output_that_overlaps_a_scale_is_refused(name):
    tensors = _tensors()
    memory = torch.ones(128)
    for pool in ("key", "value"):
        tensors[pool] = tensors[pool].to(FP8)
    tensors[name] = memory[126:]
    with pytest.raises(ValueError, match=f"out='overlaps {name}'"):
        _call("decode", tensors, out=memory.view(2, 4, 16))
    assert memory.eq(1).all()


def test_scales_of_fp8_are_checked():
    tensors = _tensors()
    for name in ("key", "value"):
        tensors[name] = tensors[name].to(FP8)
    tensors["key_scale"] = torch.tensor([1.0, NAN])
    tensors["value_scale"] = torch.tensor([-1.0, 2.0])
    with pytest.raises(ValueError) as caught:
        _call("decode", tensors)
    for part in ("key_scale[1]=nan: must be finite and > 0; use 1.0", "value_scale[0]=-1.0"):
        assert part in str(caught.value)


CACHES = {
    "rank": ({"key": torch.zeros(8, 16, 32)}, ["key.shape=(8, 16, 32): must have rank 4"]),
    "layout": ({"layout": "BHND"}, ["layout='BHND': must be 'NHD' or 'HND'; use 'NHD'"]),
    "table_dtype": (
        {"page_table": torch.arange(8).view(2, 4)},
        ["page_table.dtype=torch.int64: must be torch.int32; use page_table.to(torch.int32)"],
    ),
    "table_rank": ({"page_table": _ints(1, 2)}, ["page_table.shape=(2,): must be [batch, max_pag"]),
    "table_device": (
        {"page_table": torch.zeros(2, 4, dtype=torch.int32, device="meta")},
        ["page_table.device='meta': must be the cache's device; use cpu"],
    ),
    "lens_shape": (
        {"sequence_lengths": _ints(1, 2, 3)},
        ["sequence_lengths.shape=(3,): must be [2]", "use (2,)"],
    ),
    "lens_type": ({"sequence_lengths": [1, 2]}, ["sequence_lengths='list': must be [2] int32"]),
    "page_size": (
        {"key": torch.zeros(8, 0, 2, 16), "value": torch.zeros(8, 0, 2, 16)},
        ["page_size=0: must be an int >= 1; use 16"],
    ),
    "scale_of_float": ({"key_scale": 2.0}, ["key_scale=2.0: scales belong to float8_e4m3fn K/V"]),
}


@pytest.mark.parametrize("name", CACHES)
def test_bad_caches_are_refused_by_name(name):
    replaced, parts = CACHES[name]
    tensors = _tensors()
    tensors.pop("q")
    with pytest.raises(ValueError) as caught:
        PagedKVCache(**{**tensors, **replaced})
    for part in parts:
        assert part in str(caught.value)


def test_a_misspelt_option_is_named():
    tensors = _tensors()
    q, cache = tensors.pop("q"), PagedKVCache(**tensors)
    for call in (stream_attn.decode, stream_attn.attention, StreamAttnEngine().plan):
        with pytest.raises(TypeError, match="unexpected keyword argument 'windw_left'"):
            call(q, cache, windw_left=3)
    batch = StreamAttnEngine().plan_batch
    for name in ("windw_left", "max_qo_len", "flags"):  # the last two are the plan's own
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; the nearest"):
            batch(q, cache, [1], **{name: 3})


def test_bad_calls_leave_inputs_and_later_calls_alone():
    tensors = _tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    out = torch.full((2, 4, 16), 7.0)
    with pytest.raises(ValueError, match="sm_scale"):
        _call("decode", dict(tensors), out=out, sm_scale=NAN)
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    assert (out == 7.0).all()
    first, _ = _call("decode", dict(tensors))
    with pytest.raises(ValueError, match="sequence_lengths"):
        _call("decode", {**tensors, "sequence_lengths": _ints(99, 0)})
    assert torch.equal(_call("decode", dict(tensors))[0], first)
