"""Calibrated policies: which KV tiles a named (model, layer, tier) may skip.

No policy is registered, so nothing here approximates: `seed_only_native` raises and `verified_auto`
is exact, with that as its reason.
"""
