"""Packs our wheels and the peers for a GPU host that reaches no registry.

    ./bazelw run //tools/gpu_host:pack -- OUT_DIR
    ./bazelw run //tools/gpu_host:pack -- OUT_DIR --peers=flashinfer --part_mib=60

OUT_DIR/part0, part1, … hold no more than `--part_mib` each, with an `install.py` in every one.
Bring them to the host, together or one after another, and run `python3 part0/install.py SITE`
there: what has come is checked by SHA-256, and each peer goes into a folder of its own, SITE/NAME,
so that their requirements cannot meet; it then prints the `--peer_paths` that the bench takes.
Wheels are fetched with pip by the names and versions in `peers.json`; parts of a wheel that
attention does not need (`leave_out`) are left away.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
WHEELHOUSE = Path("tools/wheels/wheelhouse")
OURS = "stream_attention"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `begin .. begin + size` of a wheel, in a part of the pack."""

    site: str
    wheel: str
    begin: int
    size: int


def cut(wheels: Sequence[tuple[str, str, int]], limit_bytes: int) -> list[list[Piece]]:
    """Parts of at most `limit_bytes`, in order, each filled before the next is begun.

    wheels: (site, file name, bytes). A wheel that does not fit the rest of a part is continued in
    the next one.
    """
    parts: list[list[Piece]] = [[]]
    left = limit_bytes
    for site, wheel, size in wheels:
        begin = 0
        while begin < size:
            if left == 0:
                parts.append([])
                left = limit_bytes
            taken = min(left, size - begin)
            parts[-1].append(Piece(site, wheel, begin, taken))
            begin, left = begin + taken, left - taken
    return parts


def without(wheel: Path, patterns: Sequence[str], target: Path) -> None:
    """Write `wheel` to `target` without the files that match a pattern; RECORD loses their lines.

    The version stays; what is left away is not to be imported. The result is the same every time.
    """
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as kept,
    ):
        for info in source.infolist():
            if info.is_dir() or _matches(info.filename, patterns):
                continue
            data = source.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(
                    line for line in lines if not _matches(line.rsplit(",", 2)[0], patterns)
                ).encode()
            kept.writestr(info, data, zipfile.ZIP_DEFLATED)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def download(requirement: str, folder: Path, python_version: str, platforms: Sequence[str]) -> None:
    """Fetch the wheel of one requirement, without what it requires itself."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--pre"]
    command += ["--only-binary=:all:", f"--python-version={python_version}"]
    command += ["--implementation=cp", *(f"--platform={name}" for name in platforms)]
    subprocess.run([*command, f"--dest={folder}", requirement], check=True)


Fetch = Callable[[str, Path, str, Sequence[str]], None]


def gather(
    names: Sequence[str], python_version: str, folder: Path, fetch: Fetch = download
) -> dict[str, list[Path]]:
    """Wheels by site, ours first, below `folder`.

    Raises `CalledProcessError` as pip fails, and `ValueError` where wheels are missing or broken.
    """
    plan = json.loads((HERE / "peers.json").read_text())
    sites = {OURS: sorted(WHEELHOUSE.glob("*.whl"))}
    if not sites[OURS]:
        raise ValueError(
            f"{WHEELHOUSE}: has no wheels of ours; use ./bazelw run //tools/gpu_host:pack, which "
            "builds them"
        )
    for name in names:
        peer, found = plan["peers"][name], folder / name
        for requirement in peer["requirements"]:
            fetch(requirement, found, python_version, plan["platforms"])
        if peer.get("leave_out"):
            for wheel in sorted(found.glob("*.whl")):
                lighter = wheel.with_suffix(".lighter")
                try:
                    without(wheel, peer["leave_out"], lighter)
                except zipfile.BadZipFile as error:
                    raise ValueError(f"{wheel.name}: is no wheel ({error}); try again") from None
                lighter.replace(wheel)
        sites[name] = sorted(found.glob("*.whl"))
    return sites


def write(sites: dict[str, list[Path]], paths: dict[str, list[str]], out: Path, limit: int) -> int:
    """The parts of a pack, below `out`; gives their number."""
    wheels = [(site, wheel) for site, found in sites.items() for wheel in found]
    parts = cut([(site, wheel.name, wheel.stat().st_size) for site, wheel in wheels], limit)
    by_name = {(site, wheel.name): wheel for site, wheel in wheels}
    manifest = {
        "num_parts": len(parts),
        "paths": {site: ["", *paths.get(site, [])] for site in sites},
        "wheels": [
            {
                "site": site,
                "name": wheel.name,
                "bytes": wheel.stat().st_size,
                "sha256": _hash(wheel),
            }
            for site, wheel in wheels
        ],
    }
    for index, pieces in enumerate(parts):
        part = out / f"part{index}"
        part.mkdir(parents=True)
        for piece in pieces:
            target = part / piece.site / f"{piece.wheel}.{piece.begin}"
            target.parent.mkdir(exist_ok=True)
            with by_name[piece.site, piece.wheel].open("rb") as source:
                source.seek(piece.begin)
                target.write_bytes(source.read(piece.size))
        (part / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        shutil.copyfile(HERE / "install.py", part / "install.py")
    return len(parts)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command's arguments; ends the process with status 2 and the rule for bad ones."""
    plan = json.loads((HERE / "peers.json").read_text())
    known = tuple(plan["peers"])
    parser = argparse.ArgumentParser(prog="pack", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", metavar="OUT_DIR", help="a folder that is not there yet")
    parser.add_argument("--peers", default=",".join(known), help=f"of {', '.join(known)}, or none")
    parser.add_argument("--python_version", default="3.12", help="of the host's CPython")
    parser.add_argument("--part_mib", type=int, default=1024, help="most MiB of one part")
    found = parser.parse_args(arguments)
    found.peers = [] if found.peers == "none" else found.peers.split(",")
    for name in found.peers:
        if name not in known:
            parser.error(f"--peers={name!r}: must be of {', '.join(known)}, or none")
    if found.part_mib < 1:
        parser.error(f"--part_mib={found.part_mib}: must be at least 1; use 60")
    if not re.fullmatch(r"3\.(0|[1-9][0-9]?)", found.python_version):
        parser.error(f"--python_version={found.python_version!r}: must be 3.N; use 3.12")
    found.out = Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), found.out)
    if found.out.exists():
        parser.error(f"OUT_DIR={str(found.out)!r}: is there already; name a folder that is not")
    return found


def main(arguments: Sequence[str], fetch: Fetch = download) -> int:
    found = parse(arguments)
    plan = json.loads((HERE / "peers.json").read_text())
    paths = {name: plan["peers"][name].get("paths", []) for name in found.peers}
    found.out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that it appears whole.
    draft = Path(tempfile.mkdtemp(dir=found.out.parent, prefix=".pack_"))
    try:
        sites = gather(found.peers, found.python_version, draft / "wheels", fetch)
        count = write(sites, paths, draft / "parts", found.part_mib * MIB)
        (draft / "parts").rename(found.out)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    print(f"{count} parts in {found.out}; on the host: python3 part0/install.py SITE")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
