"""The built-in names, under others: a file cannot define a global that it also reads as a built-in."""

native_cc_common = cc_common
native_cc_info = CcInfo
