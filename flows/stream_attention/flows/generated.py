"""Generated source as modules: `load(source, name)` writes a file, and runs it once a process.

The file lies in `$STREAM_ATTENTION_CACHE`, or `~/.cache/stream_attention`, so that a person, a
debugger and a profiler can read what runs; where nothing can be written there, in a folder of this
process alone, which goes with it. Its name has the sha256 of source, Triton's version and
architecture. What runs is `source` itself: a file that is damaged or foreign is written anew, and
never executed. Files are replaced whole, so processes that make the same one do not meet.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.metadata
import linecache
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType

import torch

from stream_attention.core.atomic_files import replace_file

CACHE_VARIABLE = "STREAM_ATTENTION_CACHE"
_DIGITS = 32  # of the digest in names of files and modules

_lock = threading.RLock()
_modules: dict[tuple[str, str], ModuleType] = {}
_private: tuple[int, Path] | None = None


def load(source: str, name: str, arch: str | None = None) -> ModuleType:
    """The module that `source` makes, which is run the first time that a process asks for it.

    source: Python text, complete with its imports. name: an identifier, of files and tracebacks.
    arch: what the text is for, such as "sm90"; `None` asks for the current device. The same source,
    name and arch give the same module, from any thread. Writes one file; `module.__file__` is its
    path. Raises `ValueError` for a name that is none, and what `source` raises when it runs, such
    as `SyntaxError`, with the file's lines.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"name={name!r}: must be an identifier; use 'write_kernel'")
    digest = key_of(source, current_arch() if arch is None else arch)
    with _lock:
        if (digest, name) not in _modules:
            path = _written(source, f"{name}_{digest[:_DIGITS]}.py")
            _modules[digest, name] = _run(source, f"_stream_attention_{path.stem}", path)
        return _modules[digest, name]


def key_of(source: str, arch: str) -> str:
    """sha256 of the source, of Triton's version and of the architecture, as hex digits."""
    parts = (source, _triton_version(), arch)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def current_arch() -> str:
    """ "sm90" where the current CUDA device has compute capability 9.0; "cpu" without one."""
    if not torch.cuda.is_available():
        return "cpu"
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def cache_folder() -> Path | None:
    """Where files are to lie, absolute; `None` where no home is known. It need not exist."""
    given = os.environ.get(CACHE_VARIABLE)
    try:
        folder = Path(given) if given else Path.home() / ".cache" / "stream_attention"
    except RuntimeError:
        return None
    return folder.absolute() / "generated"


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _written(source: str, filename: str) -> Path:
    """The path of a file with this content: in the cache, else in this process's own folder."""
    folder = cache_folder()
    if folder is not None:
        try:
            return _kept(source.encode(), folder / filename)
        except OSError:
            pass  # read-only, full, no folder: the next place does
    return _kept(source.encode(), _private_folder() / filename)


def _kept(content: bytes, path: Path) -> Path:
    """Make the file hold the content, unless it does."""
    try:
        if path.read_bytes() == content:
            return path
    except OSError:
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)
    return path


def _private_folder() -> Path:
    """A folder that only this process uses and that goes when it ends."""
    global _private
    if _private is None or _private[0] != os.getpid() or not _private[1].is_dir():
        made = Path(tempfile.mkdtemp(prefix="stream_attention_"))
        _private = os.getpid(), made
        atexit.register(_remove, os.getpid(), made)
    return _private[1]


def _remove(process: int, folder: Path) -> None:
    if os.getpid() == process:  # a forked child has its parent's exit handlers
        shutil.rmtree(folder, ignore_errors=True)


def _run(source: str, module_name: str, path: Path) -> ModuleType:
    code = compile(source, str(path), "exec", dont_inherit=True)
    # Triton and tracebacks read functions' text by their file. This entry has no time stamp, so
    # nothing reads the file in its place, whatever becomes of it.
    linecache.cache[str(path)] = len(source), None, source.splitlines(keepends=True), str(path)
    module = ModuleType(module_name)
    module.__file__ = str(path)
    sys.modules[module_name] = module
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()  # its owner may not be here


os.register_at_fork(after_in_child=_after_fork_in_child)
