"""`cuda_shared_library`: CUDA C++ into one shared library with a C ABI, and what ptxas said about it.

    cuda_shared_library(
        name = "libstream_attention_sm90",
        out = "stream_attention/kernels_sm90/libstream_attention_sm90.so",
        srcs = ["csrc/state_merge.cu"],
        hdrs = glob(["csrc/*.cuh"]),
        includes = ["csrc"],
        archs = "compute_90a:sm_90a",
        deps = ["//core:csrc"],
    )

gives the library under `name`, under `name + "_ptxas"` the text of `ptxas -v` with the time stamps taken out
(registers, spills, stack and static shared memory of every kernel), and under `name + "_resources"` the same as
JSON, which `stream_attention.core.resources` reads. Both lie beside the library and end in `.ptxas.txt` and
`.resources.json`.

The same rule works on both repositories named `@cuda`: that of repo.bzl and the one that rules_cuda makes. The
host compiler is that of the C++ toolchain. The library is the same, byte for byte, from any clone: no line info,
no build id, no symbol table beyond the exports. It needs no CUDA library at run time (the runtime is linked
statically, its symbols stay hidden), so it loads on a machine without a driver.
"""

load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cc_toolchain", "use_cc_toolchain")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

_HOST_FLAGS = [
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-Wall",
    "-Wextra",
    "-Werror",
    # `#pragma unroll` is for the device pass of code that both sides share.
    "-Wno-unknown-pragmas",
]

_LINK_FLAGS = [
    "-shared",
    "-static-libgcc",
    "-Wl,--as-needed",
    "-Wl,--build-id=none",
    "-Wl,--exclude-libs=ALL",
    "-Wl,--gc-sections",
    "-Wl,--no-undefined",
    "-Wl,--strip-all",
]

# Compile times differ from run to run; the rest of the report does not.
# nvcc names its temporary files by its process number, which is the same in every sandbox: in a
# common /tmp two compilations would take each other's files. Bazel puts a TMPDIR of its own over
# one that is given in `env`.
_COMPILE = """\
set -eu
report=$1; shift
export TMPDIR=$(dirname "$report")
if ! "$@" > "$report.raw" 2>&1; then cat "$report.raw" >&2; exit 1; fi
sed '/Compile time = /d' "$report.raw" > "$report"
rm "$report.raw"
"""

def _generate_code_flags(archs):
    """`compute_80:compute_80,sm_80` -> one -gencode; several are parted by `;` (as in rules_cuda)."""
    flags = []
    for spec in archs.split(";"):
        stage1, separator, codes = spec.partition(":")
        if not separator or not stage1.startswith("compute_") or not codes:
            fail("archs=%s: must be compute_X:CODE[,CODE...][;...]; use compute_90a:sm_90a" % archs)
        flags.append("-gencode=arch=%s,code=[%s]" % (stage1, codes))
    return flags

def _file_named(files, name, attribute):
    for file in files:
        if file.basename == name:
            return file
    fail("%s: no file named %s; which repository is @cuda?" % (attribute, name))

def _static_libraries(target):
    files = []
    for linker_input in target[CcInfo].linking_context.linker_inputs.to_list():
        for library in linker_input.libraries:
            file = library.pic_static_library or library.static_library
            if file:
                files.append(file)
    return files

