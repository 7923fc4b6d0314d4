"""sm90_decode on its GPU: a launch goes to the stream that is current, and errors come back.

What a run hands to its foreign call is tested without a GPU in test_decode_launch.py.
"""

import ctypes
import threading

import pytest
import torch

from stream_attention.core.native import NativeLaunchError
from stream_attention.core.testing.checks import launch
from stream_attention.core.testing.native_library import require
from stream_attention.core.testing.problems import Case, build
from stream_attention.kernels_sm90 import decode
from stream_attention.kernels_sm90.library import LIBRARY

DEVICE = "cuda"
CASE = Case(qo_lens=(1,) * 3, kv_lens=(700, 0, 33), spare=0, call="batch", num_qo_heads=8)
# About 10 ms: longer than any launch here takes to reach a stream that is free.
DELAY_CYCLES = 20_000_000
# Of a prepared call: behind the mark, the driver's function and the kernel, of 8 bytes each.
GRID_WORD = 6


@pytest.fixture(autouse=True)
def library():
    require(LIBRARY)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


class Bound:
    """A launch, two contents of its q, and the output bits of each with the device to itself."""

    def __init__(self):
        self.built = build(CASE, 0, DEVICE)
        self.step, self.described = launch(decode.RECORD, self.built)
        self.out = self.described.bound.out
        self.queries = [torch.randn_like(self.built.q) for _ in range(2)]
        self.expected = []
        for queries in self.queries:
            self.built.q.copy_(queries)
            self.step.run()
            torch.cuda.synchronize()
            self.expected.append(self.out.clone())
        assert not torch.equal(*self.expected)

    def late(self, which):
        """On the current stream: wait, write q, run; a run on another stream reads the old q."""
        self.built.q.copy_(self.queries[1 - which])
        self.out.fill_(float("nan"))
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY_CYCLES)
        self.built.q.copy_(self.queries[which])
        self.step.run()
        torch.cuda.synchronize()
        assert torch.equal(self.out, self.expected[which])


def streams():
    """The default stream, two of torch's, one of high priority and one that torch does not own."""
    own, other, urgent = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    foreign = torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)
    return [torch.cuda.default_stream(), own, other, urgent, foreign]


def test_one_launch_follows_the_current_stream():
    bound = Bound()
    known = streams()
    for turn, index in enumerate((0, 1, 1, 2, 0, 3, 4, 1, 0)):
        with torch.cuda.stream(known[index]):
            bound.late(turn % 2)


def test_a_capture_leaves_the_launch_on_the_stream_of_the_next_run():
    """The capture is of another stream; the runs after it are not."""
    bound = Bound()
    bound.late(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound.step.run()
    for which in (1, 0):
        bound.late(which)
        bound.built.q.copy_(bound.queries[1 - which])
        bound.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bound.out, bound.expected[1 - which])


def test_a_thread_has_a_current_stream_of_its_own():
    bound = Bound()
    stream, failures = torch.cuda.Stream(), []

    def work(which):
        try:
            with torch.cuda.stream(stream):
                bound.late(which)
        except Exception as error:
            failures.append(error)

    for which in (1, 0):
        thread = threading.Thread(target=work, args=(which,))
        thread.start()
        thread.join()
        bound.late(which)
    assert not failures


def test_a_thread_that_never_used_cuda_may_run():
    """Without a context of its own, and without a stream or device set: on the default stream."""
    bound = Bound()
    assert bound.step._index == 0
    failures = []

    def work():
        try:
            for _ in range(3):
                bound.step.run()
        except Exception as error:
            failures.append(error)

    for which in (1, 0):
        bound.built.q.copy_(bound.queries[which])
        bound.out.fill_(float("nan"))
        torch.cuda.synchronize()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        assert not failures
        assert torch.equal(bound.out, bound.expected[which])


def test_a_refusal_of_the_library_is_an_error_and_the_next_run_is_right():
    bound = Bound()
    prepared = bound.step._prepared
    kept, prepared.raw = prepared.raw, bytes(len(prepared))
    with pytest.raises(NativeLaunchError, match=r"^stream_attention_decode: call: must have been"):
        bound.step.run()
    prepared.raw = kept
    bound.late(0)


def test_a_refusal_of_the_driver_is_an_error_of_that_run_alone():
    """Here for a grid of no blocks."""
    bound = Bound()
    prepared = bound.step._prepared
    kept, words = prepared.raw, (ctypes.c_uint32 * (len(prepared) // 4)).from_buffer(prepared)
    words[GRID_WORD] = 0
    with pytest.raises(NativeLaunchError, match=r"^stream_attention_decode: invalid argument"):
        bound.step.run()
    prepared.raw = kept
    torch.cuda.synchronize()  # raises where an error stayed behind
    bound.late(0)


def test_a_copy_of_a_prepared_call_is_as_good():
    """It holds no address of itself, and its first memory may be gone."""
    bound = Bound()
    prepared = bound.step._prepared
    copy = (ctypes.c_char * len(prepared)).from_buffer_copy(prepared)
    prepared.raw = bytes(len(prepared))
    bound.step._prepared, bound.step._reference = copy, ctypes.byref(copy)
    bound.step._call = (None, ())
    bound.late(1)
