"""What a run of sm90_decode hands to its one foreign call, without a GPU.

A C callback stands in for the kernel, so that arguments pass through ctypes as they do there; what
is asked of the CUDA runtime is counted.
"""

import ctypes
import dataclasses
import types

import pytest
import torch

from stream_attention.core.native import NativeLaunchError
from stream_attention.core.testing.checks import H200, bind
from stream_attention.core.testing.native_library import require
from stream_attention.core.testing.problems import Case, build
from stream_attention.kernels_sm90 import decode
from stream_attention.kernels_sm90.library import LIBRARY

# Above 32 bits, and with the top bit of an address set: what a default conversion would cut.
STREAMS = (0, 0x7F12_3456_9ABC_DEF0, 0xFFFF_8000_0000_0008)

EMPTY = -1


class FakeLibrary:
    """The native library. calls: (params, num_sms, stream, scratch is empty) of each launch."""

    def __init__(self):
        self.calls = []
        self.status = 0
        self.scratch = None
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p
        )
        self._callback = prototype(self._launched)

    def __getitem__(self, name):
        assert name == "stream_attention_decode"
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        return ctypes.CFUNCTYPE(ctypes.c_int32)(address)

    def _launched(self, address, num_sms, stream):
        params = decode.DecodeParams.from_buffer_copy(
            (ctypes.c_char * ctypes.sizeof(decode.DecodeParams)).from_address(address)
        )
        empty = self.scratch is None or bool((self.scratch == EMPTY).all())
        self.calls.append((params, num_sms, stream or 0, empty))
        return self.status

    def stream_attention_decode_geometry(self, params, num_sms, geometry):
        form = geometry._obj
        form.scratch_floats, form.blocks_per_head = 64, 2
        form.grid, form.threads, form.shared_bytes = 4, 256, 1024
        return 0

    def stream_attention_decode_prepare(self, params, num_sms):
        return 0

    def stream_attention_decode_error_string(self, status):
        return b"some reason"


class FakeRuntime:
    """The current stream, whether it is captured, and how often either is asked for."""

    def __init__(self):
        self.stream = 0
        self.capturing = False
        self.asked = {"stream": 0, "capturing": 0, "synchronize": 0, "wait_event": 0}

    def current_raw_stream(self, index):
        assert index == H200.index
        self.asked["stream"] += 1
        return self.stream

    def is_capturing(self):
        self.asked["capturing"] += 1
        return self.capturing

    def synchronize(self):
        self.asked["synchronize"] += 1

    def wait_event(self, event):
        assert event.recorded
        self.asked["wait_event"] += 1


class FakeEvent:
    """Stands in for `torch.cuda.Event`."""

    recorded = False

    def record(self, stream):
        self.recorded = True


class NoDevice:
    """Stands in for `torch.cuda.device`."""

    def __init__(self, index):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


@pytest.fixture
def runtime(monkeypatch):
    fake = FakeRuntime()
    stream = types.SimpleNamespace(synchronize=fake.synchronize, wait_event=fake.wait_event)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    name = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, name, fake.current_raw_stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fake.is_capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    monkeypatch.setattr(torch.cuda, "device", NoDevice)
    return fake


@pytest.fixture
def library(monkeypatch):
    fake = FakeLibrary()
    monkeypatch.setattr(decode, "functions", lambda: fake)
    return fake


def made(library):
    """A launch over CPU memory, and the memory."""
    built = build(Case(qo_lens=(1,) * 2, kv_lens=(300, 17), call="batch"), 0)
    described = bind(built)
    launch = decode.DecodeLaunch(described.problem, H200, described.bound)
    library.scratch = launch._scratch
    return launch, described.bound


def test_a_run_is_one_call_over_the_bound_memory_on_the_current_stream(library, runtime):
    launch, bound = made(library)
    runtime.stream = STREAMS[1]
    launch.run()
    ((params, num_sms, stream, _),) = library.calls
    assert (num_sms, stream) == (H200.num_sms, STREAMS[1])
    assert (params.q, params.key, params.value, params.out) == tuple(
        t.data_ptr() for t in (bound.q, bound.kv.key, bound.kv.value, bound.out)
    )
    assert params.scratch == launch._scratch.data_ptr()
    assert (params.batch, params.capacity) == (2, bound.kv.capacity)


