"""Installs a pack of `pack.py` on a host that reaches no registry: `python3 install.py SITE`.

Run it in every part that was brought, or once beside all of them: pieces are kept in SITE/.pieces
until a wheel is whole and its SHA-256 is right. Wheels of one site are installed together, into
SITE/NAME. A folder there is replaced, once the new one is whole, if it has the marker of this
program or nothing in it; any other is left alone and an error. Needs nothing but Python and pip.

Exit status: 0 when all is installed, 3 while parts are missing, 1 when something is wrong, 2 for
bad use.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

MISSING = 3
MARKER = ".made_by_gpu_host_install"  # a file in every folder that this program made


def check_ours(folder):
    """ValueError for what is at `folder` and may not be replaced: without a marker, not empty."""
    if not os.path.lexists(folder):
        return
    if folder.is_dir() and not folder.is_symlink():
        if (folder / MARKER).is_file() or not any(folder.iterdir()):
            return
    raise ValueError(
        f"{folder}: was not made by this program ({MARKER} is not in it), so it is not replaced; "
        "move it away, or name another SITE"
    )


def remove(folder):
    """Deletes a folder of this program, if it is there. ValueError for any other."""
    check_ours(folder)
    if folder.exists():
        shutil.rmtree(folder)


def mark(folder):
    """Makes `folder`, if need be, and writes the marker."""
    check_ours(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text("install.py may replace and delete this folder\n")


def read_manifest(path):
    """The pack's manifest. ValueError for a file that `pack.py` did not write."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        sites = list(manifest["paths"])
        folders = [folder for site in sites for folder in manifest["paths"][site]]
        wheels = [(w["site"], w["name"], w["sha256"]) for w in manifest["wheels"]]
        sizes = [w["bytes"] for w in manifest["wheels"]]
    except RecursionError:
        fault = "is nested too deeply"
    except (KeyError, TypeError, AttributeError) as error:
        fault = f"lacks what a pack has ({type(error).__name__}: {error})"
    except ValueError as error:
        fault = f"is no JSON ({error})"
    else:
        objects = [manifest, manifest["paths"], *manifest["wheels"]]
        texts = [*folders, *(text for wheel in wheels for text in wheel)]
        names = [*sites, *(name for _, name, _ in wheels)]
        if not all(isinstance(each, dict) for each in objects):
            fault = "has a list where a pack has names"
        elif not all(isinstance(text, str) for text in [*sites, *texts]):
            fault = "has a name that is no text"
        elif not all(type(size) is int and size >= 0 for size in sizes):
            fault = "has a size that is no count of bytes"
        elif any(name in ("", ".", "..") or "/" in name or "\0" in name for name in names):
            fault = "has a name that is none of a file"
        else:
            return manifest
    raise ValueError(f"{path}: {fault}; bring this part again")


def keep_pieces(parts, pieces, manifest):
    """Copies the pieces of `parts` below `pieces`, each whole or not at all."""
    for part in parts:
        for site in manifest["paths"]:
            for piece in sorted((part / site).glob("*")):
                target = pieces / site / piece.name
                target.parent.mkdir(parents=True, exist_ok=True)
                draft = target.with_name(target.name + ".part")
                shutil.copyfile(piece, draft)
                draft.replace(target)


def whole(wheel, pieces):
    """The wheel's bytes, or None while pieces are missing. ValueError where its hash is wrong."""
    data = b""
    while len(data) < wheel["bytes"]:
        piece = pieces / wheel["site"] / f"{wheel['name']}.{len(data)}"
        if not piece.exists() or not piece.stat().st_size:
            return None
        data += piece.read_bytes()
    if hashlib.sha256(data).hexdigest() != wheel["sha256"]:
        raise ValueError(f"{wheel['name']}: its SHA-256 is not that of the pack; bring it again")
    return data


def install(wheels, target):
    """Installs `wheels`, (name, bytes) pairs, as the folder `target`, in place of an older one.

    The older one goes once the new one is there, and stays where anything fails.
    """
    check_ours(target)
    draft, old = (target.with_name(f".{target.name}.{end}") for end in ("new", "old"))
    remove(draft)
    mark(draft)
    folder = draft / "wheels"
    folder.mkdir()
    for name, data in wheels:
        (folder / name).write_bytes(data)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--no-cache-dir", f"--target={draft / 'site'}"]
    subprocess.run([*command, *map(str, sorted(folder.iterdir()))], check=True)
    (draft / "site").mkdir(exist_ok=True)
    (draft / "site" / MARKER).write_text("install.py may replace and delete this folder\n")
    replaced = target.exists()
    if replaced:
        mark(target)  # an empty one, so that it is known as ours when it lies aside
        remove(old)
        target.rename(old)
    try:
        (draft / "site").rename(target)
    except OSError:
        if replaced:
            old.rename(target)
        raise
    remove(old)
    remove(draft)


def main(arguments):
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python3 install.py SITE", file=sys.stderr)
        return 2
    here = Path(__file__).resolve().parent
    root = Path(arguments[0]).resolve()
    pieces = root / ".pieces"
    try:
        manifest = read_manifest(here / "manifest.json")
        beside = sorted(here.parent.glob("part*"))
        parts = [part for part in beside if _of_this_pack(part, here)]
        for site in manifest["paths"]:  # before anything is unpacked
            check_ours(root / site)
        mark(pieces)
        keep_pieces(parts, pieces, manifest)
        waiting = []
        for site in manifest["paths"]:
            found = [(w["name"], whole(w, pieces)) for w in manifest["wheels"] if w["site"] == site]
            if any(data is None for _, data in found):
                waiting.append(site)
            else:
                install(found, root / site)
        if not waiting:
            remove(pieces)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    for site, paths in manifest["paths"].items():
        folders = os.pathsep.join(str(root / site / path) for path in paths)
        state = "parts are missing" if site in waiting else f"--peer_paths={site}={folders}"
        if site == "stream_attention" and site not in waiting:
            state = f"export PYTHONPATH={folders}"
        print(f"{site}: {state}")
    return MISSING if waiting else 0


def _of_this_pack(part, here):
    manifest = part / "manifest.json"
    return manifest.is_file() and manifest.read_bytes() == (here / "manifest.json").read_bytes()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
