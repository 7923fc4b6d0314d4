"""Counts the test cases of one Bazel run: python3 count_tests.py --exit-code=N EVENTS.json

Reads the run's build-event file and the test.xml files that it names (those of earlier runs lie
in bazel-testlogs too). Prints "N passed, N failed, N skipped" on stdout, what failed on stderr, and
ends with 0 only if Bazel did, at least one test passed, and none failed. A target that could not be
built, timed out or left no report is one failed test.

Standard library only: CI runs it with the system's Python.
"""

import argparse
import collections
import json
import pathlib
import sys
import urllib.parse
import xml.etree.ElementTree


class Counts(collections.namedtuple("Counts", ["passed", "failed", "skipped"])):
    """Numbers of test cases."""

    __slots__ = ()

    def plus(self, other):
        """The sum, field by field."""
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


def count_report(path):
    """Counts in one test.xml; a report that cannot be read counts as one failure."""
    try:
        root = xml.etree.ElementTree.parse(path).getroot()
    except (OSError, xml.etree.ElementTree.ParseError) as error:
        return Counts(0, 1, 0), f"no readable report: {error}"
    passed = failed = skipped = 0
    for case in root.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Counts(passed, failed, skipped), ""


def report_path(result):
    """Path of the test.xml that one test result names, or None."""
    for output in result.get("testActionOutput", ()):
        if output.get("name") == "test.xml":
            uri = urllib.parse.urlparse(output.get("uri", ""))
            if uri.scheme == "file":
                return pathlib.Path(urllib.parse.unquote(uri.path))
    return None


def latest_results(events):
    """(label, shard, run) → the result of the last attempt."""
    results = {}
    for event in events:
        if "testResult" in event:
            key = event["id"]["testResult"]
            name = (key["label"], key.get("shard", 1), key.get("run", 1))
            results[name] = event["testResult"]
    return results


def count_events(events):
    """(counts, sentences about what failed) of a whole run."""
    total, sentences = Counts(0, 0, 0), []
    seen = set()
    for (label, shard, _), result in sorted(latest_results(events).items()):
        seen.add(label)
        path = report_path(result)
        counts, reason = count_report(path) if path else (Counts(0, 1, 0), "left no report")
        status = result.get("status", "NO_STATUS")
        if status not in ("PASSED", "FLAKY") and not counts.failed:
            # A crash after the last report, or a time-out.
            counts, reason = counts._replace(failed=1), f"ended as {status}"
        if counts.failed:
            sentences.append(f"{label} (shard {shard}): {reason or f'{counts.failed} failed'}")
        total = total.plus(counts)
    for event in events:
        key = event.get("id", {}).get("targetCompleted")
        if key and key["label"] not in seen and not event.get("completed", {}).get("success"):
            seen.add(key["label"])
            sentences.append(f"{key['label']}: not built")
            total = total._replace(failed=total.failed + 1)
    return total, sentences


def read_events(path):
    """The events of a build-event JSON file, one a line; none where Bazel did not get that far.

    A Bazel that was killed leaves half a line at the end: the run has failed, and the rest counts.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    events = []
    for line in filter(None, lines):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(event, dict):
            break
        events.append(event)
    return events


def verdict(counts, exit_code):
    """(counts to show, exit code to end with)."""
    if exit_code and not counts.failed:
        # Bazel failed before or beside the tests: loading, analysis, a crash.
        counts = counts._replace(failed=1)
    if counts.failed:
        return counts, exit_code or 1
    return counts, 0 if counts.passed else 1


def main():
    """Entry point."""
    parser = argparse.ArgumentParser(description="Count the test cases of one Bazel run.")
    parser.add_argument("--exit-code", type=int, required=True, help="what Bazel ended with")
    parser.add_argument("events", help="the file of --build_event_json_file")
    options = parser.parse_args()
    counts, sentences = count_events(read_events(options.events))
    counts, code = verdict(counts, options.exit_code)
    for sentence in sentences:
        print(sentence, file=sys.stderr)
    print(f"{counts.passed} passed, {counts.failed} failed, {counts.skipped} skipped")
    sys.exit(code)


if __name__ == "__main__":
    main()
