"""Text of others becomes plain data, or an error that says whose text it is."""

import pytest

from stream_attention.core.json_text import MAX_DEPTH, parse_json


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("null", None),
        (b"[1, 2.5, true]", [1, 2.5, True]),
        ('{"a": {"b": "\u00e9"}}', {"a": {"b": "é"}}),
        ("é".join('""').encode(), "é"),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, None),
        ('{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH, None),
    ],
)
def test_what_is_json_is_read(text, plain):
    found = parse_json(text, "file.json")
    assert plain is None or found == plain


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no JSON (Expecting value"),
        ("{", "is no JSON (Expecting property name"),
        (b"\xff\xfe", "is no JSON ('utf-8' codec can't decode byte 0xff"),
        ('{"a": 1, "b": 2, "a": 3}', "is no JSON (key 'a' is given 2 times)"),
        ("[NaN]", "is no JSON (NaN is no number of JSON)"),
        ("-Infinity", "is no JSON (-Infinity is no number of JSON)"),
        ("1" * 10_000, "is no JSON (Exceeds the limit"),
        ("[" * 200_000, "is nested too deeply, at most 64 levels"),
        ('{"a":' * 200_000, "is nested too deeply, at most 64 levels"),
        ("[" * 65 + "]" * 65, "is nested too deeply, at most 64 levels"),
        ("[1, " + "[" * 900 + "]" * 900 + "]", "is nested too deeply, at most 64 levels"),
        ('[{"a": ' * 33 + "}]" * 33, "is no JSON (Expecting value"),
        ('[{"a":' * 33 + "1" + "}]" * 33, "is nested too deeply, at most 64 levels"),
    ],
)
def test_what_is_not_is_refused_with_its_name_and_what_to_do(text, said):
    with pytest.raises(ValueError) as caught:
        parse_json(text, "file.json", "write it again")
    assert str(caught.value).startswith(f"file.json: {said}")
    assert str(caught.value).endswith("; write it again")
    with pytest.raises(ValueError) as caught:
        parse_json(text, "file.json")
    assert not str(caught.value).endswith(";")
