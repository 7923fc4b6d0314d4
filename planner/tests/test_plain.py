"""Plain data of records: equal records have one text, what is read is what was written."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_attention.planner.plain import canonical_json, digest_of, from_plain, to_plain


@dataclass(frozen=True, slots=True)
class Point:
    name: str
    x: float = 0.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name='': must not be empty")


@dataclass(frozen=True, slots=True)
class Record:
    number: int
    share: float
    points: tuple[Point, ...] = ()
    pair: tuple[str, int] = ("a", 1)
    best: Point | None = None
    limit: float | None = None
    flag: bool = False
    either: int | float = 0
    names: tuple[str, ...] = dataclasses.field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Own:
    """A class whose plain form is its own."""

    numbers: tuple[int, ...]

    def plain(self) -> str:
        return " ".join(map(str, self.numbers))

    @classmethod
    def from_plain(cls, plain: Any) -> Own:
        return cls(tuple(map(int, plain.split())))


@dataclass(frozen=True, slots=True)
class Holder:
    own: Own
    more: tuple[Own, ...] = ()


floats = st.floats(allow_nan=False)
points = st.builds(Point, st.text(min_size=1), floats)
records = st.builds(
    Record,
    st.integers(),
    floats | st.integers(-(2**53), 2**53),
    st.lists(points, max_size=3).map(tuple),
    st.tuples(st.text(), st.integers()),
    st.none() | points,
    st.none() | floats,
    st.booleans(),
    st.integers() | floats,
    st.lists(st.text(), max_size=3).map(tuple),
)


def through_json(record):
    return from_plain(type(record), json.loads(canonical_json(to_plain(record))))


@given(records)
def test_a_record_comes_back_through_json(record):
    again = through_json(record)
    assert again == record
    assert digest_of(to_plain(again)) == digest_of(to_plain(record))


def test_a_digest_is_of_the_content_and_known():
    record = Record(1, 2, (Point("é"),), limit=-math.inf)
    text = r'{"limit":"-inf","number":1,"points":[{"name":"\u00e9"}],"share":2.0}'
    assert canonical_json(to_plain(record)) == text
    assert digest_of(to_plain(record)) == (
        "723bbdf868d8149c9a909c4856d737d30a89690bd094eff1646f51f3be184ba4"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Record(1, 2), Record(1, 2.0)),
        (Record(1, 0.0), Record(1, -0.0)),
        (Record(1, 2, limit=3), Record(1, 2, limit=3.0)),
        (Record(1, 2, (Point("a", 0),)), Record(1, 2, (Point("a"),))),
        (Record(1, 2, pair=("a", 1)), Record(1, 2)),
    ],
)
def test_equal_records_have_one_text(one, other):
    assert one == other
    assert canonical_json(to_plain(one)) == canonical_json(to_plain(other))


def test_a_flag_is_not_the_number_that_it_equals():
    assert Record(1, 2, either=False) == Record(1, 2)  # Python's own view
    assert to_plain(Record(1, 2, either=False)) != to_plain(Record(1, 2))


def test_a_field_added_with_a_default_changes_no_text():
    @dataclass(frozen=True)
    class Later(Point):
        unit: str = "us"

    assert to_plain(Later("a", 1.0)) == to_plain(Point("a", 1.0))
    assert from_plain(Later, to_plain(Point("a", 1.0))) == Later("a", 1.0)


def test_numbers_that_json_has_not_keep_their_place():
    record = Record(1, math.nan, limit=math.inf)
    again = through_json(record)
    assert math.isnan(again.share) and again.limit == math.inf
    assert through_json(Point("nan", 1.0)).name == "nan"
    with pytest.raises(ValueError, match="Out of range float values"):
        canonical_json(math.nan)


def test_a_class_may_have_a_plain_form_of_its_own():
    holder = Holder(Own((1, 2)), (Own((3,)),))
    assert to_plain(holder) == {"own": "1 2", "more": ["3"]}
    assert through_json(holder) == holder


@pytest.mark.parametrize("value", [torch.zeros(1), {1, 2}, object(), b"bytes", 1j])
def test_what_has_no_plain_form_is_refused(value):
    with pytest.raises(TypeError, match="has no plain form"):
        to_plain((value,))


def test_every_fault_is_named_at_once():
    bad = {"number": True, "points": [{"name": 1}], "pair": ["a"], "best": [], "more": 1}
    with pytest.raises(ValueError) as caught:
        from_plain(Record, bad)
    text = str(caught.value)
    assert text.startswith("Record: 6 faults")
    assert "more=1: is no key of it; use one of number, share, points" in text
    assert "number=True: must be int (got bool)" in text
    assert "share=None: is missing" in text
    assert "name=1: must be str (got int)" in text
    assert "has 1 entries, not 2" in text
    assert "Point=[]: must be a JSON object" in text


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("share", "1", "must be float"),
        ("share", None, "must be float"),
        ("share", 10**400, "int too large"),
        ("number", 1.0, "must be int"),
        ("number", "nan", "must be int"),
        ("flag", 1, "must be bool"),
        ("points", {}, "not a list"),
        ("points", "ab", "not a list"),
        ("best", {"name": ""}, "name='': must not be empty"),
        ("either", "x", "got str"),
        ("names", [None], "got NoneType"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(field, value, said):
    with pytest.raises(ValueError, match=rf"(?s)Record: {field}=.*{said}"):
        from_plain(Record, {"number": 1, "share": 1.0, field: value})


@pytest.mark.parametrize("plain", [None, [], "text", 1])
def test_what_is_no_object_is_refused(plain):
    with pytest.raises(ValueError, match=r"Record=.*must be a JSON object"):
        from_plain(Record, plain)


def test_a_record_s_own_refusal_is_raised():
    with pytest.raises(ValueError, match="name='': must not be empty"):
        from_plain(Point, {"name": ""})


def test_a_type_without_a_plain_form_is_our_own_bug():
    @dataclass(frozen=True)
    class Odd:
        table: dict[str, int]

    with pytest.raises(NotImplementedError, match=r"dict\[str, int\]"):
        from_plain(Odd, {"table": {}})


def test_a_bad_record_among_many_is_named_by_its_place_and_not_shown_whole():
    entries = [{"name": "long" * 99, "x": float(index)} for index in range(500)]
    entries[321] = {"name": ["many"] * 9999}
    with pytest.raises(ValueError) as caught:
        from_plain(Record, {"number": 1, "share": 1.0, "points": entries})
    text = str(caught.value)
    assert "([321]: Point: name=['many', 'many'," in text and len(text) < 1000
    with pytest.raises(ValueError, match=r"pair=.*\(\[1\]: got str\)"):
        from_plain(Record, {"number": 1, "share": 1.0, "pair": ["a", "b"]})


@pytest.mark.parametrize(
    "plain",
    [
        {"number": 1, "share": 1.0, **{f"key{'y' * 99} {n}": n for n in range(9999)}},
        {"number": 1, "share": 1.0, "x" * 99_999: 1},
        [1.0] * 99_999,
        {"number": 10**5000, "share": "1" * 9999, "points": [{}] * 9999},
    ],
)
def test_no_error_is_as_long_as_what_it_is_about(plain):
    with pytest.raises(ValueError) as caught:
        from_plain(Record, plain)
    assert str(caught.value).startswith("Record") and len(str(caught.value)) < 3000


def test_a_number_that_no_float_holds_has_no_plain_form():
    with pytest.raises(ValueError, match=r"number=1000*\.\.\.: must be one that a float can hold"):
        to_plain(Record(1, 10**400))
