"""Facts of the machine that a measurement depends on: caches, memory, versions, commit, command."""

from __future__ import annotations

import datetime
import gc
import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from stream_attention.core.formulas import MIB

# KV pools of a cold rotation exceed the cache by this factor: by the time a pool comes round again,
# nothing of it is left, also with a replacement policy that is not LRU.
CUDA_ROTATION = 4.5
CPU_ROTATION = 2.0
_FALLBACK_CACHE_BYTES = 32 * MIB
# Above this load a CPU, other processes take part in what a wall clock shows.
BUSY = 0.5


def cache_bytes(device: torch.device) -> int:
    """Bytes of the last-level cache: L2 on CUDA, L3 (as the kernel reports it) on a CPU."""
    if device.type == "cuda":
        found = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        return found or _FALLBACK_CACHE_BYTES
    sizes = [
        _parse_size(path.read_text())
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=_FALLBACK_CACHE_BYTES)


def cold_rotation_bytes(device: torch.device) -> int:
    """Least total of the KV pools that a cold measurement rotates over."""
    factor = CUDA_ROTATION if device.type == "cuda" else CPU_ROTATION
    return int(factor * cache_bytes(device)) + 1


def available_bytes(device: torch.device) -> int:
    """Memory that can be allocated on `device` now; blocks that torch has cached count as free."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _parse_size(text: str) -> int:
    text = text.strip()
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * unit


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and how a run was made; part of every JSON file. `None` = could not be found out.

    num_sms: multiprocessors, on a CPU its threads. sm_clock_mhz, memory_clock_mhz: highest that the
    device may run at. commit: of the source, `+changes` added where tracked files differ from it;
    of an installed package `files-` and the SHA-256 of its files, 40 digits. started_at: UTC.
    """

    device: str
    device_type: str
    arch: str
    cache_bytes: int
    num_sms: int
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    threads: int
    cpu: str
    driver: str | None
    cuda: str | None
    python: str
    torch: str
    triton: str | None
    flashinfer: str | None
    commit: str
    command: str
    started_at: str
    load_average: float
    num_cpus: int

    def lines(self) -> tuple[str, ...]:
        """The header of a report, one fact group a line."""
        where = f"device  {self.device} ({self.arch})"
        if self.device_type == "cpu":
            where = f"device  {self.device}, {self.threads} threads"
        busy: tuple[str, ...] = ()
        if self.device_type == "cpu" and self.load_average > BUSY * self.num_cpus:
            busy = (
                f"BUSY    load average {self.load_average:.1f} on {self.num_cpus} CPUs before the "
                "run: these times are not worth comparing",
            )
        cache = "L2" if self.device_type == "cuda" else "L3"
        versions = [f"python {self.python}", f"torch {self.torch}"]
        for name in ("triton", "flashinfer", "cuda", "driver"):
            value = getattr(self, name)
            if value is not None:
                versions.append(f"{name} {value}")
        return (
            f"{where}, {cache} {self.cache_bytes / MIB:.0f} MiB",
            f"with    {', '.join(versions)}",
            f"commit  {self.commit}",
            f"command {self.command}",
            *busy,
        )


def environment(device: torch.device) -> Environment:
    """Read the facts; runs `git` and `nvidia-smi` where they exist."""
    cuda = device.type == "cuda"
    name, arch, num_sms = _cpu_name(), "cpu", torch.get_num_threads()
    sm_clock, memory_clock = None, None
    if cuda:
        properties = torch.cuda.get_device_properties(device)
        name, arch = properties.name, f"sm_{properties.major}{properties.minor}"
        num_sms = properties.multi_processor_count
        sm_clock, memory_clock = _highest_clocks(device)
    return Environment(
        device=name,
        device_type=device.type,
        arch=arch,
        cache_bytes=cache_bytes(device),
        num_sms=num_sms,
        sm_clock_mhz=sm_clock,
        memory_clock_mhz=memory_clock,
        threads=torch.get_num_threads(),
        cpu=_cpu_name(),
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if cuda
        else None,
        cuda=torch.version.cuda if cuda else None,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        flashinfer=_version("flashinfer-python"),
        commit=_commit(),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        started_at=utc_now(),
        load_average=os.getloadavg()[0],
        num_cpus=os.cpu_count() or 1,
    )


def utc_now() -> str:
    """The time in UTC, ISO 8601 to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _highest_clocks(device: torch.device) -> tuple[int | None, int | None]:
    """Highest clocks of multiprocessors and memory in MHz, of the device that torch means."""
    found = _query(device, "clocks.max.sm,clocks.max.memory")
    return (found[0], found[1]) if len(found) == 2 else (None, None)


def current_clocks(device: torch.device) -> tuple[tuple[str, str], ...]:
    """Clocks of multiprocessors and memory now, in MHz, as names with values; `()` where none."""
    found = _query(device, "clocks.sm,clocks.memory")
    names = ("sm_clock_mhz", "memory_clock_mhz")
    pairs = zip(names, found, strict=False)
    return tuple(sorted((name, str(number)) for name, number in pairs if number is not None))


def _query(device: torch.device, fields: str) -> list[int | None]:
    """Numbers that `nvidia-smi` gives for `device`; `[]` where it gives none."""
    if device.type != "cuda":
        return []
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = [] if uuid is None else [f"--id=GPU-{uuid}"]
    command = [f"--query-gpu={fields}", "--format=csv,noheader,nounits", *which]
    line = _output("nvidia-smi", *command) or ""
    words = [word.strip() for word in line.split(",")] if line else []
    return [int(word) if word.isdigit() else None for word in words]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # no /proc here: the platform's own word is all there is
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str, cwd: str | None = None) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if lines else ""


def _commit() -> str:
    """The source's commit, with `+changes` when tracked files differ from it.

    An installed package has none, also where it lies in a checkout of something else: its files
    speak for it.
    """
    here = Path(__file__).resolve()
    folders = [here.parent]
    # Under `bazel run` the process starts in the runfiles; Bazel names the workspace it came from.
    if workspace := os.environ.get("BUILD_WORKSPACE_DIRECTORY"):
        folders.append(Path(workspace, "bench", "stream_attention", "bench"))
    for folder in folders:
        root = str(folder)
        if folder.is_dir() and _output("git", "ls-files", here.name, cwd=root) == here.name:
            head = _output("git", "rev-parse", "HEAD", cwd=root)
            changed = _output("git", "status", "--porcelain", "--untracked-files=no", cwd=root)
            return f"{head}+changes" if changed else str(head)
    return f"files-{files_digest()}"


def files_digest() -> str:
    """SHA-256 of the installed files of all our packages, by name and content, 40 digits."""
    import stream_attention

    digest = hashlib.sha256()
    found = {
        path.relative_to(root).as_posix(): path
        for root in map(Path, stream_attention.__path__)
        for path in root.rglob("*")
        if path.suffix in (".py", ".so", ".json") and path.is_file()
    }
    for name in sorted(found):
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(found[name].read_bytes()).digest())
    return digest.hexdigest()[:40]
