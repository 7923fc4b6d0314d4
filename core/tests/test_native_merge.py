"""Bound merges without a kernel library: what fills the struct, what `run` calls, what is bad."""

import copy
import pickle
import types

import pytest
import torch

import stream_attention
from stream_attention.core import native_merge, registry
from stream_attention.core.device import DeviceFacts
from stream_attention.core.native import (
    DEPENDENT_LAUNCH,
    MergeGeometry,
    NativeLaunchError,
    StateMergeParams,
    StatePairParams,
)
from stream_attention.core.native_merge import MergeLaunch, merge_record

DEVICE = DeviceFacts(type="cpu", num_sms=7)


class FakeLibrary:
    """Records foreign calls in place of making them."""

    def __init__(self, status=0, reason=None):
        self.calls = []
        self.status = status
        self._reason = reason
        self.handle = types.SimpleNamespace(
            stream_attention_state_merge=self._launch, stream_attention_state_pair=self._launch
        )

    def _launch(self, reference, num_sms, stream):
        self.calls.append((reference._obj, num_sms, stream))
        return self.status

    def reason(self):
        return self._reason

    def geometry(self, params, num_sms):
        return MergeGeometry(1, 32, 1, 4, 16, 16, 0)

    def check(self, function, status):
        if status:
            raise NativeLaunchError(function, status, "text")


