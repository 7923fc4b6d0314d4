"""Operators: opcheck, and decode steps under torch.compile that stay one graph and equal eager."""

import pytest
import torch
import torch._dynamo.testing

import stream_attention as stream_attn
from stream_attention import ContiguousKVCache, PagedKVCache, UnsupportedProblem
from stream_attention.planner.ops import attention_op, attention_out_op

TAIL = (False, True, "exact_native", None, None, None)  # batch_invariant … layer_id


def paged(seed=0, batch=3, layout="NHD", fp8=False):
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(2, 20, 16, 2, 16, generator=generator)
    if layout == "HND":
        pool = pool.transpose(2, 3).contiguous()
    if fp8:
        pool = pool.to(torch.float8_e4m3fn)
    table = torch.arange(4 * batch, dtype=torch.int32).view(batch, 4)
    return PagedKVCache(
        key=pool[0],
        value=pool[1],
        page_table=table,
        sequence_lengths=torch.arange(30, 30 + batch, dtype=torch.int32),
        layout=layout,
        key_scale=torch.tensor([0.5, 2.0]) if fp8 else None,
        value_scale=0.25 if fp8 else None,
    )


def op_arguments(cache, q, sink=None, qo_indptr=None):
    number = cache.value_scale
    return (
        q,
        cache.key,
        cache.value,
        cache.page_table,
        cache.sequence_lengths,
        cache.key_scale,
        None,
        qo_indptr,
        sink,
        cache.layout,
        None,
        number,
        None,
        0.25,
        True,
        5,
        None,
        30.0,
    )


def op_cases():
    offsets = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    return [
        op_arguments(paged(), torch.randn(3, 1, 4, 16)),
        op_arguments(paged(layout="HND"), torch.randn(3, 4, 16), sink=torch.randn(4)),
        op_arguments(paged(fp8=True), torch.randn(6, 4, 16), qo_indptr=offsets),
    ]


def opcheck(op, arguments):
    """All of torch's checks; its schema check cannot compare fp8 tensors and is left out there."""
    fp8 = any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in arguments)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"]
    torch.library.opcheck(op, arguments, test_utils=checks[1:] if fp8 else checks)


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("return_lse", [False, True])
def test_the_functional_operator_passes_opcheck(case, return_lse):
    opcheck(attention_op, (*op_cases()[case], return_lse, *TAIL))


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("with_lse", [False, True])
def test_the_operator_that_writes_passes_opcheck(case, with_lse):
    arguments = op_cases()[case]
    out = torch.zeros_like(arguments[0])
    lse = torch.zeros(out.shape[:-1]) if with_lse else None
    opcheck(attention_out_op, (out, lse, *arguments, *TAIL))


def test_fakes_tell_the_real_results():
    for arguments in op_cases():
        for return_lse in (False, True):
            real = attention_op(*arguments, return_lse, *TAIL)
            with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
                fake = attention_op(*arguments, return_lse, *TAIL)
            for got, want in zip(fake, real, strict=True):
                assert (got.shape, got.dtype) == (want.shape, want.dtype)
                assert got.stride() == want.stride()


def test_fake_tensors_go_through_the_operator():
    with torch._subclasses.FakeTensorMode():
        q, k, v = torch.empty(3, 4, 16), torch.empty(3, 9, 2, 16), torch.empty(3, 9, 2, 8)
        out, lse, info = stream_attn.decode(q, k, v, return_lse=True)
        assert (out.shape, lse.shape) == ((3, 4, 8), (3, 4))
        assert isinstance(out, torch._subclasses.FakeTensor)
    assert info.route


def test_export_keeps_one_operator():
    class Model(torch.nn.Module):
        def forward(self, q, key, value):
            return stream_attn.decode(q, key, value, return_info=False)

    inputs = torch.randn(3, 4, 16), torch.randn(3, 9, 2, 16), torch.randn(3, 9, 2, 16)
    program = torch.export.export(Model(), inputs)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any("stream_attn.attention" in target for target in targets)
    assert torch.equal(program.module()(*inputs), Model()(*inputs))


