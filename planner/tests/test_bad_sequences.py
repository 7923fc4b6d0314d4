"""Bad input to prefill and train: ValueError with parameter, value, rule, nearest choice."""

import math

import pytest
import torch

import stream_attention as stream_attn

NAN = math.nan

SEQUENCES = {
    "rank": (
        {"q": torch.zeros(3, 4, 16)},
        ["q.shape=(3, 4, 16): must be [batch, seq, heads, head"],
    ),
    "type": ({"k": None}, ["k='NoneType': must be a torch.Tensor"]),
    "batch": ({"q": torch.zeros(1, 3, 4, 16)}, ["q.shape=(1, 3, 4, 16): axis 0 must be"]),
    "head_dim": ({"q": torch.zeros(2, 3, 4, 8)}, ["the last axis must be the key's head_dim = 16"]),
    "group": ({"q": torch.zeros(2, 3, 5, 16)}, ["num_qo_heads=(5, 2): must be a multiple"]),
    "dtype": ({"q": torch.zeros(2, 3, 4, 16).double()}, ["q.dtype=torch.float64"]),
    "device": ({"q": torch.zeros(2, 3, 4, 16, device="meta")}, ["q.device='meta'"]),
    "scale": ({"sm_scale": NAN}, ["sm_scale=nan: must be a finite number"]),
    "sink": ({"attn_sink": torch.zeros(3)}, ["attn_sink.shape=(3,): must be [num_qo_heads]"]),
    "mode": ({"mode": "fast"}, ["mode='fast': must be one of"]),
    "mask_type": ({"attn_mask": [True]}, ["attn_mask='list': must be a torch.Tensor"]),
    "mask_dtype": (
        {"attn_mask": torch.zeros(3, 6, dtype=torch.int64)},
        ["attn_mask.dtype=torch.int64: must be torch.bool (True = seen)"],
    ),
    "mask_shape": (
        {"attn_mask": torch.zeros(3, 5, dtype=torch.bool)},
        ["attn_mask.shape=(3, 5): must broadcast to [batch, num_qo", "use (2, 4, 3, 6)"],
    ),
    "mask_sparse": (
        {"attn_mask": torch.zeros(3, 6).to_sparse()},
        ["attn_mask.layout=torch.sparse_coo: must be dense; use attn_mask.to_dense()"],
    ),
    "mask_device": (
        {"attn_mask": torch.zeros(3, 6, dtype=torch.bool, device="meta")},
        ["attn_mask.device='meta': must be q's device; use cpu"],
    ),
}


def _sequences():
    return {
        "q": torch.randn(2, 3, 4, 16),
        "k": torch.randn(2, 6, 2, 16),
        "v": torch.randn(2, 6, 2, 16),
    }


@pytest.mark.parametrize("function", [stream_attn.prefill, stream_attn.train])
@pytest.mark.parametrize("name", SEQUENCES)
def test_bad_sequences_are_refused_by_name(function, name):
    replaced, parts = SEQUENCES[name]
    with pytest.raises(ValueError) as caught:
        function(**{**_sequences(), **replaced})
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("function", [stream_attn.prefill, stream_attn.train])
def test_nested_sequences_are_refused_by_name(function):
    rows = torch.nested.nested_tensor([torch.zeros(6, 2, 16)] * 2)
    with pytest.raises(ValueError, match=r"k\.layout='nested': must be dense"):
        function(**{**_sequences(), "k": rows})


def test_prefill_validates_the_sink():
    sink = torch.tensor([0.0, NAN, 0.0, 0.0])
    with pytest.raises(ValueError, match=r"attn_sink\[1\]=nan: query head 1"):
        stream_attn.prefill(**_sequences(), attn_sink=sink)


def test_prefill_points_a_call_with_gradients_to_train():
    tensors = _sequences()
    tensors["k"].requires_grad_()
    with pytest.raises(ValueError, match=r"key.requires_grad=True.*use stream_attention\.train"):
        stream_attn.prefill(**tensors)


def test_prefill_refuses_to_drop_the_gradient_of_a_mask():
    mask = torch.zeros(3, 6, requires_grad=True)
    text = r"attn_mask\.requires_grad=True: a serving call returns no gradient; use stream_att"
    with pytest.raises(ValueError, match=text):
        stream_attn.prefill(**_sequences(), attn_mask=mask)
    with torch.no_grad():
        stream_attn.prefill(**_sequences(), attn_mask=mask)
    assert stream_attn.train(**_sequences(), attn_mask=mask).requires_grad


