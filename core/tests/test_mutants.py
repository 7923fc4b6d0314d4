"""Mutants are made of every decision, and a scenario that looks away lets them live."""

import importlib.util

import pytest

from stream_attention.core.testing.mutants import is_killed, mutants, survivors, tree_of

SOURCE = """
def clamp(x, low, high):
    if x is None or not x:
        return low + 1
    return min(x, high) if x > low and x != 3 else low
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "clamping.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("clamping", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def looks(module):
    calls = [(None, 1, 5), (0, -2, 5), (7, 1, 5), (4, 1, 5), (1, 1, 0), (3, 1, 5), (2, 2, 1)]
    assert [module.clamp(*call) for call in calls] == [2, -1, 5, 4, 1, 1, 2]
    assert module.clamp(-2, 1, 5) == 1


def test_a_mutant_is_made_of_every_decision(module):
    changed = [what.partition(": ")[2] for what, _ in mutants(module)]
    assert set(changed) == {
        "x is None or not x [And]",
        "x is None [IsNot]",
        "not x [not twice]",
        "low + 1 [Sub]",
        "1 [0.75]",
        "min [max]",
        "x > low and x != 3 [Or]",
        "x > low [GtE]",
        "x != 3 [Eq]",
        "3 [1.75]",
    }
    assert len(changed) == len(set(changed))


def test_a_scenario_that_looks_at_all_of_it_leaves_none_alive(module):
    assert survivors(module, [looks]) == ([], 10)
    assert survivors(module, [looks], {"x > low"}) == ([], 9)


def test_a_scenario_that_looks_away_leaves_some_alive(module):
    alive, _ = survivors(module, [lambda made: made.clamp(4, 1, 5)])
    assert len(alive) > 5 and any("min [max]" in what for what in alive)


def test_what_fails_on_the_module_itself_or_is_not_in_it_is_an_error(module):
    def wrong(made):
        assert made.clamp(1, 0, 5) == 2

    assert is_killed(module, tree_of(module), [wrong])
    with pytest.raises(AssertionError):
        survivors(module, [wrong])
    with pytest.raises(AssertionError, match="y > low"):
        survivors(module, [looks], {"y > low"})
