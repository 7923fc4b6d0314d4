"""A sink is checked alike wherever one is taken, in the words of who takes it."""

import pytest
import torch

from stream_attention import reference
from stream_attention.core import state
from stream_attention.core.describe import describe
from stream_attention.core.errors import Faults
from stream_attention.core.sink_checks import require_fp32_sink, require_sink

Q, K = torch.zeros(2, 4, 16), torch.zeros(2, 5, 2, 16)
CALLS = {
    "call": lambda sink: describe(Q, K, v_cache=K, attn_sink=sink),
    "merge": lambda sink: state.merge_many(torch.zeros(3, 4, 16), torch.zeros(3, 4), sink),
    "oracle": lambda sink: reference.attention(Q, (K, K), attn_sink=sink),
}
CPU = torch.device("cpu")
WORDS = {"kind": "must be one", "axes": "must be [3]", "place": "must be here"}


def texts(sink, shape=(3,), device=CPU):
    faults = Faults()
    held = require_fp32_sink(faults, sink, shape=shape, device=device, **WORDS)
    return held, [str(fault) for fault in faults]


def test_no_sink_is_no_fault_and_nothing_to_look_at():
    assert texts(None) == (False, [])


def test_a_sink_that_fits_has_no_fault():
    assert texts(torch.zeros(3)) == (True, [])
    assert texts(torch.zeros(7, device="meta"), None, None) == (True, [])


def test_another_kind_is_named_in_the_words_given():
    assert texts([0.0]) == (False, ["attn_sink='list': must be one; use None"])
    faults = Faults()
    assert not require_sink(faults, 0.5, "must be [3]", (3,))
    assert [str(fault) for fault in faults] == ["attn_sink='float': must be [3]; use (3,)"]


def test_form_and_place_are_named_at_once():
    assert texts(torch.zeros(2, 2, dtype=torch.float64, device="meta")) == (
        True,
        [
            "attn_sink.dtype=torch.float64: must be torch.float32; use attn_sink.float()",
            "attn_sink.shape=(2, 2): must be [3]; use (3,)",
            "attn_sink.device='meta': must be here; use cpu",
        ],
    )
    assert texts(torch.zeros(()), ())[1] == ["attn_sink.shape=(): must be [3]"]


KINDS = {
    "call": "must be an fp32 tensor [4] of logits; use None",
    "merge": "must be a torch.float32 tensor [num_heads]; use None",
    "oracle": "must be a dense tensor [4] of logits on q's device; use (4,)",
}


@pytest.mark.parametrize("taker", CALLS)
def test_a_list_is_no_sink(taker):
    with pytest.raises(ValueError) as caught:
        CALLS[taker]([0.0] * 4)
    assert str(caught.value).partition(": ")[2] == f"attn_sink='list': {KINDS[taker]}"


@pytest.mark.parametrize("taker", CALLS)
@pytest.mark.parametrize("bad", [torch.zeros(4).to_sparse(), torch.zeros(3), torch.zeros(1, 4)])
def test_a_sink_of_another_form_is_refused(taker, bad):
    with pytest.raises(ValueError, match="attn_sink"):
        CALLS[taker](bad)
