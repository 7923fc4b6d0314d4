"""The native cc_common module under the public rules_cc's name."""

cc_common = cc_common  # buildifier: disable=self-assignment
