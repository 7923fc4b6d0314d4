"""Benchmarks: one timing helper, cases as data, contenders by registration, one report."""