def test_prefill_validates_the_values_of_an_additive_mask():
    mask = torch.zeros(2, 1, 3, 6)
    mask[1, 0, 2, 3], mask[0, 0, 1, 4], mask[0, 0, 0, 0] = NAN, math.inf, -math.inf
    mask[0, 0, 0, 5] = NAN  # which a causal row does not see
    sink = torch.tensor([0.0, NAN, 0.0, 0.0])
    with pytest.raises(ValueError) as caught:
        stream_attn.prefill(**_sequences(), attn_mask=mask, attn_sink=sink)
    rule = "must be a finite number, or -inf for not seen"
    for part in ("[0, 0, 1, 4]=inf", "[1, 0, 2, 3]=nan"):
        assert f"attn_mask{part}: {rule}" in str(caught.value)
    assert str(caught.value).count("attn_mask[") == 2
    assert "attn_sink[1]=nan: query head 1" in str(caught.value)
    with pytest.raises(ValueError, match=r"attn_mask='15 faults': the first 8 are listed"):
        stream_attn.prefill(**_sequences(), attn_mask=torch.full((3, 6), NAN))
    stream_attn.prefill(**_sequences(), attn_mask=mask, validate=False)


@pytest.mark.parametrize(
    ("shape", "at"),
    [((), ()), ((6,), (0,)), ((2, 1, 1, 1), (1, 0, 0, 0)), ((1, 1, 3, 1), (0, 0, 2, 0))],
)
@pytest.mark.parametrize("causal", [True, False])
def test_a_value_of_a_broadcast_mask_is_named_where_it_is(shape, at, causal):
    mask = torch.zeros(shape)
    mask[at] = NAN
    with pytest.raises(ValueError) as caught:
        stream_attn.prefill(**_sequences(), attn_mask=mask, causal=causal)
    assert str(caught.value).count("attn_mask") == 1
    assert f"attn_mask{list(at)}=nan" in str(caught.value)


def test_a_mask_of_no_request_is_seen_by_nobody():
    of = {name: tensor[:0] for name, tensor in _sequences().items()}
    assert stream_attn.prefill(**of, attn_mask=torch.full((3, 6), NAN)).shape == (0, 3, 4, 16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("qo_len", [1, 3])
def test_a_mask_over_no_keys_is_seen_by_nobody(qo_len, causal):
    q, k = torch.randn(2, qo_len, 4, 16), torch.zeros(2, 0, 2, 16)
    options = {"causal": causal, "return_lse": True, "return_info": False}
    out, lse = stream_attn.prefill(q, k, k, attn_mask=torch.full((qo_len, 1), NAN), **options)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((2, qo_len, 4), -math.inf))


def test_a_mask_may_hold_anything_where_nothing_is_seen():
    hidden, of = torch.zeros(3, 6), _sequences()
    hidden[0, 4:], hidden[1, 5] = NAN, math.inf
    for options in ({"attn_mask": hidden}, {"attn_mask": hidden, "window_left": 2}):
        clean = {**options, "attn_mask": torch.zeros(3, 6)}
        got, want = (stream_attn.prefill(**of, **each) for each in (options, clean))
        assert torch.equal(got, want)


AT_ONCE = [
    ({"dropout_p": 2, "sm_scale": "x"}, ["dropout_p=2: must be in [0, 1)", "sm_scale='x'"]),
    (
        {"generator": 3, "sm_scale": "x", "attn_mask": 3, "mode": "fast"},
        ["generator='int'", "sm_scale='x'", "attn_mask='int'", "mode='fast'"],
    ),
    (
        {"q": torch.zeros(3, 4, 16), "window_left": -1, "dropout_p": 1.0},
        ["q.shape=(3, 4, 16)", "window_left=-1", "dropout_p=1.0"],
    ),
    (
        {"attn_mask": torch.zeros(3, 5), "attn_sink": torch.zeros(3), "causal": 1},
        ["attn_mask.shape=(3, 5)", "attn_sink.shape=(3,)", "causal=1: must be a bool"],
    ),
]


@pytest.mark.parametrize(("replaced", "parts"), AT_ONCE)
def test_train_names_every_fault_at_once(replaced, parts):
    with pytest.raises(ValueError) as caught:
        stream_attn.train(**{**_sequences(), **replaced})
    for part in parts:
        assert str(caught.value).count(part) == 1, caught.value


@pytest.mark.parametrize("value", [1.0, -0.1, NAN, "0.5"])
def test_train_refuses_bad_dropout(value):
    with pytest.raises(ValueError, match=rf"dropout_p={value!r}: must be in \[0, 1\)"):
        stream_attn.train(**_sequences(), dropout_p=value)


def test_train_refuses_a_bad_generator():
    with pytest.raises(ValueError, match=r"generator='int': must be None or a torch\.Generator"):
        stream_attn.train(**_sequences(), generator=3)