def _cuda_shared_library_impl(ctx):
    cc_toolchain = find_cc_toolchain(ctx)
    nvcc = _file_named(ctx.files._nvcc, "nvcc", "_nvcc")
    cicc = _file_named(ctx.files._nvvm, "cicc", "_nvvm")
    libdevice = _file_named(ctx.files._nvvm, "libdevice.10.bc", "_nvvm")
    runtime = _file_named(_static_libraries(ctx.attr._runtime), "libcudart_static.a", "_runtime")
    contexts = [dep[CcInfo].compilation_context for dep in ctx.attr._headers + ctx.attr.deps]

    include_flags = []
    package = ctx.label.package
    for directory in ctx.attr.includes:
        include_flags.append("-I" + (package + "/" + directory if package else directory))
    for directory in depset(transitive = [c.includes for c in contexts]).to_list():
        include_flags.append("-I" + directory)
    for directory in depset(transitive = [c.system_includes for c in contexts]).to_list():
        include_flags += ["-isystem", directory]

    inputs = depset(
        ctx.files.hdrs + ctx.files._nvcc + ctx.files._nvvm,
        transitive = [cc_toolchain.all_files] + [c.headers for c in contexts],
    )
    environment = {
        "CICC_PATH": cicc.dirname,
        "NVVMIR_LIBRARY_DIR": libdevice.dirname,
        "PATH": ":".join([nvcc.dirname, cicc.dirname, "/usr/bin", "/bin"]),
    }
    objects = []
    reports = []
    for source in ctx.files.srcs:
        stem = "_objs/%s/%s" % (ctx.label.name, source.basename)
        object_file = ctx.actions.declare_file(stem + ".o")
        report = ctx.actions.declare_file(stem + ".ptxas.txt")
        arguments = ctx.actions.args()
        arguments.add(report)
        arguments.add(nvcc)
        arguments.add_all(["-x", "cu", "-std=c++17", "-O3", "-c", "-ccbin", cc_toolchain.compiler_executable])
        arguments.add_all(_generate_code_flags(ctx.attr.archs))
        arguments.add_all(["-Xptxas", "-v,--warn-on-spills", "-Werror", "all-warnings"])
        arguments.add("-Xcompiler", ",".join(_HOST_FLAGS))
        arguments.add_all(ctx.attr.copts)
        arguments.add_all(include_flags)
        arguments.add_all([source, "-o", object_file])
        ctx.actions.run_shell(
            command = _COMPILE,
            arguments = [arguments],
            inputs = depset([source], transitive = [inputs]),
            outputs = [object_file, report],
            env = environment,
            mnemonic = "CudaCompile",
            progress_message = "Compiling %s for %s" % (source.short_path, ctx.attr.archs),
        )
        objects.append(object_file)
        reports.append(report)

    link = ctx.actions.args()
    link.add_all(objects)
    link.add_all([runtime, "-o", ctx.outputs.out])
    link.add_all(_LINK_FLAGS)
    link.add_all(["-l:libstdc++.a", "-lm", "-lrt", "-lpthread", "-ldl"])
    ctx.actions.run(
        executable = cc_toolchain.compiler_executable,
        arguments = [link],
        inputs = depset(objects + [runtime], transitive = [cc_toolchain.all_files]),
        outputs = [ctx.outputs.out],
        env = {"PATH": "/usr/bin:/bin"},
        mnemonic = "CudaLink",
        progress_message = "Linking %s" % ctx.outputs.out.short_path,
    )
    gather = ctx.actions.args()
    gather.add(ctx.outputs.report)
    gather.add_all(reports)
    ctx.actions.run_shell(
        command = 'report=$1; shift; cat "$@" > "$report"',
        arguments = [gather],
        inputs = reports,
        outputs = [ctx.outputs.report],
        mnemonic = "CudaReport",
    )
    ctx.actions.run(
        executable = ctx.executable._resources_tool,
        arguments = [ctx.outputs.report.path, ctx.outputs.resources.path],
        inputs = [ctx.outputs.report],
        outputs = [ctx.outputs.resources],
        mnemonic = "CudaResources",
        progress_message = "Reading %s" % ctx.outputs.report.short_path,
    )
    return [
        DefaultInfo(
            files = depset([ctx.outputs.out]),
            runfiles = ctx.runfiles(files = [ctx.outputs.out]),
        ),
        OutputGroupInfo(
            ptxas = depset([ctx.outputs.report]),
            resources = depset([ctx.outputs.resources]),
        ),
    ]

_cuda_shared_library = rule(
    implementation = _cuda_shared_library_impl,
    attrs = {
        "archs": attr.string(mandatory = True),
        "copts": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = True),
        "includes": attr.string_list(),
        "out": attr.output(mandatory = True),
        "report": attr.output(mandatory = True),
        "resources": attr.output(mandatory = True),
        "srcs": attr.label_list(allow_files = [".cu"], mandatory = True),
        "_cc_toolchain": attr.label(default = Label("@bazel_tools//tools/cpp:current_cc_toolchain")),
        "_headers": attr.label_list(
            default = [
                Label("@cuda//:cudart_headers"),
                Label("@cuda//:crt_headers"),
                Label("@cuda//:cccl_headers"),
            ],
            providers = [CcInfo],
        ),
        "_nvcc": attr.label(default = Label("@cuda//:nvcc_all_files"), cfg = "exec"),
        "_nvvm": attr.label(default = Label("@cuda//:nvvm_all_files"), cfg = "exec"),
        "_resources_tool": attr.label(
            default = Label("//tools/cuda:ptxas_resources"),
            executable = True,
            cfg = "exec",
        ),
        "_runtime": attr.label(default = Label("@cuda//:cuda_runtime_static"), providers = [CcInfo]),
    },
    fragments = ["cpp"],
    toolchains = use_cc_toolchain(),
)

def cuda_shared_library(name, out, srcs, archs, hdrs = [], includes = [], deps = [], copts = [], **kwargs):
    """Builds `out` from CUDA C++; `name + "_ptxas"` is the report of ptxas, `name + "_resources"` its JSON.

    Args:
      name: the target; gives the library alone.
      out: the library's path in the package, ending in `.so`.
      srcs: .cu files, each compiled by itself (no device linking across files).
      archs: `compute_X:CODE[,CODE...]`, several parted by `;`: which code is embedded.
      hdrs: headers of this package.
      includes: include folders of this package.
      deps: cc_library targets with headers.
      copts: more flags for nvcc.
      **kwargs: visibility, tags, ...
    """
    if not out.endswith(".so"):
        fail("out=%s: must end in .so" % out)
    report = out[:-len(".so")] + ".ptxas.txt"
    resources = out[:-len(".so")] + ".resources.json"
    _cuda_shared_library(
        name = name,
        out = out,
        report = report,
        resources = resources,
        srcs = srcs,
        archs = archs,
        hdrs = hdrs,
        includes = includes,
        deps = deps,
        copts = copts,
        **kwargs
    )
    native.alias(
        name = name + "_ptxas",
        actual = report,
        **kwargs
    )
    native.alias(
        name = name + "_resources",
        actual = resources,
        **kwargs
    )
