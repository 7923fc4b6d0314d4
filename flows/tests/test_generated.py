"""Generated modules: keyed, whole, run once, from the text that was asked for and no other."""

import errno
import os
import subprocess
import sys
import threading

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import pytest
import torch

from stream_attention.flows import generated

KERNEL = """import triton
import triton.language as tl


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(x_ptr + lanes, tl.load(x_ptr + lanes, mask=lanes < n) * 2, mask=lanes < n)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(generated.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(generated, "_modules", {})
    return tmp_path / "cache" / "generated"


def test_a_kernel_of_a_generated_module_runs(cache):
    module = generated.load(KERNEL, "doubling")
    x = torch.arange(5.0)
    module.double[(1,)](x, 4, BLOCK=8)
    assert x.tolist() == [0, 2, 4, 6, 4]
    (path,) = cache.iterdir()
    assert module.__file__ == str(path) and path.read_text() == KERNEL
    assert path.name.startswith("doubling_")


def test_the_same_source_runs_once_and_another_is_another_module(cache):
    source = "calls = []"
    first = generated.load(source, "a")
    assert generated.load(source, "a") is first
    others = [
        generated.load(source + "\n", "a"),
        generated.load(source, "b"),
        generated.load(source, "a", arch="sm90"),
    ]
    assert len({id(each) for each in (first, *others)}) == 4
    assert len(list(cache.iterdir())) == 4


def test_the_key_has_source_triton_and_architecture(monkeypatch):
    keys = {generated.key_of("x", "sm90"), generated.key_of("y", "sm90")}
    keys |= {generated.key_of("x", "sm100")}
    monkeypatch.setattr(generated, "_triton_version", lambda: "0.0")
    keys |= {generated.key_of("x", "sm90")}
    assert len(keys) == 4


@pytest.mark.parametrize("damage", [b"", b"raise SystemExit", KERNEL[:40].encode(), b"\xff\0"])
def test_a_damaged_file_is_written_anew_and_never_run(cache, damage):
    path = generated.load(KERNEL, "doubling").__file__
    with open(path, "wb") as file:
        file.write(damage)
    generated._modules.clear()
    module = generated.load(KERNEL, "doubling")
    assert module.__file__ == path and hasattr(module, "double")
    with open(path) as file:
        assert file.read() == KERNEL


def test_a_file_is_not_written_again_where_it_is_whole(cache):
    path = generated.load("a = 1", "a").__file__
    before = os.stat(path)
    generated._modules.clear()
    generated.load("a = 1", "a")
    after = os.stat(path)
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_what_runs_is_the_source_even_where_the_file_changes_under_it(cache, monkeypatch):
    kept = generated._kept

    def swapped(content, path):
        path = kept(content, path)
        path.write_bytes(b"raise RuntimeError")
        return path

    monkeypatch.setattr(generated, "_kept", swapped)
    module = generated.load(KERNEL, "doubling")
    x = torch.ones(1)
    module.double[(1,)](x, 1, BLOCK=1)  # the interpreter reads the text of the function
    assert x.tolist() == [2]


def _fails(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_home_that_is_no_folder_gives_a_folder_of_the_process(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.write_text("a file, under which nobody makes a folder, root neither")
    monkeypatch.delenv(generated.CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(home))
    module = generated.load(KERNEL, "doubling")
    assert os.path.dirname(module.__file__) == str(generated._private_folder())
    assert os.stat(generated._private_folder()).st_mode & 0o077 == 0


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_cache_that_takes_no_file_gives_a_folder_of_the_process(cache, monkeypatch, number):
    write = generated.replace_file

    def only_elsewhere(path, content):
        if path.parent == cache:
            _fails(number)()
        write(path, content)

    monkeypatch.setattr(generated, "replace_file", only_elsewhere)
    module = generated.load("a = 1", "a")
    assert module.a == 1
    assert os.path.dirname(module.__file__) == str(generated._private_folder())
    assert not list(cache.iterdir())


def test_a_read_only_cache_that_has_the_file_serves_it(cache, monkeypatch):
    path = generated.load("a = 1", "a").__file__
    monkeypatch.setattr(generated, "replace_file", _fails(errno.EROFS))
    generated._modules.clear()
    assert generated.load("a = 1", "a").__file__ == path


def test_the_home_is_used_without_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv(generated.CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = generated.load("a = 1", "a").__file__
    assert os.path.dirname(path) == str(tmp_path / ".cache" / "stream_attention" / "generated")


@pytest.mark.parametrize("name", ["", "a-b", "../a", 3])
def test_a_name_is_an_identifier(name):
    with pytest.raises(ValueError, match=r"name=.*: must be an identifier; use 'write_kernel'"):
        generated.load("a = 1", name)


def test_an_error_in_the_source_has_its_file_and_leaves_no_module(cache):
    with pytest.raises(SyntaxError) as raised:
        generated.load("def broken(:\n", "broken")
    assert "broken_" in str(raised.value.filename)
    before = set(sys.modules)
    with pytest.raises(ZeroDivisionError):
        generated.load("a = 1 / 0", "zero")
    assert set(sys.modules) == before
    with pytest.raises(ZeroDivisionError):
        generated.load("a = 1 / 0", "zero")


def test_threads_get_one_module(cache):
    source = "import time\ntime.sleep(0.05)\nmade = object()"
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(generated.load(source, "slow")))
        for _ in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 8 and len({id(module.made) for module in found}) == 1


_CHILD = """
import sys, time
sys.path[:0] = {path!r}
from stream_attention.flows import generated
source = "value = 1\\n" * 20000 + "value = 7"
print("ready", flush=True)
sys.stdin.readline()
module = generated.load(source, "shared")
assert module.value == 7
print(module.__file__)
"""


def test_processes_that_make_the_same_file_all_get_it_whole(cache):
    command = [sys.executable, "-c", _CHILD.format(path=sys.path)]
    pipe = subprocess.PIPE
    children = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    outputs = {child.communicate(timeout=120)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0] * 4
    (path,) = cache.iterdir()  # and no draft of any of them
    assert outputs == {str(path)}


def test_the_folder_of_a_process_goes_with_it(tmp_path):
    child = (
        "import sys\nsys.path[:0] = {path!r}\nfrom stream_attention.flows import generated\n"
        "print(generated.load('a = 1', 'a').__file__)"
    )
    variables = {**os.environ, generated.CACHE_VARIABLE: "/proc/nowhere"}
    command = [sys.executable, "-c", child.format(path=sys.path)]
    found = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert "stream_attention_" in found.stdout and not os.path.exists(found.stdout.strip())
