"""Runs pytest as the main program of an `sa_py_test`.

    pytest_main.py [--gpu=ARCH ...] PATH ...

Bazel's test protocol is mapped to pytest: JUnit XML to XML_OUTPUT_FILE, `--test_filter` to `-k`,
sharding by every n-th item. HOME and all caches lie in the test's own scratch folder.

`--gpu=any|sm80|sm90|sm100` (from the target's tags) skips every test, with its reason, where the
process has no such device: a machine without a GPU then reports skips instead of leaving tests out.
"""

import os
import sys
import tempfile

# Which compute capabilities run a target of each tag. The sm_80 library carries PTX, so it runs on
# everything later; sm_90a and sm_100a code runs on its own family only.
ARCH_ACCEPTS = {
    "any": lambda major: True,
    "sm80": lambda major: major >= 8,
    "sm90": lambda major: major == 9,
    "sm100": lambda major: major == 10,
}


def isolate():
    """Point HOME and caches at the scratch folder; must run before anything imports torch."""
    scratch = os.environ.get("TEST_TMPDIR") or tempfile.mkdtemp(prefix="sa_test_")
    os.environ["HOME"] = scratch
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR", "XDG_CACHE_HOME"):
        os.environ[name] = os.path.join(scratch, name.lower())
    # Several tests share the machine's cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    # Python put this file's real folder there, which is in the source tree and not in runfiles.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]
    return scratch


def missing_device(wanted):
    """Why this process cannot run a test that wants the device `wanted`, or None if it can."""
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA device: torch.cuda.is_available() is False"
    major, minor = torch.cuda.get_device_capability()
    if not ARCH_ACCEPTS[wanted](major):
        return f"needs a device of {wanted}: this one has compute capability {major}.{minor}"
    return None


class BazelPlugin:
    """Sharding, and the skip of tests whose device is missing."""

    def __init__(self, skip_reason):
        self.skip_reason = skip_reason
        self.num_collected = 0
        self.num_skipped_modules = 0

    def pytest_collectreport(self, report):
        self.num_skipped_modules += report.skipped

    def pytest_collection_modifyitems(self, config, items):
        import pytest

        self.num_collected = len(items)
        total = int(os.environ.get("TEST_TOTAL_SHARDS", "1"))
        index = int(os.environ.get("TEST_SHARD_INDEX", "0"))
        if total > 1:
            kept = items[index::total]
            config.hook.pytest_deselected(items=[item for item in items if item not in kept])
            items[:] = kept
        if self.skip_reason:
            for item in items:
                item.add_marker(pytest.mark.skip(reason=self.skip_reason))


def main():
    scratch = isolate()
    wanted = [arg.partition("=")[2] for arg in sys.argv[1:] if arg.startswith("--gpu=")]
    paths = [arg for arg in sys.argv[1:] if not arg.startswith("--gpu=")]
    if os.environ.get("TEST_SHARD_STATUS_FILE"):
        open(os.environ["TEST_SHARD_STATUS_FILE"], "w").close()

    import pytest

    reasons = [missing_device(arch) for arch in wanted]
    # A target tagged with several architectures runs where one of them is present.
    plugin = BazelPlugin(None if None in reasons or not reasons else reasons[0])
    args = ["-ra", "--strict-markers", "--strict-config", "-p", "no:cacheprovider"]
    args += ["--import-mode=importlib", "--confcutdir=.", "--rootdir=.", "-c", os.devnull]
    # A failed comparison is shown whole: often nobody can run it again where it failed.
    args += ["-o", "verbosity_assertions=2", "-o", "xfail_strict=true"]
    args += [f"--basetemp={os.path.join(scratch, 'pytest')}"]
    if os.environ.get("XML_OUTPUT_FILE"):
        args += [f"--junitxml={os.environ['XML_OUTPUT_FILE']}", "-o", "junit_family=xunit1"]
    if os.environ.get("TESTBRIDGE_TEST_ONLY"):
        args += ["-k", os.environ["TESTBRIDGE_TEST_ONLY"]]
    code = int(pytest.main(args + paths, plugins=[plugin]))
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        # Another shard, or another target of a filtered run, has the tests; or the whole module
        # was skipped, which the report shows with its reason.
        return 0 if plugin.num_collected or plugin.num_skipped_modules else code
    return code


if __name__ == "__main__":
    sys.exit(main())
