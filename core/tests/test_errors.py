"""Errors say parameter, value, rule and nearest valid choice, all of them at once."""

import pytest
import torch

from stream_attention.core.dtypes import dtype_bytes, dtype_name, torch_dtype
from stream_attention.core.errors import (
    Fault,
    Faults,
    StalePlanError,
    UnsupportedProblem,
    check_both,
    shape_of,
)
from stream_attention.core.ir import Rule, check_rules, is_int


def test_fault_reads_as_a_sentence():
    assert str(Fault("page_size", 0, "must be >= 1", 16)) == "page_size=0: must be >= 1; use 16"
    assert str(Fault("layout", "x", "must be 'NHD'")) == "layout='x': must be 'NHD'"


def test_a_long_value_is_cut_and_one_that_cannot_be_shown_is_told_by_its_type():
    text = str(Fault("rows", ["x" * 1000] * 9, "must be numbers", 1))
    assert text.startswith("rows=['xxx") and text.endswith("...: must be numbers; use 1")
    assert len(text) == len("rows=") + 380 + len(": must be numbers; use 1")
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert str(Fault("a", deep, "must be 1")) == "a=<list too large to show>: must be 1"
    assert str(Fault("a", 10**5000, "must be 1")) == "a=<int too large to show>: must be 1"


def test_no_fault_raises_nothing():
    faults = Faults()
    assert faults.require(True, "a", 1, "must be 1")
    assert not faults
    faults.raise_if_any("subject")


def test_one_fault_is_one_line():
    faults = Faults()
    assert not faults.require(False, "a", 1, "must be 2", 2)
    with pytest.raises(ValueError) as caught:
        faults.raise_if_any("thing")
    assert str(caught.value) == "thing: a=1: must be 2; use 2"
    with pytest.raises(ValueError, match=r"^a=1: must be 2; use 2$"):
        faults.raise_if_any()


def test_many_faults_are_one_error():
    faults = Faults()
    faults.add("a", 1, "must be 2")
    faults.add("b", None, "must be set", "'x'")
    with pytest.raises(ValueError) as caught:
        faults.raise_if_any("thing")
    text = str(caught.value)
    assert text == "thing: 2 faults\n  a=1: must be 2\n  b=None: must be set; use 'x'"
    assert [fault.parameter for fault in faults] == ["a", "b"]


def refuse(text, kind=ValueError):
    raise kind(text)


def test_two_checks_are_one_error_in_their_order():
    assert check_both(lambda: None, lambda: 3) == 3
    for first, second, text in (
        (lambda: refuse("a"), lambda: 3, "a"),
        (lambda: None, lambda: refuse("b"), "b"),
        (lambda: refuse("a"), lambda: refuse("b"), "a\nb"),
    ):
        with pytest.raises(ValueError) as caught:
            check_both(first, second)
        assert str(caught.value) == text


def test_an_error_of_another_kind_ends_both_checks():
    with pytest.raises(UnsupportedProblem, match=r"^b$"):
        check_both(lambda: refuse("a"), lambda: refuse("b", UnsupportedProblem))
    with pytest.raises(UnsupportedProblem, match=r"^a$"):
        check_both(lambda: refuse("a", UnsupportedProblem), lambda: 3)


def test_error_types_fit_their_builtin_families():
    assert issubclass(UnsupportedProblem, NotImplementedError)
    assert issubclass(StalePlanError, RuntimeError)
    assert not issubclass(UnsupportedProblem, ValueError)


class _Node:
    size = "wide"
    shown = 3


def test_a_rule_that_cannot_be_evaluated_is_broken_and_a_hint_that_fails_is_left_out():
    rules = (
        Rule("size", "must be >= 1", lambda node: node.size >= 1, lambda node: node.size + 1),
        Rule("size", "never", lambda node: False, None, lambda node: node.shown),
    )
    with pytest.raises(ValueError) as caught:
        check_rules(_Node(), rules)
    assert str(caught.value) == "_Node: 2 faults\n  size='wide': must be >= 1\n  size=3: never"


def test_flags_are_not_counts():
    assert is_int(3) and not is_int(True) and not is_int(3.0)


def test_dtype_names_round_trip():
    sizes = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}
    for name, size in sizes.items():
        dtype = torch_dtype(name)
        assert dtype_name(dtype) == name
        assert dtype_bytes(name) == size == dtype.itemsize
    assert shape_of(torch.zeros(2, 3)) == (2, 3)
