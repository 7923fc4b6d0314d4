"""What a run of sm90_decode hands to its one foreign call, without a GPU.

A C callback stands in for the kernel, so that arguments pass through ctypes as they do there; what
is asked of the CUDA runtime is counted.
"""

import copy
import ctypes
import dataclasses
import pickle
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


PARAMS_BYTES = ctypes.sizeof(decode.DecodeParams)
NOT_PREPARED = -109


class FakeLibrary:
    """The native library; a call that it prepared is the params and the number of SMs.

    calls: (params, num_sms, stream, scratch is empty) of each launch.
    """

    call_bytes = PARAMS_BYTES + 8

    def __init__(self):
        self.calls = []
        self.status = 0
        self.scratch = None
        self.refusal = 0
        prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
        self._callback = prototype(self._launched)

    def __getitem__(self, name):
        assert name == "stream_attention_decode"
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        return ctypes.CFUNCTYPE(ctypes.c_int32)(address)

    def _launched(self, address, stream):
        params = decode.DecodeParams.from_buffer_copy(ctypes.string_at(address, PARAMS_BYTES))
        num_sms = ctypes.c_int64.from_address(address + PARAMS_BYTES).value
        if num_sms == 0:
            return NOT_PREPARED
        empty = self.scratch is None or bool((self.scratch == EMPTY).all())
        self.calls.append((params, num_sms, stream or 0, empty))
        return self.status

    def stream_attention_decode_geometry(self, params, num_sms, geometry):
        form = geometry._obj
        form.scratch_floats, form.blocks_per_head = 64, 2
        form.grid, form.threads, form.shared_bytes = 4, 256, 1024
        return 0

    def stream_attention_decode_struct_bytes(self, which):
        assert which == decode.CALL_STRUCT
        return self.call_bytes

    def stream_attention_decode_prepare(self, params, num_sms, call, call_bytes):
        assert call_bytes == ctypes.sizeof(call._obj) == self.call_bytes
        address = ctypes.addressof(call._obj)
        ctypes.memmove(address, params, PARAMS_BYTES)
        prepared_for = 0 if self.refusal else num_sms
        ctypes.c_int64.from_address(address + PARAMS_BYTES).value = prepared_for
        return self.refusal

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


def test_a_refused_rebind_leaves_nothing_to_run(library, runtime):
    launch, bound = made(library)
    launch.run()
    library.refusal = -105
    with pytest.raises(NativeLaunchError, match=r"^stream_attention_decode_prepare: some reason"):
        launch.rebind(bound)
    with pytest.raises(NativeLaunchError, match=r"^stream_attention_decode: some") as caught:
        launch.run()
    assert caught.value.status == NOT_PREPARED
    library.refusal = 0
    launch.rebind(bound)
    launch.run()
    assert len(library.calls) == 2


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


def call_memory():
    """Memory of a call that was never prepared."""
    return (ctypes.c_char * decode.functions().stream_attention_decode_struct_bytes(2))()


def test_a_call_that_was_not_prepared_is_refused():
    """And so without a GPU: that arguments converted already reach the library is seen there."""
    require(LIBRARY)
    random = call_memory()
    random.raw = bytes(7 * i % 256 for i in range(len(random)))
    for call in (call_memory(), random):
        status = decode.launcher()(ctypes.byref(call), ctypes.c_void_p.from_param(STREAMS[1]))
        with pytest.raises(NativeLaunchError, match="call: must have been prepared") as caught:
            decode.check("stream_attention_decode", status)
        again = decode.functions().stream_attention_decode(ctypes.byref(call), STREAMS[1])
        assert caught.value.status == status == again == NOT_PREPARED


def test_no_call_at_all_is_refused():
    require(LIBRARY)
    with pytest.raises(NativeLaunchError, match="pointer is null"):
        decode.check("decode", decode.functions().stream_attention_decode(None, None))


def test_memory_that_cannot_hold_a_call_is_refused_and_left_alone():
    """Before the params are looked at: these would be refused for their shape."""
    require(LIBRARY)
    size = len(call_memory())
    memory = (ctypes.c_char * (size + 16))(*b"\1" * (size + 16))
    address = ctypes.addressof(memory)
    prepare = decode.functions().stream_attention_decode_prepare
    places = ((0, size - 1), (0, size + 1), (0, 0), (0, -1), (1, size), (4, size))
    for offset, call_bytes in places:
        status = prepare(decode.DecodeParams(), 132, address + offset, call_bytes)
        with pytest.raises(NativeLaunchError, match="call: must be aligned to 8 and as large as"):
            decode.check("prepare", status)
    with pytest.raises(NativeLaunchError, match="pointer is null"):
        decode.check("prepare", prepare(decode.DecodeParams(), 132, None, size))
    assert memory.raw == b"\1" * len(memory)
    status = prepare(decode.DecodeParams(), 132, address + 8, size)
    with pytest.raises(NativeLaunchError, match="batch, qo_len"):
        decode.check("prepare", status)


def test_params_that_are_refused_take_back_what_was_prepared():
    """Whatever the memory held of a call before, its first word is no longer a prepared call's."""
    require(LIBRARY)
    call = call_memory()
    call.raw = b"\1" * len(call)
    prepare = decode.functions().stream_attention_decode_prepare
    assert prepare(decode.DecodeParams(), 132, ctypes.byref(call), len(call)) != 0
    assert call.raw == bytes(8) + b"\1" * (len(call) - 8)
    status = decode.functions().stream_attention_decode(ctypes.byref(call), None)
    assert status == NOT_PREPARED


def test_sizes_of_what_the_library_takes():
    require(LIBRARY)
    measure = decode.functions().stream_attention_decode_struct_bytes
    assert measure(2) > PARAMS_BYTES and measure(2) % 8 == 0
    assert (measure(-1), measure(3)) == (-1, -1)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_launch_is_not_copied(library, runtime, copied):
    launch, _ = made(library)
    with pytest.raises(TypeError, match="DecodeLaunch: cannot be copied or pickled"):
        copied(launch)
