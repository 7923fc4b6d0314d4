import os
import sys


def test_tests_run_in_the_locked_venv():
    import numpy

    assert numpy.__file__.startswith(sys.prefix + os.sep)
