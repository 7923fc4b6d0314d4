"""Regenerate the hash locks of the Python dependencies.

    python3 tools/python/lock.py [--keep] [--python 3.11=/usr/bin/python3.11 ...]

Each supported CPython resolves `requirements.in` with its own pip (markers are evaluated by the
interpreter that runs pip, so `--python-version` would get them wrong), in the user's own pip
configuration. The answers are merged: one line per (package, version), with a marker where not all
interpreters got that version, and one hash per distinct wheel.

`--keep` holds every version that the present locks hold, for adding a package or an interpreter
without upgrading the rest.

The CPU build of torch is a local version (`+cpu`) that only some package sources have, and perhaps
for one interpreter only. Where an interpreter finds none, torch's dependencies are locked all the
same and the closing report says so; the lock then holds no torch hash for that interpreter.
"""

import argparse
import collections
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCH = "2.13.0"
# Requires-Dist of torch 2.13.0 itself, for an interpreter that has no CPU wheel to ask.
TORCH_DEPENDENCIES = ("filelock", "typing-extensions>=4.10.0", "sympy>=1.13.3", "networkx>=2.5.1")
TORCH_DEPENDENCIES += ("jinja2", "fsspec>=0.8.5", "setuptools<82")


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def interpreters(overrides):
    """Map "3.11" to an interpreter's path; an interpreter that is missing ends the run."""
    found = dict(item.split("=", 1) for item in overrides)
    for version in PYTHONS:
        found.setdefault(version, shutil.which(f"python{version}"))
        if not found[version]:
            sys.exit(f"python={version}: not on PATH; give --python {version}=/path/to/python")
    return found


def resolve(python, requirements, kept):
    """Return [(name, version, sha256)] that pip would install, or None and pip's message."""
    with tempfile.TemporaryDirectory() as scratch:
        report = pathlib.Path(scratch, "report.json")
        venv = pathlib.Path(scratch, "venv")
        subprocess.run([python, "-m", "venv", venv], check=True)
        command = [venv / "bin/python", "-m", "pip", "install", "--dry-run", "--quiet"]
        command += ["--ignore-installed", "--only-binary=:all:", "--report", report]
        if kept:
            constraints = pathlib.Path(scratch, "constraints.txt")
            constraints.write_text("\n".join(kept) + "\n")
            command += ["--constraint", constraints]
        done = subprocess.run(command + requirements, capture_output=True, text=True)
        if done.returncode:
            return None, done.stderr
        rows = []
        for item in json.loads(report.read_text())["install"]:
            meta, archive = item["metadata"], item["download_info"]["archive_info"]
            digest = archive.get("hashes", {}).get("sha256") or archive["hash"].partition("=")[2]
            rows.append((canonical(meta["name"]), meta["version"], digest))
        return rows, ""


def kept_versions(lock, version):
    """Constraints of `lock` that apply to one interpreter, torch excluded."""
    if not lock.exists():
        return []
    kept = []
    for line in lock.read_text().splitlines():
        match = re.match(r"([a-z0-9-]+)==(\S+)(?: ; (.*?))? \\$", line)
        if match and match[1] != "torch":
            if not match[3] or f'"{version}"' in match[3]:
                kept.append(f"{match[1]}=={match[2]}")
    return kept


def render(variant, rows_by_python, note):
    """The text of one lock."""
    pins = collections.defaultdict(dict)
    for version, rows in rows_by_python.items():
        for name, pin, digest in rows:
            pins[name].setdefault(pin, []).append((version, digest))
    lines = [
        f"# {variant} lock of the Python dependencies, made by tools/python/lock.py: do not edit.",
        f"# CPython {', '.join(PYTHONS)}, Linux x86_64, wheels only.",
    ]
    lines += [f"# {line}" for line in note]
    for name in sorted(pins):
        for pin, uses in sorted(pins[name].items()):
            versions = sorted({v for v, _ in uses}, key=PYTHONS.index)
            marker = ""
            # A marker on torch would let pip skip it in silence where the lock has no hash for it.
            if len(versions) < len(PYTHONS) and name != "torch":
                marker = " ; " + " or ".join(f'python_version == "{v}"' for v in versions)
            hashes = sorted({digest for _, digest in uses})
            lines.append(f"{name}=={pin}{marker} \\")
            lines.append(" \\\n".join(f"    --hash=sha256:{digest}" for digest in hashes))
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description="Regenerate the hash locks.")
    parser.add_argument("--keep", action="store_true", help="hold the versions locked now")
    parser.add_argument("--python", action="append", default=[], metavar="3.11=PATH")
    options = parser.parse_args()
    pythons = interpreters(options.python)
    wanted = [
        line.strip()
        for line in (HERE / "requirements.in").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    for variant, torch in (("cpu", f"torch=={TORCH}+cpu"), ("cuda", f"torch=={TORCH}")):
        lock = HERE / f"requirements_{variant}.lock"
        rows_by_python, missing = {}, []
        for version, python in pythons.items():
            kept = kept_versions(lock, version) if options.keep else []
            # `===` keeps pip from taking the +cpu file that find-links may offer for the CUDA lock.
            exact = torch.replace("==", "===")
            rows, message = resolve(python, [*wanted, exact], kept)
            absent = "No matching distribution" in message or f"Cannot install {exact}" in message
            if rows is None and variant == "cpu" and absent:
                missing.append(version)
                rows, message = resolve(python, [*wanted, *TORCH_DEPENDENCIES], kept)
            if rows is None:
                sys.exit(f"{variant} lock, CPython {version}: pip failed:\n{message}")
            rows_by_python[version] = rows
        note = []
        if missing:
            note = [f"{torch} was not to be had for CPython {', '.join(missing)}: no hash for it."]
            print(f"{lock.name}: {note[0]}", file=sys.stderr)
        if len(missing) == len(pythons):
            sys.exit(
                f"{torch}: no interpreter found it; set PIP_FIND_LINKS to a folder that has it"
            )
        lock.write_text(render(variant, rows_by_python, note))
        print(f"wrote {lock.name}")


if __name__ == "__main__":
    main()
