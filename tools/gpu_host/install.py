"""Installs a pack of `pack.py` on a host that reaches no registry: `python3 install.py SITE`.

Run it in every part that was brought, or once beside all of them: pieces are kept in SITE/.pieces
until a wheel is whole and its SHA-256 is right. Wheels of one site are installed together, into
SITE/NAME. Needs nothing but Python and pip.

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


def install(site, wheels, target):
    """Installs `wheels`, (name, bytes) pairs, into the new folder `target`."""
    draft = target.with_name(target.name + ".part")
    shutil.rmtree(draft, ignore_errors=True)
    folder = draft / "wheels"
    folder.mkdir(parents=True)
    for name, data in wheels:
        (folder / name).write_bytes(data)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--no-cache-dir", f"--target={draft / 'site'}"]
    subprocess.run([*command, *map(str, sorted(folder.iterdir()))], check=True)
    shutil.rmtree(target, ignore_errors=True)
    (draft / "site").rename(target)
    shutil.rmtree(draft)


def main(arguments):
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python3 install.py SITE", file=sys.stderr)
        return 2
    here = Path(__file__).resolve().parent
    root, pieces = Path(arguments[0]).resolve(), Path(arguments[0]).resolve() / ".pieces"
    manifest = json.loads((here / "manifest.json").read_text())
    beside = sorted(here.parent.glob("part*"))
    parts = [part for part in beside if _of_this_pack(part, here)]
    try:
        keep_pieces(parts, pieces, manifest)
        waiting = []
        for site in manifest["paths"]:
            found = [(w["name"], whole(w, pieces)) for w in manifest["wheels"] if w["site"] == site]
            if any(data is None for _, data in found):
                waiting.append(site)
            else:
                install(site, found, root / site)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    for site, paths in manifest["paths"].items():
        folders = os.pathsep.join(str(root / site / path) for path in paths)
        state = "parts are missing" if site in waiting else f"--peer_paths={site}={folders}"
        if site == "stream_attention" and site not in waiting:
            state = f"export PYTHONPATH={folders}"
        print(f"{site}: {state}")
    if waiting:
        return MISSING
    shutil.rmtree(pieces)
    return 0


def _of_this_pack(part, here):
    manifest = part / "manifest.json"
    return manifest.exists() and manifest.read_bytes() == (here / "manifest.json").read_bytes()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
