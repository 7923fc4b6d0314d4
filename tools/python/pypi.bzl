"""The repository of Python dependencies: one venv, filled once from a hash lock.

`pypi_repository(name = "pypi")` gives `@pypi//NAME` for each package of the lock and a Python toolchain
that runs tests and binaries with the venv's interpreter. Two variables steer it:

    STREAM_ATTENTION_TORCH   cpu (default) or cuda: which lock, hence which build of torch
    STREAM_ATTENTION_PYTHON  the interpreter to build the venv from (default: the first usable one)

pip's own configuration (PIP_* variables, pip.conf) decides where packages come from; the lock's hashes
decide what they are. A globbed site-packages would cost every test seconds of symlinks, so the packages
stay in the venv and each `@pypi//NAME` carries the lock's stamp as data: when the lock changes, so do
the keys of all that depend on it.
"""

_VARIANTS = ["cpu", "cuda"]

_CANDIDATES = ["python3", "python3.11", "python3.12", "python3.13", "python3.10", "/usr/bin/python3"]

# Ends with a reason on stderr, or prints "VERSION EXECUTABLE".
_PROBE = """
import sys
if sys.version_info[:2] < (3, 10):
    sys.exit("is Python %d.%d; 3.10 or newer is needed" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit("cannot make a venv (%s); on Debian install python3-venv" % error)
print("%d.%d" % sys.version_info[:2], sys.executable)
"""

_PACKAGE_BUILD = """\
load("@rules_python//python:defs.bzl", "py_library")

py_library(
    name = "{name}",
    data = ["//:stamp"],
    visibility = ["//visibility:public"],
)
"""

_ROOT_BUILD = """\
load("@rules_python//python:py_runtime.bzl", "py_runtime")
load("@rules_python//python:py_runtime_pair.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

# What was installed: the lock's hash, its variant and the interpreter's version.
filegroup(
    name = "stamp",
    srcs = ["stamp.txt"],
)

py_runtime(
    name = "runtime",
    interpreter_path = "{python}",
    python_version = "PY3",
    stub_shebang = "#!{python}",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@rules_python//python:toolchain_type",
)
"""

def _find_python(ctx, without_torch):
    """Returns (version, path) of the interpreter to use; fails with every candidate's reason."""
    asked = ctx.os.environ.get("STREAM_ATTENTION_PYTHON", "")
    reasons = []
    for candidate in [asked] if asked else _CANDIDATES:
        if "/" in candidate and not candidate.startswith("/"):
            reasons.append("%s: must be an absolute path, or a name on PATH" % candidate)
            continue
        path = candidate if candidate.startswith("/") else ctx.which(candidate)
        if not path or not ctx.path(path).exists:
            reasons.append("%s: not found" % candidate)
            continue
        result = ctx.execute([path, "-c", _PROBE])
        if result.return_code:
            lines = (result.stderr.strip() or "exit code %d" % result.return_code).split("\n")
            reasons.append("%s: %s" % (path, lines[-1]))
            continue
        version, _, executable = result.stdout.strip().partition(" ")
        if not executable.startswith("/"):
            reasons.append("%s: is no Python that runs a program" % path)
            continue
        if version not in without_torch:
            return version, executable
        reasons.append("%s: is Python %s, for which the CPU lock has no torch; STREAM_ATTENTION_TORCH=cuda has one" %
                       (path, version))
    fail("no usable Python: STREAM_ATTENTION_PYTHON=%s; set it to a Python 3.10 or newer that can make a venv\n  %s" %
         (repr(asked), "\n  ".join(reasons)))

def _versions_without_torch(text):
    """The interpreters for which lock.py found no torch; it says so at the lock's head."""
    for line in text.split("\n"):
        if line.startswith("# torch") and " CPython " in line:
            return line.split(" CPython ")[1].split(":")[0].split(", ")
    return []

def _locked_names(text):
    names = {}
    for line in text.split("\n"):
        if "==" in line and not line.startswith((" ", "#")):
            names[line.split("==")[0]] = None
    return names.keys()

def _no_torch_message(variant, version, log):
    if "No matching distribution found for torch" not in log and "Cannot install torch" not in log:
        return ""
    return """
The {variant} build of torch that the lock names was not found for Python {version}. Do one of:
  - set PIP_FIND_LINKS to a folder (or PIP_EXTRA_INDEX_URL to an index) that holds that wheel;
  - set STREAM_ATTENTION_PYTHON to an interpreter that the lock has a torch hash for;
  - set STREAM_ATTENTION_TORCH=cuda, which takes torch's CUDA build (about 3 GB, runs on a CPU too).
""".format(variant = variant, version = version)

def _pypi_repository_impl(ctx):
    variant = ctx.os.environ.get("STREAM_ATTENTION_TORCH", "") or "cpu"
    if variant not in _VARIANTS:
        fail("STREAM_ATTENTION_TORCH=%s: must be one of %s; use cpu" % (variant, ", ".join(_VARIANTS)))
    lock = ctx.path(ctx.attr.cpu_lock if variant == "cpu" else ctx.attr.cuda_lock)
    text = ctx.read(lock)

    version, python = _find_python(ctx, _versions_without_torch(text))
    ctx.report_progress("venv from %s (Python %s), packages of %s" % (python, version, lock.basename))

    # buildifier: disable=print
    print("Python dependencies: %s (Python %s), %s" % (python, version, lock.basename))
    venv = ctx.path("venv")
    result = ctx.execute([python, "-m", "venv", venv], timeout = 300)
    if result.return_code:
        fail("%s -m venv failed:\n%s%s" % (python, result.stdout, result.stderr))

    interpreter = "%s/bin/python" % venv
    install = [interpreter, "-m", "pip", "install", "--require-hashes", "--no-deps", "--only-binary=:all:"]
    install += ["--no-compile", "--disable-pip-version-check", "--no-input", "--progress-bar=off", "-r", lock]
    result = ctx.execute(install, timeout = 3000)
    if result.return_code:
        log = result.stdout + result.stderr
        fail("pip could not install %s:\n%s%s" % (lock.basename, log, _no_torch_message(variant, version, log)))

    # Some packages ship files that do not compile; they are not imported either, so the exit code says
    # nothing. Without the byte code each test pays 2.5 s more to import torch.
    ctx.execute([interpreter, "-m", "compileall", "-q", "-j", "0", "%s/lib" % venv], timeout = 1200)

    digest = ctx.execute(["sha256sum", lock]).stdout.split(" ")[0]
    ctx.file("stamp.txt", "%s\n%s\nPython %s\n" % (digest, variant, version))
    ctx.file("BUILD.bazel", _ROOT_BUILD.format(python = interpreter))
    for name in _locked_names(text):
        ctx.file(name + "/BUILD.bazel", _PACKAGE_BUILD.format(name = name))

pypi_repository = repository_rule(
    implementation = _pypi_repository_impl,
    attrs = {
        "cpu_lock": attr.label(default = Label("//tools/python:requirements_cpu.lock"), allow_single_file = True),
        "cuda_lock": attr.label(default = Label("//tools/python:requirements_cuda.lock"), allow_single_file = True),
    },
    # Not PATH: a shell with another PATH would install everything again.
    environ = [
        "PIP_CONFIG_FILE",
        "PIP_EXTRA_INDEX_URL",
        "PIP_FIND_LINKS",
        "PIP_INDEX_URL",
        "STREAM_ATTENTION_PYTHON",
        "STREAM_ATTENTION_TORCH",
    ],
    doc = "A venv from the hash lock that STREAM_ATTENTION_TORCH names.",
)
