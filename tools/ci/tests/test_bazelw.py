"""Which Bazel `bazelw` takes, on machines made up of a PATH with stand-ins; a stopped `.ci/run`."""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

COMMANDS = ("bash", "basename", "cat", "dirname", "env", "head", "id", "sed", "sort")


class Machine:
    """A PATH with a few commands, and a workspace whose Debian files are where the test wants."""

    def __init__(self, folder):
        self.folder = folder
        self.bin = folder / "bin"
        self.home = folder / "home"
        self.workspace = folder / "workspace"
        for path in (self.bin, self.home, self.workspace / "tools/airgap", folder / "debian"):
            path.mkdir(parents=True)
        for command in COMMANDS:
            (self.bin / command).symlink_to(shutil.which(command))
        (self.bin / "python3").symlink_to(sys.executable)
        text = pathlib.Path("bazelw").read_text()
        for name in ("debian_bazel", "debian_python", "debian_files"):
            assert f"\n{name}=" in text
        lines = [
            f"debian_bazel={folder}/debian/bazel-4"
            if line.startswith("debian_bazel=")
            else f"debian_python={folder}/debian/python3"
            if line.startswith("debian_python=")
            else f"debian_files=({folder}/debian/bazel-4)"
            if line.startswith("debian_files=")
            else line
            for line in text.splitlines()
        ]
        self.script(self.workspace / "bazelw", "\n".join(lines))
        self.script(self.workspace / "tools/bazel", pathlib.Path("tools/bazel").read_text())

    def script(self, path, text):
        """Write an executable file."""
        path.write_text(text + "\n")
        path.chmod(0o755)

    def bazel(self, path, version):
        """A Bazel that says how it was called."""
        self.script(
            path,
            f'#!/bin/bash\n[[ $1 == --version ]] && {{ echo "bazel {version}"; exit; }}\n'
            'echo "$(basename "$0") $*"',
        )

    def run(self, *args, cwd="/", **variables):
        """Run bazelw; gives (exit code, stdout, stderr)."""
        environment = {"PATH": str(self.bin), "HOME": str(self.home), **variables}
        environment = {key: value for key, value in environment.items() if value is not None}
        done = subprocess.run(
            [self.workspace / "bazelw", *args],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_debians_bazel_builds_in_air_gapped_mode(machine):
    machine.bazel(machine.folder / "debian/bazel-4", "no_version")
    code, stdout, _ = machine.run("test", "//...")
    rc = machine.workspace / "tools/airgap/bazelrc"
    assert (code, stdout) == (0, f"bazel-4 --bazelrc={rc} test //...\n")


def test_a_new_bazel_on_path_builds_in_registry_mode(machine):
    machine.bazel(machine.bin / "bazel", "8.4.2")
    assert machine.run("test", "//...")[:2] == (0, "bazel test //...\n")


def test_bazelisk_is_taken_without_asking_its_version(machine):
    machine.script(machine.bin / "bazelisk", '#!/bin/bash\necho "bazelisk $*"')
    assert machine.run("info")[:2] == (0, "bazelisk info\n")


def test_debians_bazel_comes_before_others_because_it_is_the_tested_one(machine):
    machine.bazel(machine.folder / "debian/bazel-4", "no_version")
    machine.script(machine.bin / "bazelisk", "#!/bin/bash\necho wrong")
    assert machine.run("info")[1].startswith("bazel-4 ")


@pytest.mark.parametrize("version", ["6.5.0", "7.3.9", "no_version"])
def test_an_old_bazel_is_not_taken(machine, version):
    machine.bazel(machine.bin / "bazel", version)
    code, stdout, stderr = machine.run("info")
    assert (code, stdout) == (1, "")
    assert "no usable Bazel found" in stderr
    assert "install Bazelisk or Bazel 8" in stderr


def test_debians_packages_are_installed_and_said(machine):
    bazel = machine.folder / "debian/bazel-4"
    packed = machine.folder / "packed"
    machine.bazel(packed, "no_version")
    machine.script(machine.bin / "apt-cache", "#!/bin/bash")
    machine.script(
        machine.bin / "apt-get",
        f"#!/bin/bash\n[[ $1 == install ]] && {shutil.which('cp')} {packed} {bazel}\n"
        'echo "apt-get $*"',
    )
    machine.script(machine.bin / "sudo", '#!/bin/bash\n"$@"')
    code, stdout, stderr = machine.run("info")
    assert code == 0
    assert stdout.startswith("bazel-4 ")
    wanted = "bazel-bootstrap bazel-rules-java bazel-skylib python3-venv"
    assert f"bazelw: installing Debian's packages: {wanted}\n" in stderr
    assert f"apt-get install -y -qq --no-install-recommends {wanted}\n" in stderr


def test_an_installation_that_fails_says_what_to_do(machine):
    machine.script(machine.bin / "apt-cache", "#!/bin/bash")
    machine.script(machine.bin / "apt-get", "#!/bin/bash\nexit 100")
    machine.script(machine.bin / "sudo", '#!/bin/bash\n"$@"')
    code, _, stderr = machine.run("info")
    assert code == 1
    assert "apt-get could not install them; install Bazelisk or Bazel 8" in stderr


def test_a_python_that_cannot_make_a_venv_is_seen(machine):
    machine.bazel(machine.folder / "debian/bazel-4", "no_version")
    (machine.bin / "python3").unlink()
    code, _, stderr = machine.run("info")
    assert code == 1
    assert "no Python of 3.10 or later that can make a venv" in stderr


@pytest.mark.parametrize("name", ["/no/such/bazel", "/usr"])
def test_a_named_bazel_must_be_a_program(machine, name):
    code, _, stderr = machine.run("info", STREAM_ATTENTION_BAZEL=name)
    assert code == 1
    assert f"STREAM_ATTENTION_BAZEL={name}: must be an executable; unset it" in stderr


@pytest.mark.parametrize("home", [None, "", "/no/such/home"])
def test_without_a_home_bazel_gets_an_output_root(machine, home):
    machine.bazel(machine.bin / "bazel", "8.4.2")
    code, stdout, _ = machine.run("info", HOME=home, TMPDIR=str(machine.folder))
    wanted = f"--output_user_root={machine.folder}/bazel_{os.getuid()}"
    assert (code, stdout) == (0, f"bazel {wanted} info\n")


def test_a_call_from_outside_says_where_relative_paths_start(machine):
    machine.bazel(machine.bin / "bazel", "8.4.2")
    said = f"relative paths start at {machine.workspace}\n"
    assert said in machine.run("info", cwd="/")[2]
    assert machine.run("info", cwd=machine.workspace / "tools")[2] == ""


@pytest.fixture
def checkout(tmp_path):
    """Makes a folder with `.ci/run`, a `bazelw` of these lines, and a `bin` to put on PATH."""

    def make(*lines):
        for folder in (".ci", "tools/ci", "bin"):
            (tmp_path / folder).mkdir(parents=True)
        for name in (".ci/run", "tools/ci/count_tests.py"):
            shutil.copy(name, tmp_path / name)
        text = "\n".join(["#!/bin/bash", "[[ $1 == test ]] || exit 0", *lines, ""])
        (tmp_path / "bazelw").write_text(text)
        (tmp_path / "bazelw").chmod(0o755)
        return tmp_path

    return make


def ci_environment(folder, **variables):
    """This process's environment with the checkout's `bin` first on PATH."""
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **variables}


