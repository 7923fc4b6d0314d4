"""The native cc_common module under the public rules_cc's name."""

load(":native.bzl", "native_cc_common")

cc_common = native_cc_common