@pytest.fixture(name="on_gpu")
def on_gpu_fixture(monkeypatch):
    """Device 0 is current and its current stream is 4711."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 4711, raising=False)


def states(num_states=3, rows=5, head_dim=64, dtype=torch.float32):
    parts = torch.randn(num_states, rows, head_dim).to(dtype)
    return parts, torch.randn(num_states, rows), torch.empty(rows, head_dim, dtype=dtype)


def fields_of(params):
    return {name: getattr(params, name) for name, _ in params._fields_}


def test_run_is_one_call_with_the_filled_struct_on_the_current_stream(on_gpu):
    library = FakeLibrary()
    parts, lse_parts, _ = states()
    out, lse = torch.empty(5, 80, dtype=torch.bfloat16)[:, :64], torch.empty(5)
    sink = torch.zeros(2)
    MergeLaunch(library, parts, lse_parts.T.contiguous().T, out, lse, sink, device=DEVICE).run()
    ((params, num_sms, stream),) = library.calls
    assert (num_sms, stream) == (7, 4711)
    assert isinstance(params, StateMergeParams)
    got = fields_of(params)
    for name, tensor in (("out_parts", parts), ("out", out), ("lse", lse), ("attn_sink", sink)):
        assert got.pop(name) == tensor.data_ptr()
    assert got.pop("lse_parts") != 0
    assert got == {
        "parts_state_stride": 320,
        "parts_row_stride": 64,
        "lse_state_stride": 1,
        "lse_row_stride": 3,
        "out_row_stride": 80,
        "rows": 5,
        "num_states": 3,
        "head_dim": 64,
        "num_heads": 2,
        "parts_dtype": 0,
        "out_dtype": 2,
        "flags": 0,
    }


def test_pair_fills_both_addresses(on_gpu):
    library = FakeLibrary()
    parts, lse_parts, out = states(num_states=2, dtype=torch.float16)
    launch = MergeLaunch(
        library, tuple(parts), tuple(lse_parts), out, dependent=True, device=DEVICE
    )
    launch.run(stream=12)
    ((params, _, stream),) = library.calls
    assert stream == 12
    assert isinstance(params, StatePairParams)
    got = fields_of(params)
    for name, tensor in (
        ("out_a", parts[0]),
        ("out_b", parts[1]),
        ("lse_a", lse_parts[0]),
        ("lse_b", lse_parts[1]),
    ):
        assert got[name] == tensor.data_ptr()
    assert (got["lse"], got["attn_sink"], got["num_heads"]) == (None, None, 0)
    assert (got["rows"], got["head_dim"], got["parts_dtype"], got["out_dtype"]) == (5, 64, 1, 1)
    assert got["flags"] == DEPENDENT_LAUNCH


def test_rebind_moves_the_addresses(on_gpu):
    library = FakeLibrary()
    first, second = states(), states()
    launch = MergeLaunch(library, *first, device=DEVICE)
    launch.rebind(*second)
    launch.run()
    assert library.calls[0][0].out == second[2].data_ptr()


def test_refused_launch_raises_with_its_status(on_gpu):
    launch = MergeLaunch(FakeLibrary(status=209), *states(), device=DEVICE)
    with pytest.raises(NativeLaunchError, match="stream_attention_state_merge: text") as caught:
        launch.run()
    assert caught.value.status == 209


def _bad(**changes):
    parts, lse_parts, out = states()
    arguments = {"out_parts": parts, "lse_parts": lse_parts, "out": out}
    arguments.update(changes)
    return arguments


F32 = torch.float32
BAD = [
    (_bad(out=torch.empty(5)), r"out.shape=\(5,\): must be \[rows, head_dim\]"),
    (_bad(out=torch.empty(5, 513)), "head_dim=513: must be 1..512"),
    (_bad(out_parts=torch.empty(3, 4, 64)), r"out_parts.shape=\(3, 4, 64\): must be \(3, 5, 64\)"),
    (_bad(lse_parts=torch.empty(5, 3)), r"lse_parts.shape=\(5, 3\): must be \(3, 5\)"),
    (_bad(lse=torch.empty(4)), r"lse.shape=\(4,\): must be \(5,\)"),
    (_bad(attn_sink=torch.empty(0)), r"attn_sink.shape=\(0,\): must be \[num_heads\]"),
    (_bad(out_parts=torch.empty(3, 5, 64).double()), "out_parts.dtype='float64': must be one of"),
    (_bad(out=torch.empty(5, 64).int()), "out.dtype='int32': must be one of"),
    (_bad(lse_parts=torch.empty(3, 5).half()), "lse_parts.dtype='float16': must be fp32"),
    (_bad(attn_sink=torch.empty(2).double()), "attn_sink.dtype='float64': must be fp32"),
    (_bad(out_parts=torch.empty(3, 64, 5).mT), r"out_parts.stride\(-1\)=5: must be 1"),
    (_bad(out=torch.empty(64, 5).T), r"out.stride\(-1\)=5: must be 1"),
    (_bad(lse=torch.empty(10)[::2]), r"lse.stride\(\)=\(2,\): must be contiguous"),
    (_bad(lse=torch.empty(5, device="meta")), "lse.device='meta': must be cpu"),
    (_bad(lse_parts=tuple(torch.empty(2, 5))), "must both be tensors"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_tensor_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        MergeLaunch(FakeLibrary(), **arguments, device=DEVICE)


def test_all_faults_come_at_once():
    parts, lse_parts, out = states()
    with pytest.raises(ValueError, match="merge: 3 faults") as caught:
        MergeLaunch(FakeLibrary(), parts.double(), lse_parts.half(), out, torch.empty(6))
    for fault in ("lse.shape=(6,)", "out_parts.dtype='float64'", "lse_parts.dtype='float16'"):
        assert fault in str(caught.value)


def test_parts_of_two_dtypes_are_refused():
    parts, lse_parts, out = states(num_states=2)
    with pytest.raises(ValueError, match=r"out_parts\.dtype.*must be equal"):
        MergeLaunch(FakeLibrary(), (parts[0], parts[1].half()), tuple(lse_parts), out)


def problem(**changes):
    fields = {"num_states": 3, "head_dim": 64, "part_dtype": "float32", "out_dtype": "float16"}
    return registry.MergeProblem(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"part_dtype": "float64"}, "part_dtype='float64': state kernels take float32"),
        ({"out_dtype": "float8_e4m3fn"}, "out_dtype='float8_e4m3fn': state kernels take float32"),
    ],
)
def test_record_rejects_dtypes_by_name(changes, reason):
    record = merge_record("x", "package", FakeLibrary(), lambda device: None)
    assert record.reasons(problem(), DEVICE) == ()
    (got,) = record.reasons(problem(**changes), DEVICE)
    assert got.startswith(reason)


def test_record_gives_the_reasons_of_library_and_device_together():
    library = FakeLibrary(reason="not built")
    record = merge_record("x", "package", library, lambda device: "device=cpu: no")
    assert record.reasons(problem(), DEVICE) == ("not built", "device=cpu: no")


def test_record_builds_a_launch():
    record = merge_record("x", "package", FakeLibrary(), lambda device: None)
    parts, lse_parts, out = states()
    assert isinstance(record.build(parts, lse_parts, out, None, None), native_merge.MergeLaunch)


def test_package_of_the_latest_architecture_is_asked_first(tmp_path, monkeypatch):
    for name in ("kernels_sm80", "kernels_sm100", "kernels_sm90", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.setattr(stream_attention, "__path__", [str(tmp_path)])
    found = registry._kernel_packages()
    assert found == ("kernels_sm100", "kernels_sm90", "kernels_sm80")


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_bound_merge_is_not_copied(made):
    parts, lses, out = states()
    launch = MergeLaunch(FakeLibrary(), parts, lses, out, device=DEVICE)
    with pytest.raises(TypeError, match="MergeLaunch: cannot be copied or pickled"):
        made(launch)
