"""The reader of ptxas reports: names of kernels, numbers, and text that it refuses."""

import json

import ptxas_resources
import pytest

DECODE = (
    "_ZN16stream_attention13decode_kernelI13__nv_bfloat16S1_NS_11DecodeShapeILi128ELi8ELi2ELb0EEE"
    "Lb1EEEvNS_12DecodeLaunchE"
)
REPORT = f"""ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{DECODE}' for 'sm_90a'
ptxas info    : Function properties for {DECODE}
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 16 bytes cumulative stack size, 1024 bytes smem
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a_plain_name' for 'sm_90a'
ptxas info    : Function properties for a_plain_name
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 34 registers
"""


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        (
            DECODE,
            "decode_kernel<__nv_bfloat16, __nv_bfloat16, DecodeShape<128, 8, 2, false>, true>",
        ),
        (
            "_ZN16stream_attention13decode_kernelI6__halfhNS_11DecodeShapeILi64ELi16ELi1ELb1EEELb0EE"
            "EvNS_12DecodeLaunchE",
            "decode_kernel<__half, unsigned char, DecodeShape<64, 16, 1, true>, false>",
        ),
        (
            "_ZN16stream_attention17state_pair_kernelINS_4ArchELi2ELi0ELi8EEEv30StreamAttentionState"
            "PairParams28StreamAttentionStateGeometry",
            "state_pair_kernel<Arch, 2, 0, 8>",
        ),
        ("_ZN1a1fINS_1bIiEES2_NS_1cEEEvv", "a::f<a::b<int>, a::b<int>, a::c>"),
        ("_Z6kernelIfLin3EEvPT_", "kernel<float, -3>"),
        ("_Z6kernelPf", "kernel"),
        ("_Z6kernelI1AIiES1_EvT_", "kernel<A<int>, A<int>>"),
        ("a_plain_name", "a_plain_name"),
    ],
)
def test_names_are_read_as_cxxfilt_reads_them(mangled, name):
    assert ptxas_resources.readable(mangled) == name


@pytest.mark.parametrize(
    "mangled",
    ["_Z", "_Z9ab", "_ZN1a1fI", "_ZN1aIPiE1bE", "_ZN1fIS9_EEvv", "_ZN1fILiEEvv", "_Z1fIu"],
)
def test_names_that_are_not_understood_are_refused(mangled):
    with pytest.raises(ValueError, match=mangled):
        ptxas_resources.readable(mangled)


def test_numbers_of_every_kernel_are_read():
    decode, plain = ptxas_resources.parse(REPORT).values()
    assert decode == {
        "target": "sm_90a",
        "registers": 168,
        "barriers": 3,
        "stack_bytes": 16,
        "spill_bytes": 12,
        "shared_bytes": 1024,
    }
    assert (plain["registers"], plain["barriers"], plain["shared_bytes"]) == (34, 0, 0)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("", "names no kernel"),
        (REPORT.replace("Used 34 registers", ""), "not a report of ptxas"),
        (REPORT.replace("0 bytes spill loads", ""), "not a report of ptxas"),
        (REPORT.replace(" for 'sm_90a'", ""), "not a report of ptxas"),
        (REPORT + REPORT, "compiled twice"),
    ],
)
def test_text_of_another_kind_is_refused(report, message):
    with pytest.raises(ValueError, match=message):
        ptxas_resources.parse(report)


def test_the_program_writes_json_of_a_line_a_kernel_in_order(tmp_path):
    report, out = tmp_path / "report", tmp_path / "out.json"
    report.write_text(REPORT)
    assert ptxas_resources.main(["", str(report), str(out)]) == 0
    content = json.loads(out.read_text())
    assert content == {"format": 1, "kernels": ptxas_resources.parse(REPORT)}
    assert list(content["kernels"]) == sorted(content["kernels"])
    assert len(out.read_text().splitlines()) == 4


def test_the_program_fails_and_writes_nothing_for_a_report_it_does_not_know(tmp_path, capsys):
    report, out = tmp_path / "report", tmp_path / "out.json"
    report.write_text("no report")
    assert ptxas_resources.main(["", str(report), str(out)]) == 1
    assert not out.exists()
    assert "names no kernel" in capsys.readouterr().err
    assert ptxas_resources.main([""]) == 2