def test_a_ci_run_that_is_stopped_stops_bazel_and_still_ends_in_one_line(checkout):
    folder = checkout(
        "trap 'touch stopped; exit 8' TERM",
        "touch started",
        "for _ in {1..300}; do sleep 0.1; done",
    )
    old = folder / "bin/python3"  # older than 3.10, such as one that a version manager chose
    old.write_text("#!/bin/bash\nexit 1\n")
    old.chmod(0o755)
    command = [folder / ".ci/run"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ci_environment(folder))
    while not (folder / "started").exists():
        time.sleep(0.05)
    run.terminate()
    stdout, _ = run.communicate(timeout=20)
    assert (run.returncode, stdout) == (8, "0 passed, 1 failed, 0 skipped\n")
    assert (folder / "stopped").exists()


def test_a_ci_run_without_its_tmpdir_takes_tmp(checkout):
    folder = checkout('printf "%s\n" "$@" >arguments', "exit 0")
    done = subprocess.run(
        [folder / ".ci/run"],
        env=ci_environment(folder, TMPDIR="/no/such/folder"),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "0 passed, 0 failed, 0 skipped\n")
    arguments = (folder / "arguments").read_text().splitlines()
    (events,) = [line for line in arguments if line.startswith("--build_event_json_file=")]
    assert events.startswith("--build_event_json_file=/tmp/"), events
    assert "TMPDIR=/no/such/folder: no folder can be made there; using /tmp" in done.stderr


def test_a_ci_run_without_a_temporary_folder_runs_nothing_and_ends_in_its_line(checkout):
    folder = checkout("touch started")
    (folder / "bin/mktemp").write_text("#!/bin/bash\nexit 1\n")
    (folder / "bin/mktemp").chmod(0o755)
    done = subprocess.run(
        [folder / ".ci/run"], env=ci_environment(folder), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "0 passed, 1 failed, 0 skipped\n")
    assert "set TMPDIR to one that can be written" in done.stderr
    assert not (folder / "started").exists()
