"""The native CcInfo provider under the public rules_cc's name."""

load(":native.bzl", "native_cc_info")

CcInfo = native_cc_info
