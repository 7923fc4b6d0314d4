import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import lock
import pytest
import pytest_main

THREE_TESTS = """
import os
import pytest

@pytest.mark.parametrize("i", range(5))
def test_many(i):
    assert os.environ["OMP_NUM_THREADS"] == "1"

def test_home():
    assert os.environ["HOME"] == os.environ["TEST_TMPDIR"]
    assert os.environ["TRITON_CACHE_DIR"].startswith(os.environ["TEST_TMPDIR"])
"""


@pytest.fixture
def run(tmp_path):
    """Runs pytest_main on one file; gives (exit code, {outcome: number}, stdout)."""

    def start(text, *flags, **variables):
        folder = tmp_path / "case"
        folder.mkdir(exist_ok=True)
        (folder / "test_it.py").write_text(text)
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        report = tmp_path / "report.xml"
        report.unlink(missing_ok=True)
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "TEST_TMPDIR": str(scratch),
            "XML_OUTPUT_FILE": str(report),
            **variables,
        }
        done = subprocess.run(
            [sys.executable, pytest_main.__file__, *flags, "test_it.py"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        counts = {"passed": 0, "failure": 0, "error": 0, "skipped": 0}
        if report.exists():
            for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
                counts[case[0].tag if len(case) else "passed"] += 1
        return done.returncode, {k: v for k, v in counts.items() if v}, done.stdout

    return start


def test_tests_run_in_the_locked_venv():
    import numpy

    assert numpy.__file__.startswith(sys.prefix + os.sep)


def test_report_and_environment(run):
    assert run(THREE_TESTS)[:2] == (0, {"passed": 6})


def test_a_failure_fails_the_target(run):
    assert run("def test_a():\n    assert 0\n")[:2] == (1, {"failure": 1})


def test_a_file_without_tests_fails_the_target(run):
    assert run("x = 1\n")[0] == 5


def test_a_module_that_skips_itself_is_reported_as_skipped(run):
    text = 'import pytest\npytest.skip("no CUDA device", allow_module_level=True)\n'
    code, counts, stdout = run(text)
    assert (code, counts) == (0, {"skipped": 1})
    assert "no CUDA device" in stdout


def test_shards_run_every_test_once(run, tmp_path):
    status = tmp_path / "status"
    total = 0
    for index in range(4):
        status.unlink(missing_ok=True)
        code, counts, _ = run(
            THREE_TESTS,
            TEST_TOTAL_SHARDS="4",
            TEST_SHARD_INDEX=str(index),
            TEST_SHARD_STATUS_FILE=str(status),
        )
        assert code == 0
        assert status.exists()
        total += counts["passed"]
    assert total == 6


def test_an_empty_shard_passes(run):
    code, counts, _ = run("def test_a(): pass\n", TEST_TOTAL_SHARDS="2", TEST_SHARD_INDEX="1")
    assert (code, counts) == (0, {})


def test_filter_selects_by_name(run):
    assert run(THREE_TESTS, TESTBRIDGE_TEST_ONLY="home")[:2] == (0, {"passed": 1})
    assert run(THREE_TESTS, TESTBRIDGE_TEST_ONLY="no_such_test")[:2] == (0, {})


def test_gpu_tests_are_skipped_with_a_reason_where_there_is_no_gpu(run):
    code, counts, stdout = run(THREE_TESTS, "--gpu=sm90", CUDA_VISIBLE_DEVICES="")
    assert (code, counts) == (0, {"skipped": 6})
    assert "needs a CUDA device: torch.cuda.is_available() is False" in stdout


@pytest.mark.parametrize(
    ("wanted", "accepted"),
    [("any", [7, 8, 9, 10, 12]), ("sm80", [8, 9, 10, 12]), ("sm90", [9]), ("sm100", [10])],
)
def test_each_architecture_accepts_its_devices(wanted, accepted):
    majors = [7, 8, 9, 10, 12]
    assert [m for m in majors if pytest_main.ARCH_ACCEPTS[wanted](m)] == accepted


def test_lock_gives_one_line_and_all_hashes_for_a_version_that_all_interpreters_share():
    rows = {version: [("a", "1.0", "aa"), ("torch", "2", "cc")] for version in lock.PYTHONS}
    rows["3.10"] = [("a", "0.9", "bb")]
    text = lock.render("cpu", rows, ["why"])
    assert '\na==0.9 ; python_version == "3.10" \\\n    --hash=sha256:bb\n' in text
    assert 'a==1.0 ; python_version == "3.11" or python_version == "3.12"' in text
    # pip must fail where the lock has no torch, and not leave it out.
    assert "\ntorch==2 \\\n    --hash=sha256:cc\n" in text
    assert "# why\n" in text


def test_lock_keeps_versions_by_interpreter(tmp_path):
    path = pathlib.Path(tmp_path, "a.lock")
    path.write_text(
        'a==1 ; python_version == "3.10" \\\n    --hash=sha256:0\nb==2 \\\ntorch==2 \\\n'
    )
    assert lock.kept_versions(path, "3.10") == ["a==1", "b==2"]
    assert lock.kept_versions(path, "3.11") == ["b==2"]
