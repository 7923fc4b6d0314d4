"""What the suites of a kernels package have in common: the library that they are about."""

from __future__ import annotations

import pytest

from stream_attention.core.native import NativeLibrary
from stream_attention.core.testing.native_library import require


class LibraryTests:
    """Gives each test the package's library, or skips it with the reason."""

    library: NativeLibrary

    @pytest.fixture(name="library")
    def library_fixture(self) -> NativeLibrary:
        return require(self.library)
