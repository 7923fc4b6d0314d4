"""Cases are data: lengths parse and print, suites build to the bytes that they are named by."""

import dataclasses

import pytest

from stream_attention.bench.cases import FP8, AttentionCase
from stream_attention.bench.lengths import Lengths, parse_lengths, uniform
from stream_attention.bench.suites import SUITES, default_suite
from stream_attention.core.formulas import MIB

# (batch, tokens, heads, dim, layout) → MiB of KV of each shape.
TABLE_MIB = [16, 128, 256, 2048, 2048, 512, 32, 256, 1024, 16, 64, 128, 512, 16, 128, 8, 64, 256]


@pytest.mark.parametrize(
    ("text", "batch", "lengths"),
    [
        ("4096", 2, (4096, 4096)),
        ("3,0,7", 3, (3, 0, 7)),
        ("skewed", 3, (65536, 512, 512)),
        ("skewed:9:2", 2, (9, 2)),
        ("range:5:5:1", 2, (5, 5)),
        ("mixed:2:9:1:0:0", 4, (9, 9, 1, 1)),
        ("mixed:2:9:1:0:0", 2, (9, 9)),
    ],
)
def test_lengths_draw_what_they_say(text, batch, lengths):
    assert parse_lengths(text).draw(batch) == lengths


@pytest.mark.parametrize(
    "text", ["4096", "3,0,7", "skewed", "skewed:9:2", "lognormal:100:0.5:3", "mixed:2:9:4:0.5:3"]
)
def test_lengths_print_as_they_are_written(text):
    assert str(parse_lengths(text)) == text


def test_lognormal_keeps_its_mean_and_its_seed():
    drawn = parse_lengths("lognormal:1000:1.0:7").draw(64)
    assert abs(sum(drawn) - 64000) <= 64
    assert max(drawn) > 3 * min(drawn)
    assert drawn == parse_lengths("lognormal:1000:1.0:7").draw(64)
    assert drawn != parse_lengths("lognormal:1000:1.0:8").draw(64)


def test_range_stays_in_its_bounds():
    drawn = parse_lengths("range:300:900:0").draw(200)
    assert 300 <= min(drawn) < 320 and 880 < max(drawn) <= 900


def test_a_long_distribution_keeps_its_name():
    case = AttentionCase(batch=1, lengths=parse_lengths("lognormal:2147483647:1.25:7"))
    assert "lognormal:2147483647:1.25:7" in case.name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be one of: N, a comma list"),
        ("many", r"must be one of: .*; use (range|lognormal|skewed)"),
        ("lognorm:3:1:0", "use lognormal"),
        (
            "lognormal:3:1",
            "lognormal takes MEAN:SIGMA:SEED, got 2 fields; use lognormal:4608:1.0:0",
        ),
        ("lognormal:3:nan:0", "SIGMA=nan must be in 0..10; use 0"),
        ("range:9:3:0", "LO=9 must be at most HI=3; use range:3:9:0"),
        ("range:a:3:0", "range: LO='a' must be an int; use 1"),
        ("-4", r"-4 must be in 0\.\.2147483647; use 0"),
        ("3,x", "'x' is not an int; use 4096"),
    ],
)
def test_bad_lengths_name_rule_and_nearest(text, message):
    with pytest.raises(ValueError, match=message):
        parse_lengths(text)


def test_a_list_must_fit_the_batch():
    with pytest.raises(ValueError, match=r"lengths=1,2: has 2 values.*batch=3; use --batch=2"):
        AttentionCase(batch=3, lengths=parse_lengths("1,2"))


def test_performance_suite_has_the_stated_bytes():
    cases = SUITES["performance_decode"]
    assert [case.kv_bytes / MIB for case in cases[:18]] == TABLE_MIB
    twins = [case for case in cases[:18] if (case.num_qo_heads, case.num_kv_heads) == (16, 2)]
    assert [case.kv_bytes for case in cases[18:]] == [case.kv_bytes for case in twins]
    assert {case.layout for case in cases[18:]} == {"NHD"}


def test_ragged_suite_has_the_stated_bytes():
    mib = [case.kv_bytes / MIB for case in SUITES["ragged"]]
    assert mib == pytest.approx([1152, 318, 551, 20.6], rel=2e-3)
    assert [case.q_len for case in SUITES["ragged"]] == [1, 1, 5, 1]


