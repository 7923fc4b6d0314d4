"""The repository `@cuda` of air-gapped mode: nvcc 13.0.2 from five wheels, pinned by hash.

`cuda_repository(name = "cuda")` unpacks the wheels of nvcc.lock side by side and gives the same labels as
the repository that rules_cuda makes in registry mode: `nvcc_all_files`, `nvvm_all_files`, `cudart_headers`,
`crt_headers`, `cccl_headers`, `cub`, `cuda_runtime`, `cuda_runtime_static`, `cicc`, `libdevice`, `nvcc`,
`ptxas`. pip's own configuration decides where the wheels come from. No CUDA of the machine is looked at.

STREAM_ATTENTION_PYTHON names the interpreter whose pip (or whose venv's pip) downloads.
"""

_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

filegroup(
    name = "nvcc_all_files",
    srcs = glob(["bin/**"]),
)

filegroup(
    name = "nvvm_all_files",
    srcs = glob(["nvvm/**"]),
)

filegroup(
    name = "nvcc",
    srcs = ["bin/nvcc"],
)

filegroup(
    name = "ptxas",
    srcs = ["bin/ptxas"],
)

filegroup(
    name = "cicc",
    srcs = ["nvvm/bin/cicc"],
)

filegroup(
    name = "libdevice",
    srcs = ["nvvm/libdevice/libdevice.10.bc"],
)

cc_library(
    name = "cudart_headers",
    hdrs = glob(
        ["include/**"],
        exclude = [
            "include/cccl/**",
            "include/crt/**",
            "include/nv/**",
        ],
    ),
    includes = ["include"],
)

cc_library(
    name = "crt_headers",
    hdrs = glob(["include/crt/**"]),
    includes = ["include"],
)

cc_library(
    name = "cccl_headers",
    hdrs = glob([
        "include/cccl/**",
        "include/nv/**",
    ]),
    includes = [
        "include",
        "include/cccl",
    ],
)

alias(
    name = "cub",
    actual = ":cccl_headers",
)

cc_library(
    name = "cuda_runtime_static",
    srcs = ["lib/libcudart_static.a"],
    linkopts = [
        "-ldl",
        "-lpthread",
        "-lrt",
    ],
    deps = [
        ":crt_headers",
        ":cudart_headers",
    ],
)

alias(
    name = "cuda_runtime",
    actual = ":cuda_runtime_static",
)
"""

_CANDIDATES = ["python3", "python3.11", "python3.12", "python3.13", "python3.10", "/usr/bin/python3"]

def _find_pip(ctx):
    """Returns (interpreter, command prefix of pip): the interpreter's own pip, else that of a new venv."""
    asked = ctx.os.environ.get("STREAM_ATTENTION_PYTHON", "")
    reasons = []
    for candidate in [asked] if asked else _CANDIDATES:
        path = candidate if candidate.startswith("/") else ctx.which(candidate)
        if not path or not ctx.path(path).exists:
            reasons.append("%s: not found" % candidate)
            continue
        if not ctx.execute([path, "-m", "pip", "--version"]).return_code:
            return path, [path, "-m", "pip"]
        result = ctx.execute([path, "-m", "venv", ctx.path("venv")], timeout = 300)
        if not result.return_code:
            return path, [ctx.path("venv/bin/python"), "-m", "pip"]
        reasons.append("%s: neither pip nor venv works: %s" % (path, result.stdout + result.stderr))
    fail("no Python with pip; on Debian install python3-venv, or set STREAM_ATTENTION_PYTHON:\n  %s" %
         "\n  ".join(reasons))

def _check(what, result):
    if result.return_code:
        fail("%s:\n%s%s" % (what, result.stdout, result.stderr))

def _cuda_repository_impl(ctx):
    machine = ctx.execute(["uname", "-sm"]).stdout.strip()
    if machine != "Linux x86_64":
        fail("machine=%s: the CUDA wheels of nvcc.lock are for Linux x86_64; use one" % machine)
    python, pip = _find_pip(ctx)
    lock = ctx.path(ctx.attr.lock)
    ctx.report_progress("downloading the wheels of %s" % lock.basename)
    _check("pip could not download the wheels of " + lock.basename, ctx.execute(
        pip + [
            "download",
            "--require-hashes",
            "--no-deps",
            "--only-binary=:all:",
            "--disable-pip-version-check",
            "--no-input",
            "--progress-bar=off",
            "--dest",
            ctx.path("wheels"),
            "-r",
            lock,
        ],
        timeout = 1800,
    ))
    for wheel in ctx.path("wheels").readdir():
        _check("cannot unpack %s" % wheel, ctx.execute([python, "-m", "zipfile", "-e", wheel, "."]))

    # The wheels share one tree, whose root should be the repository's; zipfile drops the execute bits.
    _check("unexpected layout of the wheels", ctx.execute([
        "sh",
        "-c",
        "mv nvidia/cu13/* . && chmod -R a+rx bin nvvm/bin && rm -rf wheels venv nvidia *.dist-info",
    ]))
    ctx.file("BUILD.bazel", _BUILD)

cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    attrs = {
        "lock": attr.label(default = Label("//tools/cuda:nvcc.lock"), allow_single_file = True),
    },
    environ = [
        "PIP_CONFIG_FILE",
        "PIP_EXTRA_INDEX_URL",
        "PIP_FIND_LINKS",
        "PIP_INDEX_URL",
        "STREAM_ATTENTION_PYTHON",
    ],
    doc = "The CUDA 13.0.2 compiler, its headers and the static runtime from hash-locked wheels.",
)