def step(q, cache, token, **options):
    """A decode step: append one token in place, then attend over the cache."""
    position = cache.sequence_lengths.long()
    rows = torch.arange(position.shape[0])
    page, slot = cache.page_table[rows, position // 16].long(), position % 16
    cache.key[page, slot] = token
    cache.value[page, slot] = token * 2
    cache.sequence_lengths.add_(1)
    return stream_attn.decode(q * 2, cache, **options)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def assert_same(got, want):
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(mine, theirs)
        else:
            for name in ("route", "backend_used", "guarantee", "arch", "fallback_reasons"):
                assert getattr(mine, name) == getattr(theirs, name)


@pytest.mark.parametrize(
    "options",
    [
        {"return_info": False},
        {},
        {"return_lse": True},
        {"return_lse": True, "return_info": False, "window_left": 7, "logits_soft_cap": 5.0},
        {"mode": "exact_native", "sm_scale": 0.5, "batch_invariant": True},
    ],
    ids=str,
)
def test_a_compiled_step_with_an_in_place_cache_write_equals_eager(options):
    mine, theirs = paged(), paged()
    function = compiled(step)
    for turn in range(3):
        torch.manual_seed(turn)
        q, token = torch.randn(3, 1, 4, 16), torch.randn(3, 2, 16)
        assert_same(function(q, mine, token, **options), step(q, theirs, token, **options))
        assert torch.equal(mine.key, theirs.key)
        assert torch.equal(mine.sequence_lengths, theirs.sequence_lengths)


def test_a_compiled_step_has_one_graph_and_no_break():
    def run(q, cache, token):
        return step(q, cache, token)

    torch._dynamo.reset()
    report = torch._dynamo.explain(run)(torch.randn(3, 1, 4, 16), paged(), torch.randn(3, 2, 16))
    assert report.graph_break_count == 0
    assert report.graph_count == 1


def test_a_cache_may_be_made_inside_the_compiled_function():
    def run(q, key, value, table, lens, token):
        key[0, 0].copy_(token)
        cache = PagedKVCache(key=key, value=value, page_table=table, sequence_lengths=lens)
        return stream_attn.decode(q, cache, return_lse=True)

    q, token = torch.randn(3, 1, 4, 16), torch.randn(2, 16)
    fields = ("key", "value", "page_table", "sequence_lengths")
    mine, theirs = ([getattr(paged(), name) for name in fields] for _ in range(2))
    assert_same(compiled(run)(q, *mine, token), run(q, *theirs, token))


def test_a_compiled_step_may_write_the_callers_outputs():
    def run(q, cache, out, lse):
        stream_attn.decode(q, cache, out=out, lse=lse, return_lse=True)
        return out + 1

    q, cache = torch.randn(3, 4, 16), paged()
    out, lse = torch.empty(3, 4, 16), torch.empty(3, 4)
    got = compiled(run)(q, cache, out, lse)
    want, want_lse, _ = stream_attn.decode(q, cache, return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    assert torch.equal(got, want + 1)


def test_compiled_fp8_contiguous_and_ragged_calls_equal_eager():
    fp8 = paged(fp8=True)
    q = torch.randn(3, 4, 16)
    assert_same(compiled(stream_attn.decode)(q, fp8), stream_attn.decode(q, fp8))
    k, v = torch.randn(3, 9, 2, 16), torch.randn(3, 9, 2, 8)
    assert_same(compiled(stream_attn.decode)(q, k, v), stream_attn.decode(q, k, v))
    cache = ContiguousKVCache(
        key=k, value=v, sequence_lengths=torch.tensor([9, 0, 4], dtype=torch.int32)
    )
    packed, offsets = torch.randn(6, 4, 16), torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    sink = torch.randn(4)
    options = {"attn_sink": sink, "return_lse": True}
    got = compiled(stream_attn.attention)(packed, cache, offsets, **options)
    assert_same(got, stream_attn.attention(packed, cache, offsets, **options))


def test_sizes_stay_symbolic_without_info():
    def run(q, cache):
        return stream_attn.decode(q, cache, return_info=False)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    function = torch.compile(run, fullgraph=True, backend=counter, dynamic=True)
    for batch in (3, 5):  # unlike any other size, which the compiler would take for the same
        q, cache = torch.randn(batch, 4, 16), paged(batch=batch)
        assert torch.equal(function(q, cache), run(q, cache))
    assert counter.frame_count == 1


def test_info_is_decided_for_each_batch_size():
    function = compiled(stream_attn.decode, dynamic=True)
    for batch in (3, 2):
        q, cache = torch.randn(batch, 4, 16), paged(batch=batch)
        assert_same(function(q, cache), stream_attn.decode(q, cache))


def test_info_says_that_it_was_decided_while_tracing():
    _, info = compiled(stream_attn.decode)(torch.randn(3, 4, 16), paged())
    assert "ranked while tracing" in info.reason


@pytest.mark.parametrize("return_info", [False, True])
def test_compiled_calls_raise_the_same_errors(return_info):
    def run(q, cache, **options):
        return stream_attn.decode(q, cache, return_info=return_info, **options)

    with pytest.raises(ValueError, match=r"num_qo_heads=\(5, 2\): must be a multiple"):
        compiled(run)(torch.randn(3, 5, 16), paged())
    with pytest.raises(ValueError, match="mode='exact': must be one of"):
        compiled(run)(torch.randn(3, 4, 16), paged(), mode="exact")
    with pytest.raises(UnsupportedProblem, match="no policy cell is installed"):
        compiled(run)(torch.randn(3, 4, 16), paged(), mode="seed_only_native")
    cache = paged()
    cache.sequence_lengths[1] = 99
    with pytest.raises(ValueError, match=r"sequence_lengths\[1\]=99: request 1 must hold"):
        compiled(run)(torch.randn(3, 4, 16), cache)


class Subclass(torch.Tensor):
    """A tensor that goes through the operator because torch may have more to do with it."""


BAD_KINDS = {
    "scale": ({"sm_scale": "1"}, "sm_scale='1': must be None or a number"),
    "cap": ({"logits_soft_cap": "1"}, "logits_soft_cap='1': must be None or a number"),
    "window": ({"window_left": 1.5}, "window_left=1.5: must be None or an int"),
    "window_size": ({"window_left": -(2**70)}, "must fit 64 bits here; use None"),
    "causal": ({"causal": None}, "causal=None: must be a bool"),
    "sink": ({"attn_sink": 0.5}, "attn_sink=0.5: must be None or a torch.Tensor"),
    "out": ({"out": 3}, "out=3: must be None or a torch.Tensor"),
    "lse": ({"lse": torch.zeros(3, 1, 4)}, "return_lse=False: lse is given; use return_lse=True"),
    "mode": ({"mode": 5}, "mode=5: must be one of"),
    "model": ({"model_id": 5}, "model_id=5: must be None or a non-empty string"),
    "layer": ({"layer_id": "0"}, "layer_id='0': must be None or an int >= 0"),
    "cache": ({"cache": "pages"}, "cache='str': must be a cache, or a key tensor beside v_cache"),
}


@pytest.mark.parametrize("name", BAD_KINDS)
def test_a_subclass_gets_the_errors_of_a_plain_tensor(name):
    options, part = BAD_KINDS[name]
    call = {"cache": paged(), "return_info": False, **options}
    with pytest.raises(ValueError) as caught:
        stream_attn.decode(torch.randn(3, 1, 4, 16).as_subclass(Subclass), **call)
    assert part in str(caught.value)


def test_a_compiled_call_takes_no_flag_for_another():
    def step(q):
        return stream_attn.decode(q, cache, causal=None, return_info=False)

    cache, q = paged(), torch.randn(3, 1, 4, 16)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="causal"):
        torch.compile(step, fullgraph=True, backend="eager")(q)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_cache_made_inside_keeps_batch_and_heads_symbolic(dynamic):
    def step(q, key, value, table, lens):
        cache = PagedKVCache(key=key, value=value, page_table=table, sequence_lengths=lens)
        return stream_attn.decode(q, cache, return_info=False)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic)
    for batch in (2, 3, 4, 5):
        cache = paged(batch=batch)
        q = torch.randn(batch, 4, 16)
        out = run(q, cache.key, cache.value, cache.page_table, cache.sequence_lengths)
        assert torch.equal(out, stream_attn.decode(q, cache, return_info=False))
    assert counter.frame_count <= 2
    with pytest.raises(ValueError, match=r"page_table.dtype=torch.int64: must be torch.int32"):
        run(q, cache.key, cache.value, cache.page_table.long(), cache.sequence_lengths)
