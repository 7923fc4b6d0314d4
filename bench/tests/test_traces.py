"""Traces: the formats that people have, what is handled and noted, and what is refused by name."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_attention.bench.traces import Trace, TraceRequest, read_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319600,3180,8\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45.5,GPT-4,1087,0,1087,API log\n"
)
GENERIC = "arrival_s,prompt_tokens,output_tokens\n0,10,2\n1.5,20,3\n"
MOONCAKE = [
    {"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]},
    {"timestamp": 30535, "input_length": 1024, "output_length": 26, "hash_ids": [46, 57]},
]


@pytest.fixture
def read(tmp_path):
    def reader(text, name="trace.csv", **options):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_trace(path, **options)

    return reader


def lines(objects):
    return "".join(json.dumps(each) + "\n" for each in objects)


def test_azure_traces_are_read(read):
    trace = read(AZURE)
    assert trace.format == "azure_llm_inference"
    assert trace.requests == (TraceRequest(0, 4808, 10), TraceRequest(52000, 3180, 8))
    zoned = AZURE.replace("9600,", "9600+00:00,").replace("7:04", "9:04")
    assert read(zoned).requests[1].arrival_us == 120_052_000


def test_burstgpt_traces_are_read_and_requests_without_output_are_noted(read):
    trace = read(BURST)
    assert trace.format == "burstgpt"
    assert trace.requests == (TraceRequest(0, 472, 18), TraceRequest(40_500_000, 1087, 0))
    assert "1 requests have no output (refused or failed)" in trace.notes
    assert not any("ignored" in note for note in trace.notes)


def test_mooncake_traces_are_read_with_their_blocks(read):
    trace = read(lines(MOONCAKE), "trace.jsonl")
    assert (trace.format, trace.block_tokens) == ("mooncake", 512)
    assert trace.requests[1] == TraceRequest(3_053_000, 1024, 26, (46, 57))
    assert trace.notes == ("arrivals count from the first, 27482000 us",)


@pytest.mark.parametrize(
    ("header", "factor"),
    [
        ("arrival_s,prompt_tokens,output_tokens", 10**6),
        ("Arrival Time (ms),Input Length,Output Length", 1000),
        ("arrived_at_us,num_prefill_tokens,num_decode_tokens", 1),
        ("request-timestamp seconds,ISL,OSL", 10**6),
    ],
)
def test_names_that_say_what_they_hold_are_read(read, header, factor):
    trace = read(f"{header}\n0,10,2\n3,20,0\n")
    assert trace.format == "generic"
    assert trace.requests == (TraceRequest(0, 10, 2), TraceRequest(3 * factor, 20, 0))


def test_numbers_without_a_unit_need_one_and_dates_do_not(read):
    text = GENERIC.replace("arrival_s", "arrival")
    with pytest.raises(ValueError, match=r"trace.csv:2: arrival='0': is a number without a unit"):
        read(text)
    assert read(text, arrival_unit="ms").requests[1].arrival_us == 1500
    dated = text.replace("\n0,", "\n2024-05-10 00:00:01Z,").replace(
        "\n1.5,", "\n2024-05-10T00:01Z,"
    )
    with pytest.raises(
        ValueError, match=r"trace.csv:3: arrival='2024-05-10T00:01Z': must be a date"
    ):
        read(dated)
    assert read(dated.replace("T00:01Z", "T00:01:01Z")).requests[1].arrival_us == 60_000_000
    with pytest.raises(ValueError, match="arrival_unit='min': must be None or one of datetime, s"):
        read(text, arrival_unit="min")


@pytest.mark.parametrize(
    ("raw", "note"),
    [
        (gzip.compress(GENERIC.encode()), "unzipped"),
        (b"\xef\xbb\xbf" + GENERIC.encode(), "a byte order mark was skipped"),
        (GENERIC.replace("\n", "\r\n").encode(), None),
        (GENERIC.replace("\n1.5", "\n\n , ,\n1.5").encode(), None),
    ],
)
def test_forms_of_a_file_are_handled_and_noted(read, raw, note):
    trace = read(raw)
    assert trace.requests == read(GENERIC).requests
    assert trace.notes == ((note,) if note else ())


def test_arrivals_out_of_order_are_sorted_and_noted(read):
    trace = read("arrival_ms,prompt,output\n30,1,1\n10,2,2\n20,3,3\n20,4,4\n")
    assert [r.arrival_us for r in trace.requests] == [0, 10_000, 10_000, 20_000]
    assert [r.prompt_tokens for r in trace.requests] == [2, 3, 4, 1]
    assert trace.notes[0] == "1 arrivals are before the line above them; sorted"


def test_columns_that_say_nothing_are_noted(read):
    text = "arrival_s,prompt_tokens,output_tokens,user\n0,10,2,a\n"
    assert read(text).notes == ("columns ignored: 'user'",)
    numbered = ",arrival_s,prompt_tokens,output_tokens\n0,0,10,2\n1,1.5,20,3\n"
    trace = read(numbered)  # the row numbers that data frames write have no name
    assert trace.requests == read(GENERIC).requests
    assert trace.notes == ("columns ignored: ''",)


BAD = "must be an int in 1..2147483647"


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("0,-4,2", rf"trace.csv:3: prompt_tokens='-4': {BAD}; use 1"),
        ("0,0,2", rf"trace.csv:3: prompt_tokens='0': {BAD}; use 1"),
        ("0,nan,2", rf"trace.csv:3: prompt_tokens='nan': {BAD}"),
        ("0,inf,2", r"prompt_tokens='inf'"),
        ("0,,2", r"trace.csv:3: prompt_tokens='': must be"),
        ("0,12.5,2", r"prompt_tokens='12.5': .*; use 12"),
        ("0,12.0,2", r"prompt_tokens='12.0': .*; use 12"),
        ("0,1e999999,2", r"prompt_tokens='1e999999': .*; use 2147483647"),
        ("0,2147483648,2", r"use 2147483647"),
        ("0,10,-1", r"trace.csv:3: output_tokens='-1': must be an int in 0..2147483647; use 0"),
        ("-1,10,2", r"trace.csv:3: arrival_s='-1': must be a finite number of s >= 0; use 0"),
        ("nan,10,2", r"trace.csv:3: arrival_s='nan': must be a finite number"),
        ("1e16,10,2", r"arrival_s='1e16': .*a time within 30 million years"),
        ("1e30,10,2", r"arrival_s='1e30': .*a time within 30 million years"),
        ("noon,10,2", r"arrival_s='noon'"),
        ("0,10", r"trace.csv:3: fields=2: must have as many fields as the header, 3; use 3"),
        ('0,"10,2', r"trace.csv:3: line='.*': is no CSV"),
    ],
)
def test_a_bad_cell_names_line_column_rule_and_nearest(read, cells, message):
    with pytest.raises(ValueError, match=message):
        read(f"arrival_s,prompt_tokens,output_tokens\n0,1,1\n{cells}\n")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("arrival_s,prompt_tokens", r"trace.csv:1: columns=.*: no column is the output"),
        (
            "arrival_s,promt_tokens,output",
            r"no column is the prompt; use 'prompt_tokens' for 'promt",
        ),
        ("a,b,c", r"trace: 3 faults"),
        ("arrival_s,prompt,input_length,output", r"\['prompt', 'input_length'\]: only one column"),
        ("arrival_s,time_ms,prompt,output", r"\['arrival_s', 'time_ms'\]: only one column may be"),
        ("arrival_s,prompt,output,prompt", r"trace.csv:1: prompt=2: columns of one name; use 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens,TIMESTAMP", r"TIMESTAMP=2: columns of one name"),
        ("arrival_s;prompt;output", r"trace.csv:1: fields are separated by semicolons; use commas"),
        ("arrival_s\tprompt\toutput", r"separated by tabs"),
    ],
)
def test_unknown_and_ambiguous_columns_are_refused(read, header, message):
    with pytest.raises(ValueError, match=message):
        read(f"{header}\n0,1,1,1\n")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "trace.csv:1: the file is empty"),
        (b"\xef\xbb\xbf \n\n", "trace.csv:1: the file is empty"),
        (GENERIC.split("\n")[0].encode(), "trace.csv: has no requests"),
        (gzip.compress(GENERIC.encode())[:-9], "trace.csv: is no whole gzip file"),
        (gzip.compress(GENERIC.encode())[:20] + b"damaged", "trace.csv: is no whole gzip file"),
        (b"arrival_s,prompt,output\n0,\xff,1\n", "trace.csv:2: byte 0xff is no UTF-8"),
        (GENERIC.encode("utf-16"), "is no UTF-8"),
        (b'[{"timestamp": 1}]', "is a JSON array; use one object a line"),
    ],
)
def test_files_that_are_no_trace_say_why(read, raw, message):
    with pytest.raises(ValueError, match=message):
        read(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_length": True}, "trace.jsonl:2: input_length=True: must be an int"),
        ({"input_length": 9.5}, "trace.jsonl:2: input_length='9.5': must be an int.*; use 10"),
        ({"input_length": float("nan")}, "input_length='NaN'"),
        ({"input_length": None}, "input_length=None: must be an int"),
        ({"hash_ids": [1]}, r"hash_ids=\[1\]: must be a list of ints, one for each.*; use 2 ids"),
        ({"hash_ids": [1, "a"]}, r"hash_ids=.*; use 2 ints"),
        ({"timestamp": "late"}, "timestamp='late': must be a finite number of ms"),
    ],
)
def test_a_bad_value_of_json_is_named(read, change, message):
    with pytest.raises(ValueError, match=message):
        read(lines([MOONCAKE[0], {**MOONCAKE[1], **change}]), "trace.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("3", "trace.jsonl:2: line='3': must be an object"),
        ('{"timestamp"', "trace.jsonl:2: line=.*: is no JSON"),
        ('{"timestamp": 1, "timestamp": 2}', "a key is given twice"),
        ("{}", "trace.jsonl:2: timestamp=None: is missing; the first line has it"),
        ("[" * 100_000, "trace.jsonl:2: line=.*is nested too deeply"),
        (
            '{"timestamp": 1e' + "9" * 30 + "}",
            "trace.jsonl:2: line=.*: has a number whose exponent",
        ),
        ('{"timestamp": ' + "9" * 5000 + "}", "trace.jsonl:2: line=.*: is no JSON"),
    ],
)
def test_a_bad_line_of_json_is_named(read, line, message):
    with pytest.raises(ValueError, match=message):
        read(lines(MOONCAKE[:1]) + line + "\n", "trace.jsonl")


def test_times_with_and_without_a_zone_do_not_mix(read):
    text = AZURE.replace("04.0319600", "04.0319600Z")
    with pytest.raises(ValueError, match=r"trace\.csv:3: .* some times have a time zone"):
        read(text)


def test_many_faults_are_counted_and_the_first_are_shown(read):
    with pytest.raises(ValueError) as error:
        read("arrival_s,prompt,output\n" + "0,-1,1\n" * 30)
    text = str(error.value)
    assert text.count("prompt=") == 20 and "10 more faults" in text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.integers(1, 10**6)] * 3), min_size=1, max_size=20))
def test_csv_and_json_of_one_trace_are_one(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("traces")
    names = ("arrival_us", "prompt_tokens", "output_tokens")
    table, objects = folder / "a.csv", folder / "a.jsonl"
    table.write_text("\n".join(",".join(map(str, row)) for row in (names, *rows)))
    objects.write_text(lines(dict(zip(names, row, strict=True)) for row in rows))
    read = read_trace(table).requests
    assert read == read_trace(objects).requests
    start = min(row[0] for row in rows)
    want = sorted(rows, key=lambda row: row[0])
    assert [(r.arrival_us + start, r.prompt_tokens, r.output_tokens) for r in read] == want


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ((), r"requests=\(\): must be a tuple of one TraceRequest"),
        ([TraceRequest(0, 1, 1)], "requests='list'"),
        (5, "requests='int'"),
        ((5,), "requests='tuple': must be a tuple of one TraceRequest"),
        ((TraceRequest(0, 0, 1),), "prompts ints >= 1"),
        ((TraceRequest(-1, 1, 1),), "arrivals and outputs must be ints >= 0"),
        ((TraceRequest(2, 1, 1), TraceRequest(1, 1, 1)), "must be in the order of arrival"),
        ((TraceRequest(0, 1, 1, (3,)),), "block_tokens=0: must be an int >= 0, and >= 1 beside"),
        (
            (TraceRequest(0, 1, 1, (-1,)),),
            r"requests=-1: block_ids must be tuples of ints in 0\.\.",
        ),
        ((TraceRequest(0, 1, 1, (2**63,)),), r"requests=9223372036854775808: block_ids must be"),
        ((TraceRequest(0, 1, 1, ("a",)),), r"requests='a': block_ids must be tuples of ints"),
        ((TraceRequest(0, 1, 1, [3]),), r"requests=\[3\]: block_ids must be tuples of ints"),
    ],
)
def test_a_trace_that_is_made_is_checked(requests, message):
    with pytest.raises(ValueError, match=message):
        Trace("made", "generic", requests)


@pytest.mark.parametrize("block", [-1, -(2**63), 2**63])
def test_a_block_that_would_name_the_prefix_of_another_is_refused(read, block):
    rows = [
        {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": ids}
        for ids in ([5, 2**63 - 1], [5, block])
    ]
    message = rf"trace\.jsonl:2: hash_ids=.*: block {block} must be an int in 0\.\.92233"
    with pytest.raises(ValueError, match=message):
        read(lines(rows), "trace.jsonl")