def test_headline_is_the_goals_cpu_case():
    (case,) = SUITES["cpu_headline"]
    assert case.name == "B8 N8K 32/8 D128 NHD fp32"
    assert case.kv_bytes == 512 * MIB


def names(suite):
    return [case.name for case in SUITES[suite]]


def mib(suite):
    return [case.kv_bytes / MIB for case in SUITES[suite]]


def test_small_suite_has_four_mib_and_eight_short_rows():
    assert names("decode_small")[0] == "B1 N1K 32/8 D128 NHD bf16"
    assert mib("decode_small") == pytest.approx([4, 20.6], rel=2e-3)
    assert SUITES["decode_small"][1] == SUITES["ragged"][3]


def test_page_suite_holds_the_same_bytes_in_every_form():
    assert mib("decode_pages") == [256] * 10 + [128] * 3
    cases = SUITES["decode_pages"]
    assert [case.page_size for case in cases[:9]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert [case.name for case in cases[8:]] == [
        "B8 N8K 32/8 D128 NHD bf16 page256",
        "B8 N8K 32/8 D128 NHD bf16 contiguous",
        "B4 N32K 16/2 D128 HND bf16",
        "B4 N32K 16/2 D128 HND bf16 page64",
        "B4 N32K 16/2 D128 HND bf16 contiguous",
    ]


def test_dims_suite_has_every_group_and_dim_with_enough_bytes():
    shapes = [(c.num_qo_heads, c.num_kv_heads, c.head_dim) for c in SUITES["decode_dims"]]
    assert shapes == [
        (28, 4, 128),
        (40, 8, 128),
        (24, 8, 64),
        (32, 1, 128),
        (32, 8, 80),
        (32, 8, 96),
        (16, 8, 192),
        (16, 8, 256),
    ]
    assert min(mib("decode_dims")) >= 128


def test_fp8_suite_puts_half_the_bytes_beside_the_whole():
    assert mib("decode_fp8") == [2048, 1024, 16, 8]
    assert names("decode_fp8")[:2] == [
        "B16 N32K 32/8 D128 NHD bf16",
        "B16 N32K 32/8 D128 NHD bf16 kv-fp8",
    ]


def test_capacity_suite_widens_the_table_alone():
    short, wide = SUITES["decode_capacity"]
    assert (short.max_pages, wide.max_pages) == (32, 8192)
    assert short.kv_bytes == wide.kv_bytes == 32 * MIB
    assert short.moved_bytes == wide.moved_bytes
    assert names("decode_capacity")[1] == "B16 N512 32/8 D128 NHD bf16 cap128K"


def test_invariant_suite_puts_each_case_beside_its_promise():
    cases = SUITES["decode_invariant"]
    assert mib("decode_invariant")[::2] == [128, 256, 64, 2048, 512]
    for plain, invariant in zip(cases[::2], cases[1::2], strict=True):
        assert (plain.batch_invariant, invariant.batch_invariant) == (False, True)
        assert invariant == dataclasses.replace(plain, batch_invariant=True)
        assert invariant.name == f"{plain.name} invariant"


def test_kv_dtype_sets_the_bytes_of_k_and_v_alone():
    plain = AttentionCase(batch=2, lengths=uniform(64))
    fp8 = dataclasses.replace(plain, kv_dtype="float8_e4m3fn")
    assert (plain.stored_dtype, fp8.stored_dtype) == ("bfloat16", "float8_e4m3fn")
    assert fp8.kv_bytes * 2 == plain.kv_bytes
    assert plain.moved_bytes - fp8.moved_bytes == fp8.kv_bytes
    assert dataclasses.replace(plain, kv_dtype="bfloat16").name == plain.name


def test_capacity_is_whole_pages_and_a_contiguous_cache_has_no_table():
    case = AttentionCase(batch=2, lengths=uniform(65))
    assert (case.max_tokens, case.max_pages) == (80, 5)
    wide = dataclasses.replace(case, capacity=160)
    assert (wide.max_tokens, wide.max_pages) == (160, 10)
    row = dataclasses.replace(wide, cache="contiguous")
    assert (row.max_tokens, row.max_pages) == (160, 1)
    assert wide.moved_bytes - row.moved_bytes == 4 * 2 * 5  # five page ids a request
    assert AttentionCase(batch=1, lengths=uniform(0), page_size=8).max_tokens == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_dtype": "float16"}, r"kv_dtype='float16': .* or float8_e4m3fn; use bfloat16"),
        ({"kv_dtype": "int8"}, r"kv_dtype='int8': must be None"),
        ({"cache": "ring"}, "cache='ring': must be one of paged, contiguous; use paged"),
        (
            {"cache": "contiguous", "page_size": 32},
            "page_size=32: a contiguous cache has no pages; use the default, 16",
        ),
        ({"capacity": 20}, r"capacity='20 with longest length 40, page_size=16'.*; use 48"),
        ({"capacity": 100}, r"capacity='100 with .*in whole pages of page_size; use 112"),
        ({"capacity": 0}, r"capacity='0 with .*; use 48"),
        ({"capacity": "many"}, "capacity='many with"),
        ({"batch_invariant": 1}, "batch_invariant=1: must be a bool; use True"),
    ],
)
def test_a_bad_form_of_the_cache_names_rule_and_nearest(fields, message):
    with pytest.raises(ValueError, match=message):
        AttentionCase(batch=1, lengths=uniform(40), **fields)


