"""How a Starlark rule reaches the C++ toolchain."""

load(
    "@bazel_tools//tools/cpp:toolchain_utils.bzl",
    _find_cpp_toolchain = "find_cpp_toolchain",
)

CC_TOOLCHAIN_ATTRS = {
    "_cc_toolchain": attr.label(default = Label("@bazel_tools//tools/cpp:current_cc_toolchain")),
}

def find_cc_toolchain(ctx):
    return _find_cpp_toolchain(ctx)

def find_cpp_toolchain(ctx):
    return _find_cpp_toolchain(ctx)

def use_cc_toolchain():
    return ["@bazel_tools//tools/cpp:toolchain_type"]
