"""Facts of the machine and of the source that measurements carry."""

from __future__ import annotations

import datetime
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from stream_attention.bench import machine

CPU = torch.device("cpu")
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the module in a folder of its own, which it takes for its place."""
    monkeypatch.delenv("BUILD_WORKSPACE_DIRECTORY", raising=False)
    copy = tmp_path / "bench" / "stream_attention" / "bench" / "machine.py"
    copy.parent.mkdir(parents=True)
    shutil.copyfile(Path(machine.__file__).resolve(), copy)
    monkeypatch.setattr(machine, "__file__", str(copy))
    return copy


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*GIT, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def checked_out(folder: Path, *files: str) -> str:
    git(folder, "init", "--quiet")
    git(folder, "add", "--", *files)
    git(folder, "commit", "--quiet", "--allow-empty", "--message=first")
    return git(folder, "rev-parse", "HEAD")


def test_a_checkout_is_named_by_its_commit(module: Path, tmp_path: Path) -> None:
    head = checked_out(tmp_path, "bench")
    assert machine.environment(CPU).commit == head
    module.write_text("changed")
    assert machine.environment(CPU).commit == f"{head}+changes"


def test_under_bazel_run_the_workspace_is_asked(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = checked_out(tmp_path, "bench")
    lonely = tmp_path.parent / f"{tmp_path.name}_runfiles" / "machine.py"
    lonely.parent.mkdir()
    shutil.copyfile(module, lonely)
    monkeypatch.setattr(machine, "__file__", str(lonely))
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    assert machine.environment(CPU).commit == head


def test_an_installed_package_is_named_by_its_files_also_in_a_checkout_of_something_else(
    module: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("someone else's")
    checked_out(tmp_path, "other.txt")
    found = machine.environment(CPU).commit
    assert found == f"files-{machine.files_digest()}"
    assert len(found) == len("files-") + 40


def test_the_digest_of_files_follows_names_and_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import stream_attention

    (tmp_path / "part").mkdir()
    source = tmp_path / "part" / "a.py"
    source.write_text("1")
    monkeypatch.setattr(stream_attention, "__path__", [str(tmp_path)])
    first = machine.files_digest()
    (tmp_path / "part" / "a.pyc").write_text("not a source")
    assert machine.files_digest() == first
    source.write_text("2")
    second = machine.files_digest()
    source.rename(tmp_path / "part" / "b.py")
    assert len({first, second, machine.files_digest()}) == 3


def test_the_start_is_in_utc_to_the_second() -> None:
    started = machine.environment(CPU).started_at
    when = datetime.datetime.strptime(started, "%Y-%m-%dT%H:%M:%SZ")
    now = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
    assert abs(now - when) < datetime.timedelta(minutes=5)


def test_a_cpu_has_no_clocks_to_read() -> None:
    found = machine.environment(CPU)
    assert (found.sm_clock_mhz, found.memory_clock_mhz) == (None, None)
    assert machine.current_clocks(CPU) == ()
    assert found.num_sms == torch.get_num_threads()


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("1980, 3201", (("memory_clock_mhz", "3201"), ("sm_clock_mhz", "1980"))),
        ("[N/A], 3201", (("memory_clock_mhz", "3201"),)),
        ("", ()),
        (None, ()),
    ],
)
def test_clocks_are_those_that_the_driver_tells(
    line: str | None, want: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def output(*command: str, cwd: str | None = None) -> str | None:
        asked.append(command)
        return line

    class Properties:
        uuid = "abc"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(machine, "_output", output)
    assert machine.current_clocks(torch.device("cuda", 0)) == want
    assert "--id=GPU-abc" in asked[0]
