"""The command: flags and their errors, a tiny run from end to end, its exit status."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from absl import flags

from stream_attention.bench import contenders, paged_decode, results
from stream_attention.bench.results import Row
from stream_attention.bench.suites import SUITES
from stream_attention.bench.timing import Timing

TINY = ["--batch=2", "--lengths=40,17", "--num_qo_heads=4", "--num_kv_heads=2", "--head_dim=16"]
QUICK = ["--device=cpu", "--warm", "--replays=3"]


def parsed(*arguments):
    values = flags.FlagValues()
    paged_decode.define_flags(values)
    rest = values(["paged_decode", *arguments])
    return rest, values


def run(capsys, *arguments):
    rest, values = parsed(*arguments)
    status = paged_decode.main(rest, values)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--batch=0", r"flag --batch=0: must be an int >= 1; use 1"),
        ("--batch=many", r"flag --batch=many: must be an int >= 1; use 8"),
        ("--batch=2147483648", r"must be an int in 1..1048576; use 1048576"),
        ("--threads=99999999999", r"must be an int in 1..\d+; use \d+"),
        ("--seed=18446744073709551616", r"must be an int in 0..2147483647; use 2147483647"),
        ("--lengths=lognormal:5:1e9:0", r"SIGMA=1e9 must be in 0..10; use 10"),
        ("--page_size=-1", r"flag --page_size=-1: must be an int >= 1; use 1"),
        ("--layout=nhd", r"flag --layout=nhd: must be one of NHD, HND; use NHD"),
        ("--dtype=bf17", r"flag --dtype=bf17: must be one of .*; use bf16"),
        ("--lengths=skew", r"flag --lengths=skew: must be one of: .*; use skewed"),
        ("--kv_dtype=fp9", r"flag --kv_dtype=fp9: must be one of .*; use fp8"),
        ("--cache=pagd", r"flag --cache=pagd: must be one of paged, contiguous; use paged"),
        ("--capacity=0", r"flag --capacity=0: must be an int >= 1; use 1"),
        ("--capacity=wide", r"flag --capacity=wide: must be an int >= 1; use 4096"),
        ("--suite=raged", r"flag --suite=raged: must be one of .*; use ragged"),
    ],
)
def test_a_bad_flag_names_flag_value_rule_and_nearest(argument, message):
    with pytest.raises(flags.IllegalFlagValueError, match=message):
        parsed(argument)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_qo_heads=30"], "must be a multiple of num_kv_heads; use 24"),
        (["--batch=3", "--lengths=1,2"], "has 2 values, one a request is needed for batch=3"),
        (["--suite=ragged", "--head_dim=64"], "so --head_dim cannot be given too"),
        (["--suite=ragged", "--batch_invariant"], "so --batch_invariant cannot be given too"),
        (["--kv_dtype=bf16"], "kv_dtype='bfloat16': must be None (dtype), dtype itself or"),
        (["--lengths=100", "--capacity=64"], "not below the longest length"),
        (["--cache=contiguous", "--page_size=8"], "a contiguous cache has no pages; use the"),
        (["--routes=torhc"], "--routes='torhc': must be 'all', 'none' or names out of"),
        (["--routes=none", "--peers=none"], "nothing to run; use --routes=all"),
        (["extra"], "argument 'extra': only flags are taken"),
        (["--json="], "--json='': must name a file"),
        (["--resume"], "--resume: needs the file to go on with; use --json=FILE"),
        (
            ["--peer_paths=sdpa=/"],
            "--peer_paths: needs a process for each contender; use --isolate",
        ),
        (["--peer_paths=x=/", "--isolate"], "must begin the name of a contender of this run"),
        (["--paired=torch:trch"], "--paired='trch': must name a contender out of"),
    ],
)
def test_a_bad_combination_is_one_line_and_status_2(capsys, arguments, message):
    status, out, err = run(capsys, "--device=cpu", *arguments)
    assert status == 2 and out == ""
    assert message in err and err.startswith("paged_decode: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_cuda_without_a_device_is_refused(capsys):
    status, _, err = run(capsys, "--device=cuda")
    assert status == 2 and "--device=cuda: no CUDA device is available to torch here" in err
    assert err.rstrip().endswith("use cpu")
    hint = "STREAM_ATTENTION_TORCH=cuda" in err
    assert hint == (torch.version.cuda is None)


def test_shape_flags_make_one_case_with_defaults_of_the_device():
    empty = dict.fromkeys(paged_decode.SHAPE_FLAGS)
    (case,) = paged_decode.chosen_cases({**empty, "head_dim": 64}, None, "cuda")
    assert (case.name, case.num_rows) == ("B8 N4K 32/8 D64 NHD bf16", 8)
    (case,) = paged_decode.chosen_cases({**empty, "page_size": 1}, None, "cpu")
    assert case.dtype == "float32" and case.page_size == 1
    assert paged_decode.chosen_cases(empty, None, "cpu") == SUITES["small_cpu"]
    assert paged_decode.chosen_cases(empty, "ragged", "cpu") == SUITES["ragged"]


def test_flags_set_the_form_of_the_cache():
    _, values = parsed("--kv_dtype=fp8", "--cache=contiguous", "--capacity=8192")
    shape = {name: getattr(values, name) for name in paged_decode.SHAPE_FLAGS}
    (case,) = paged_decode.chosen_cases(shape, None, "cuda")
    assert case.name == "B8 N4K 32/8 D128 NHD bf16 kv-fp8 contiguous cap8K"
    _, values = parsed("--batch_invariant", "--kv_dtype=bf16")
    shape = {name: getattr(values, name) for name in paged_decode.SHAPE_FLAGS}
    (case,) = paged_decode.chosen_cases(shape, None, "cuda")
    assert case.name == "B8 N4K 32/8 D128 NHD bf16 invariant"


def test_a_list_of_lengths_sets_the_batch():
    _, values = parsed("--lengths=5,6,7")
    shape = {name: getattr(values, name) for name in paged_decode.SHAPE_FLAGS}
    (case,) = paged_decode.chosen_cases(shape, None, "cpu")
    assert case.batch == 3 and case.kv_lens == (5, 6, 7)


def test_a_tiny_run_times_routes_and_peers_and_writes_samples(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    status, out, err = run(capsys, *QUICK, *TINY, "--json=run.json")
    assert status == 0, out + err
    assert "floor   plain read:" in out and "commit " in out
    assert "(1/1) B2 40,17 4/2 D16 NHD fp32" in err
    found = results.from_json(json.loads((tmp_path / "run.json").read_text()))
    (case,) = found.cases
    rows = {row.contender: row for row in case.rows}
    for name in ("torch", "engine", "sdpa_gather", "sdpa_gather_packed"):
        assert rows[name].outcome == "ok", rows[name]
        assert rows[name].timing.n == 3 and rows[name].check.rows_checked == 2
        assert name in out
    assert rows["triton"].outcome == "unsupported"
    assert rows["engine"].note == "torch"
    assert found.settings["replays"] == 3 and found.environment.threads == torch.get_num_threads()


def test_a_tiny_fp8_run_of_a_wide_table_reads_back(capsys, tmp_path):
    path = tmp_path / "run.json"
    flags_given = ["--kv_dtype=fp8", "--capacity=131072", "--routes=torch", f"--json={path}"]
    status, out, err = run(capsys, *QUICK, *TINY, *flags_given)
    assert status == 0, out + err
    (case,) = results.from_json(json.loads(path.read_text())).cases
    assert case.case.name == "B2 40,17 4/2 D16 NHD fp32 kv-fp8 cap128K"
    assert case.kv_bytes == 57 * 2 * 2 * 16
    rows = {row.contender: row.outcome for row in case.rows}
    assert rows["torch"] == rows["sdpa_gather"] == "ok"


def test_a_run_of_two_forms_ends_with_their_ratio(capsys, monkeypatch):
    _, values = parsed(*TINY, "--dtype=fp32")
    shape = {name: getattr(values, name) for name in paged_decode.SHAPE_FLAGS}
    (plain,) = paged_decode.chosen_cases(shape, None, "cpu")
    row = dataclasses.replace(plain, cache="contiguous")
    monkeypatch.setitem(SUITES, "small_cpu", (plain, row))
    status, out, _ = run(capsys, *QUICK, "--suite=small_cpu", "--routes=torch", "--peers=none")
    assert status == 0
    before, _, after = out.partition("summary of torch")
    assert plain.name in before and f"{row.name} " in after
    assert "geometric mean  torch: " in after and " over 2 cases" in after


def test_named_routes_and_peers_only(capsys, tmp_path):
    path = tmp_path / "run.json"
    status, _, _ = run(
        capsys, *QUICK, *TINY, "--routes=torch", "--peers=none", "--nocheck", f"--json={path}"
    )
    (case,) = results.from_json(json.loads(path.read_text())).cases
    assert status == 0
    assert [row.contender for row in case.rows] == ["torch"] and case.rows[0].check is None


def test_only_our_own_broken_routes_fail_the_run():
    class Fake:
        def __init__(self, *rows):
            self.cases = (self,)
            self.rows = rows
            self.pairs = ()

    broken = ("failed", ("why",))
    timed = Row("b", "peer", "ok", (), Timing((1.0,), "cpu_warm"))
    assert paged_decode.exit_status(Fake(timed, Row("a", "peer", *broken))) == 0
    assert paged_decode.exit_status(Fake(timed, Row("a", "route", "unsupported", ("why",)))) == 0
    assert paged_decode.exit_status(Fake(timed, Row("a", "route", *broken))) == 1
    assert paged_decode.exit_status(Fake(timed, Row("a", "route", "wrong", ("why",)))) == 1
    assert paged_decode.exit_status(Fake(Row("a", "route", *broken))) == 1
    assert paged_decode.exit_status(Fake(Row("a", "route", "unsupported", ("why",)))) == 3
    assert paged_decode.exit_status(Fake(Row("a", "peer", *broken))) == 3
    slow = Row("a", "peer", "wrong", ("implausible",), timed.timing)
    assert paged_decode.exit_status(Fake(slow)) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device serves the route")
def test_a_run_that_times_nothing_ends_with_3_and_says_so(capsys):
    status, out, err = run(capsys, *QUICK, *TINY, "--routes=triton", "--peers=none")
    assert status == 3 and "triton: unsupported: " in out
    assert "paged_decode: nothing was measured: no contender was timed in any case" in err


def test_a_run_whose_only_case_is_skipped_ends_with_3(capsys):
    huge = ["--batch=1", "--lengths=2147483647", "--routes=torch", "--peers=none"]
    status, out, err = run(capsys, *QUICK, *huge)
    assert status == 3 and "skipped: lengths=" in out and "nothing was measured" in err


def test_a_peer_with_the_name_of_a_route_is_refused(capsys, monkeypatch):
    registry = contenders.load_peers()
    usurper = contenders.Contender("torch", "peer", lambda case, pools, device: [])
    monkeypatch.setitem(registry.peers, "torch", usurper)
    status, out, err = run(capsys, *QUICK, *TINY)
    assert (status, out) == (2, "")
    assert "name='torch': a contender of that name is registered; rename it" in err


def test_a_module_of_contenders_that_fails_to_import_ends_the_run(capsys, monkeypatch, tmp_path):
    (tmp_path / "broken_peers.py").write_text("raise RuntimeError('no driver')\n")
    monkeypatch.syspath_prepend(tmp_path)
    named = "--contender_modules=broken_peers,absent_peers"
    status, out, err = run(capsys, *QUICK, *TINY, named)
    assert (status, out) == (2, "")
    for name, why in (("broken", "RuntimeError: no driver"), ("absent", "ModuleNotFoundError")):
        assert f"--contender_modules='{name}_peers': must be a module that imports; {why}" in err


def test_the_module_runs_as_a_program_without_matplotlib():
    program = (
        "import sys; import stream_attention.bench.paged_decode, stream_attention.bench.host_cost; "
        "assert 'matplotlib' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=child_environment())
    done = subprocess.run(
        [sys.executable, "-m", "stream_attention.bench.paged_decode", "--batch=0"],
        capture_output=True,
        text=True,
        env=child_environment(),
    )
    assert done.returncode == 2
    assert "flag --batch=0: must be an int >= 1; use 1" in done.stderr


def test_help_shows_the_flags():
    done = subprocess.run(
        [sys.executable, "-m", "stream_attention.bench.paged_decode", "--help"],
        capture_output=True,
        text=True,
        env=child_environment(),
    )
    assert done.returncode == 0 and done.stderr == ""
    names = ("--batch", "--lengths", "--[no]isolate", "--json")
    for name in (*names, "--kv_dtype", "--cache", "--peer_paths", "--[no]batch_invariant"):
        assert f"  {name}:" in done.stdout


def child_environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def test_limits_of_isolated_workers_are_those_of_the_flags():
    values = flags.FlagValues()
    paged_decode.define_flags(values)
    given = ["--device=cpu", "--isolate", "--case_seconds=1", "--start_seconds=2"]
    job = paged_decode.resolve(values(["paged_decode", *given, "--warm_up_seconds=3"]), values)
    limits = job.isolation
    found = (limits.case_seconds, limits.start_seconds, limits.warm_up_seconds)
    assert found == (1.0, 2.0, 3.0)
