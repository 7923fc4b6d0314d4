"""The native CcInfo provider under the public rules_cc's name."""

CcInfo = CcInfo  # buildifier: disable=self-assignment
