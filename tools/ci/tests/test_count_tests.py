import json
import subprocess
import sys

import count_tests
import pytest

CASES = {
    "passed": "<testcase name='a'/>",
    "failed": "<testcase name='b'><failure/></testcase>",
    "error": "<testcase name='c'><error/></testcase>",
    "skipped": "<testcase name='d'><skipped/></testcase>",
}


@pytest.fixture
def run(tmp_path):
    """Makes events with reports: run(label=["passed", ...]) and counts them."""

    def make(status="PASSED", **reports):
        events = []
        for label, cases in reports.items():
            path = tmp_path / f"{label} x.xml"
            if cases is not None:
                body = "".join(CASES[case] for case in cases)
                path.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
            uri = path.as_uri()
            key = {"testResult": {"label": f"//:{label}", "shard": 1, "run": 1}}
            result = {"status": status, "testActionOutput": [{"name": "test.xml", "uri": uri}]}
            events.append({"id": key, "testResult": result})
        return events

    return make


def test_cases_of_all_reports_are_added(run):
    events = run(a=["passed", "passed", "skipped"], b=["passed", "failed", "error"])
    counts, sentences = count_tests.count_events(events)
    assert counts == (3, 2, 1)
    assert sentences == ["//:b (shard 1): 2 failed"]


def test_a_target_that_left_no_report_is_one_failure(run):
    counts, sentences = count_tests.count_events(run(a=None))
    assert counts == (0, 1, 0)
    assert "no readable report" in sentences[0]


def test_a_time_out_is_a_failure_though_all_reported_cases_passed(run):
    counts, sentences = count_tests.count_events(run(status="TIMEOUT", a=["passed"]))
    assert counts == (1, 1, 0)
    assert sentences == ["//:a (shard 1): ended as TIMEOUT"]


def test_a_target_that_was_not_built_is_one_failure(run):
    events = run(a=["passed"])
    events.append({"id": {"targetCompleted": {"label": "//:b"}}, "completed": {}})
    events.append({"id": {"targetCompleted": {"label": "//:c"}}, "completed": {"success": True}})
    counts, sentences = count_tests.count_events(events)
    assert counts == (1, 1, 0)
    assert sentences == ["//:b: not built"]


def test_the_last_attempt_of_a_flaky_test_counts(run):
    counts, _ = count_tests.count_events(run(a=["failed"]) + run(a=["passed"]))
    assert counts == (1, 0, 0)


@pytest.mark.parametrize(("first", "last"), [("failed", "passed"), ("passed", "failed")])
def test_of_two_attempts_with_a_report_each_the_last_counts(run, tmp_path, first, last):
    earlier = run(a=[first])
    report = tmp_path / "a x.xml"
    report.rename(tmp_path / "first.xml")
    (output,) = earlier[0]["testResult"]["testActionOutput"]
    output["uri"] = (tmp_path / "first.xml").as_uri()
    counts, _ = count_tests.count_events(earlier + run(a=[last]))
    assert counts == ((1, 0, 0) if last == "passed" else (0, 1, 0))


@pytest.mark.parametrize(
    ("counts", "exit_code", "shown", "code"),
    [
        ((5, 0, 1), 0, (5, 0, 1), 0),
        ((5, 1, 0), 3, (5, 1, 0), 3),
        ((5, 1, 0), 0, (5, 1, 0), 1),
        ((0, 0, 0), 0, (0, 0, 0), 1),
        ((0, 0, 7), 0, (0, 0, 7), 1),
        ((5, 0, 0), 1, (5, 1, 0), 1),
    ],
)
def test_verdict(counts, exit_code, shown, code):
    assert count_tests.verdict(count_tests.Counts(*counts), exit_code) == (shown, code)


def test_program_prints_one_line_and_ends_with_its_verdict(run, tmp_path):
    events = tmp_path / "events.json"
    events.write_text("\n".join(map(json.dumps, run(a=["passed"], b=["skipped"]))))
    half = tmp_path / "half.json"
    half.write_text(events.read_text() + '\n{"id": {"test')
    for path, exit_code, line, code in [
        (half, 37, "1 passed, 1 failed, 1 skipped\n", 37),
        (events, 0, "1 passed, 0 failed, 1 skipped\n", 0),
        (events, 8, "1 passed, 1 failed, 1 skipped\n", 8),
        (tmp_path / "none.json", 1, "0 passed, 1 failed, 0 skipped\n", 1),
    ]:
        command = [sys.executable, count_tests.__file__, f"--exit-code={exit_code}", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.stdout, done.returncode) == (line, code)


@pytest.mark.parametrize("line", ["[" * 100_000, "3", "[]", "{", '{"id": ' * 100_000])
def test_a_line_that_is_no_event_ends_the_events(tmp_path, line):
    path = tmp_path / "events.json"
    path.write_text(f'{{"id": {{}}}}\n{line}\n')
    assert count_tests.read_events(path) == [{"id": {}}]