def test_default_suites_exist():
    assert default_suite("cpu") == "small_cpu" and default_suite("cuda") == "small_cuda"
    assert {"small_cpu", "small_cuda"} <= set(SUITES)


def test_case_repr_evaluates_back():
    case = AttentionCase(
        batch=2, lengths=uniform(5), layout="HND", cache="contiguous", capacity=16, kv_dtype=FP8
    )
    assert eval(repr(case), {"AttentionCase": AttentionCase, "Lengths": Lengths}) == case


def test_bad_case_reports_every_rule():
    with pytest.raises(ValueError, match="4 faults") as caught:
        AttentionCase(batch=0, lengths=uniform(4), num_qo_heads=30, head_dim=513, dtype="float64")
    text = str(caught.value)
    assert "batch=0: must be an int in 1..1048576; use 1" in text
    assert "must be a multiple of num_kv_heads; use 24" in text
    assert "head_dim=513: must be an int in 1..512; use 512" in text
    assert "dtype='float64': must be one of" in text


def test_mixed_suite_has_the_stated_bytes_and_chunks():
    assert mib("mixed") == pytest.approx([1177, 1162], rel=5e-4)
    first, second = SUITES["mixed"]
    assert (first.kv_lens[0], first.q_lens) == (6144 + 2048, (2048, *(1,) * 63))
    assert (second.kv_lens[:4], second.q_lens) == ((2048 + 512,) * 4, (*(512,) * 4, *(1,) * 60))
    for case in SUITES["mixed"]:
        assert (case.num_qo_heads, case.num_kv_heads, case.head_dim) == (32, 8, 128)
        assert (case.layout, case.page_size, case.causal) == ("NHD", 16, True)


def test_the_split_suite_holds_the_parts_of_the_mixed_one():
    parts = SUITES["mixed_split"]
    for whole, chunks, decodes in zip(SUITES["mixed"], parts[::2], parts[1::2], strict=True):
        assert chunks.kv_lens + decodes.kv_lens == whole.kv_lens
        assert chunks.q_lens + decodes.q_lens == whole.q_lens


def test_micro_prefill_suite_has_the_stated_bytes_and_queries():
    assert mib("micro_prefill") == [16] * 6 + [256] * 3
    cases = SUITES["micro_prefill"]
    assert [case.q_len for case in cases] == [2, 4, 8, 16, 32, 64, 4, 16, 64]


def test_prefill_suite_is_contiguous_and_whole():
    shapes = [
        (c.batch, c.q_len, c.num_qo_heads, c.num_kv_heads, c.head_dim, c.causal)
        for c in SUITES["prefill"]
    ]
    assert shapes == [
        (1, 4096, 32, 8, 128, True),
        (1, 16384, 32, 8, 128, True),
        (4, 4096, 32, 8, 128, True),
        (1, 8192, 32, 8, 128, False),
        (1, 8192, 16, 2, 128, True),
        (2, 8192, 16, 16, 64, True),
        (1, 8192, 16, 4, 256, True),
        (1, 1024, 32, 8, 128, True),
    ]
    for case in SUITES["prefill"]:
        assert case.contiguous and case.kv_lens == case.q_lens and case.max_tokens == case.q_len
