"""What a caller of the bench gets wrong is a `ValueError` with parameter, value, rule, nearest."""

import re

import pytest
import torch

from stream_attention.bench import pools, results, timing
from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.lengths import Lengths, parse_lengths, uniform

CPU = torch.device("cpu")


def case(**fields):
    return AttentionCase(**{"batch": 2, "lengths": uniform(64), **fields})


BAD = {
    "lengths_int": (lambda: case(lengths=64), "lengths=64: must be a Lengths; use parse_lengths"),
    "lengths_text": (lambda: case(lengths="64"), "lengths='64': must be a Lengths; use parse_"),
    "lengths_none": (lambda: case(lengths=None), "lengths=None: must be a Lengths; use parse_"),
    "label": (lambda: case(label=3).name, "label=3: must be a str; use '3'"),
    "capacity_float": (
        lambda: case(capacity=128.0),
        "capacity='128.0 with .*in whole pages of page_size; use 128$",
    ),
    "capacity_text": (lambda: case(capacity="128"), "capacity='128 with .*page_size; use 64$"),
    "parse_none": (lambda: parse_lengths(None), "text=None: must be a str, .*; use '4096'"),
    "negative": (
        lambda: Lengths("uniform", (-5,)),
        r"numbers=\(-5,\): uniform takes ints: N in 0..2147483647; use \(0,\)",
    ),
    "fraction": (lambda: Lengths("list", (3, 2.5)), r"list takes ints: .*; use \(3, 2\)"),
    "flag": (lambda: Lengths("list", (True,)), r"numbers=\(True,\): .*; use \(1,\)"),
    "no_number": (lambda: uniform(None), r"numbers=\(None,\): .*; use \(0,\)"),
    "nan": (
        lambda: Lengths("lognormal", (5, float("nan"), 0)),
        r"takes ints, and any number as SIGMA: MEAN in 1..*, SIGMA in 0..10, .*; use \(5, 0, 0\)",
    ),
    "swapped": (
        lambda: Lengths("range", (900, 300, 0)),
        r"numbers=\(900, 300, 0\): LO must be at most HI; use \(300, 900, 0\)",
    ),
    "too_few": (
        lambda: Lengths("range", (900, 300)),
        r"range takes 3, LO, HI, SEED; use \(300, 900, 0\)",
    ),
    "a_list": (lambda: Lengths("list", [3]), r"numbers=\[3\]: must be a tuple; use \(4096,\)"),
    "kind": (lambda: Lengths("rang", (1,)), "kind='rang': must be one of .*; use 'range'"),
    "replays": (
        lambda: timing.measure([print], device=CPU, replays="x"),
        "replays='x': must be an int >= 1; use 25",
    ),
    "device": (
        lambda: timing.measure([print], device="cpu"),
        r"device='cpu': must be a torch.device; use torch.device\('cpu'\)",
    ),
    "max_seconds": (
        lambda: timing.measure([print], device=CPU, max_seconds="1"),
        "max_seconds='1': must be None or a number of seconds; use 2.0",
    ),
    "repeats": (
        lambda: timing.measure_host(print, repeats=1.5),
        "repeats=1.5: must be an int >= 1; use 2000",
    ),
    "no_samples": (
        lambda: timing.percentile([], 50),
        r"samples=\[\]: needs at least one; use \[1.0\]",
    ),
    "percent": (
        lambda: timing.percentile([1.0], 101),
        "percent=101: must be a number in 0..100; use 50",
    ),
    "missing_key": (
        lambda: results.from_json({"schema": results.SCHEMA}),
        "must be what to_json gives, but has no key 'environment'; use a file of this bench",
    ),
    "missing_field": (
        lambda: results.from_json(
            {"schema": results.SCHEMA, "curve": {"points": [], "method": ""}, "environment": {}}
        ),
        "must be what to_json gives, but .*missing 20 required.*; use a file of this bench",
    ),
    "no_object": (lambda: results.from_json([]), "schema=None: must be 'stream_attention"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_value_error_that_teaches(name):
    call, message = BAD[name]
    with pytest.raises(ValueError) as caught:
        call()
    assert re.search(message, str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("have", "nearest"),
    [
        (1 << 26, r"a smaller batch: (\d+) tokens fit, such as batch=1 with lengths=\1$"),
        (10_000, "not one token fits$"),
        (1 << 54, r"at most (\d+) tokens a request on average$"),
    ],
)
def test_a_case_beyond_all_memory_gets_a_suggestion_that_holds_tokens(monkeypatch, have, nearest):
    monkeypatch.setattr(pools, "available_bytes", lambda device: have)
    huge = AttentionCase(batch=100_000, lengths=uniform(2**31 - 1))
    with pytest.raises(pools.NotEnoughMemory) as caught:
        pools.check_memory(huge, CPU, 2)
    found = re.search(nearest, str(caught.value))
    assert found, caught.value
    assert all(int(tokens) > 0 for tokens in found.groups())
