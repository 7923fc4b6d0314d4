"""Tests that every kernels package runs on its own library: a suite's subclass says what differs.

Their names have no `Test` prefix, so that pytest collects the subclasses alone.
"""

import pytest

# pytest rewrites the asserts of test files only; without it a failed comparison shows no values.
pytest.register_assert_rewrite(
    *(f"{__name__}.{name}" for name in ("base", "geometry", "gpu", "host", "library", "resources"))
)