def test_a_run_follows_the_current_stream(library, runtime):
    launch, _ = made(library)
    order = [STREAMS[i] for i in (0, 0, 1, 1, 2, 0, 1, 2, 2)]
    for runtime.stream in order:
        launch.run()
    assert [stream for _, _, stream, _ in library.calls] == order


def test_two_launches_keep_their_streams_apart(library, runtime):
    first, second = made(library)[0], made(library)[0]
    for launch, runtime.stream in ((first, STREAMS[1]), (second, STREAMS[2]), (first, STREAMS[1])):
        launch.run()
    assert [stream for _, _, stream, _ in library.calls] == [STREAMS[i] for i in (1, 2, 1)]


def test_a_run_after_a_rebind_is_over_the_other_memory(library, runtime):
    launch, bound = made(library)
    launch.run()
    launch.unbind()
    other = dataclasses.replace(bound, q=bound.q.clone(), out=bound.out.clone())
    launch.rebind(other)
    launch.run()
    launch.rebind(bound)
    launch.run()
    assert [(params.q, params.out) for params, *_ in library.calls] == [
        (memory.q.data_ptr(), memory.out.data_ptr()) for memory in (bound, other, bound)
    ]


@pytest.mark.parametrize("status", [1, -3])
def test_a_status_is_an_error_of_that_run_alone(library, runtime, status):
    launch, _ = made(library)
    library.status = status
    with pytest.raises(NativeLaunchError, match=r"^stream_attention_decode: some reason") as caught:
        launch.run()
    assert caught.value.status == status
    library.status = 0
    launch.run()
    assert len(library.calls) == 2


def test_a_run_asks_the_runtime_for_the_stream_alone(library, runtime):
    launch, _ = made(library)
    launch.run()
    before = dict(runtime.asked)
    for _ in range(3):
        launch.run()
    assert runtime.asked == before | {"stream": before["stream"] + 3}


def test_the_first_run_outside_a_capture_waits_for_the_fill_and_the_host_never(library, runtime):
    launch, _ = made(library)
    for runtime.capturing, waited in ((True, 0), (True, 0), (False, 1), (False, 1), (True, 1)):
        launch.run()
        assert (runtime.asked["wait_event"], runtime.asked["synchronize"]) == (waited, 0)


def test_a_workspace_made_during_a_capture_is_filled_once_before_the_first_run_outside(
    library, runtime
):
    runtime.capturing = True
    launch, _ = made(library)
    assert runtime.asked["synchronize"] == 0
    launch._scratch.zero_()  # a fill that is captured has not happened
    launch.run()
    runtime.capturing = False
    launch.run()
    launch._scratch.zero_()
    before = dict(runtime.asked)
    launch.run()
    assert [empty for *_, empty in library.calls] == [False, True, False]
    assert before["synchronize"] == 1
    assert runtime.asked == before | {"stream": before["stream"] + 1}


def test_a_reset_waits_except_during_a_capture(library, runtime):
    launch, _ = made(library)
    waited = runtime.asked["synchronize"]
    for runtime.capturing, more in ((False, 1), (True, 1)):
        launch._scratch.zero_()
        launch.reset()
        assert bool((launch._scratch == EMPTY).all())
        assert runtime.asked["synchronize"] == waited + more


def test_the_library_takes_arguments_that_are_converted_already():
    """It refuses the dtype before it asks for a GPU, so that params and status are seen to pass."""
    require(LIBRARY)
    params = decode.DecodeParams(dtype=7)
    arguments = (
        ctypes.byref(params),
        ctypes.c_int32.from_param(132),
        ctypes.c_void_p.from_param(STREAMS[1]),
    )
    status = decode.launcher()(*arguments)
    with pytest.raises(NativeLaunchError, match=r"dtype: must be 1 \(float16\)") as caught:
        decode.check("stream_attention_decode", status)
    assert (
        caught.value.status
        == status
        == decode.functions().stream_attention_decode(ctypes.byref(params), 132, STREAMS[1])
    )
