"""Flows: programs that score pages, select them and run attention over the selection.

The package holds no flow.
"""
