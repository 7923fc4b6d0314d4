"""The one hostile list: inputs that break attention kernels, as data for all tests.

Every attention test draws from `HOSTILE`. `features(case)` names what a case exercises, and
`REQUIRED_FEATURES` is what the list as a whole must; a test compares the two. Unused slots and ids
are poison in every case (`testing.problems.build`), so NaN in them needs no case of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from stream_attention.core.testing.problems import FP8, Case

PAGE_SIZES = (1, 3, 16, 24, 64, 256)
HEAD_DIMS = (1, 8, 64, 80, 96, 112, 128, 192, 256, 512)
GROUPS = (1, 3, 5, 7, 8, 16)
# KV tokens that kernels in the field compute at once; lengths are taken around each.
TILES = (16, 32, 64, 128, 256)


def _around(*marks: int) -> tuple[int, ...]:
    return tuple(sorted({mark + step for mark in marks for step in (-1, 0, 1)}))


def _lengths() -> Iterator[Case]:
    yield Case(name="length_0", kv_lens=(0,))
    yield Case(name="length_1", kv_lens=(1,))
    yield Case(name="length_1_no_spare_page", kv_lens=(1,), spare=0)
    yield Case(name="all_requests_empty", qo_lens=(1, 2, 1), kv_lens=(0, 0, 0), sink="random")
    yield Case(name="empty_between", qo_lens=(1, 1, 1), kv_lens=(33, 0, 17), call="batch")
    for page in (16, 64):
        marks = _around(page, 2 * page)
        yield Case(
            name=f"page_{page}_around",
            qo_lens=(1,) * len(marks),
            kv_lens=marks,
            page_size=page,
            call="batch",
        )
    marks = _around(*TILES)
    yield Case(name="tile_around", qo_lens=(1,) * len(marks), kv_lens=marks, head_dim_qk=32)
    yield Case(name="more_splits_than_tiles", qo_lens=(1, 1), kv_lens=(5, 1500), head_dim_qk=32)
    yield Case(name="batch_0", qo_lens=(), kv_lens=())
    yield Case(name="batch_0_contiguous", qo_lens=(), kv_lens=(), cache_kind="contiguous")
    yield Case(name="batch_1_long", kv_lens=(777,), call="batch", head_dim_qk=128)
    yield Case(name="very_ragged", qo_lens=(1,) * 6, kv_lens=(1, 900, 3, 0, 64, 255), ids="stale")


def _geometry() -> Iterator[Case]:
    for size in PAGE_SIZES:
        lens = (2 * size + size // 2 + 1, size, max(size - 1, 1))
        yield Case(
            name=f"page_size_{size}", qo_lens=(1, 2, 3), kv_lens=lens, page_size=size, ids="stale"
        )
    for index, dim in enumerate(HEAD_DIMS):
        yield Case(
            name=f"head_dim_{dim}",
            qo_lens=(1, 3),
            kv_lens=(37, 70),
            head_dim_qk=dim,
            dtype=("bfloat16", "float16", "float32")[index % 3],
        )
    for qk, vo in ((192, 128), (64, 128), (96, 80), (512, 64), (8, 512)):
        yield Case(
            name=f"dims_{qk}_{vo}", qo_lens=(1, 2), kv_lens=(40, 17), head_dim_qk=qk, head_dim_vo=vo
        )
    for group in GROUPS:
        yield Case(
            name=f"group_{group}",
            qo_lens=(1, 4),
            kv_lens=(50, 21),
            num_qo_heads=2 * group,
            head_dim_qk=32,
        )
    yield Case(name="group_64", kv_lens=(45,), num_qo_heads=64, num_kv_heads=1, call="batch")
    yield Case(name="group_128", kv_lens=(9,), num_qo_heads=128, num_kv_heads=1, head_dim_qk=16)
    yield Case(name="one_head", kv_lens=(31,), num_qo_heads=1, num_kv_heads=1)
    for dtype in ("bfloat16", "float16", "float32"):
        yield Case(name=f"dtype_{dtype}", qo_lens=(1, 5), kv_lens=(90, 33), dtype=dtype)
        yield Case(name=f"sharp_{dtype}", kv_lens=(200,), dtype=dtype, spread=8.0)


def _masks() -> Iterator[Case]:
    yield Case(name="verify", qo_lens=(4, 4), kv_lens=(40, 4), call="block")
    yield Case(name="verify_negative_positions", qo_lens=(8, 8, 8), kv_lens=(3, 0, 8), call="block")
    yield Case(name="negative_positions_sink", qo_lens=(6,), kv_lens=(2,), sink="random")
    yield Case(name="append", qo_lens=(33, 17), kv_lens=(100, 64))
    yield Case(name="prefill", qo_lens=(65,), kv_lens=(65,), head_dim_qk=32)
    yield Case(name="mixed_phases", qo_lens=(1, 37, 4, 0, 1), kv_lens=(80, 37, 20, 12, 0))
    # As many queries in every request, yet packed: a kernel that numbers tiles of queries by the
    # offsets needs more of them than requests times tiles.
    yield Case(name="packed_equal_5", qo_lens=(5,) * 3, kv_lens=(300, 1, 30), num_qo_heads=6)
    yield Case(name="packed_equal_1", qo_lens=(1,) * 12, kv_lens=(40,) * 12, num_qo_heads=8)
    yield Case(
        name="packed_equal_64",
        qo_lens=(64,) * 4,
        kv_lens=(64, 80, 64, 70),
        num_qo_heads=8,
        head_dim_qk=32,
    )
    yield Case(name="zero_queries_first", qo_lens=(0, 3), kv_lens=(20, 30))
    yield Case(name="zero_queries_last", qo_lens=(3, 0, 0), kv_lens=(20, 30, 0))
    yield Case(name="zero_queries_all", qo_lens=(0, 0), kv_lens=(20, 30))
    yield Case(name="not_causal", qo_lens=(5, 2), kv_lens=(19, 40), causal=False)
    yield Case(name="not_causal_more_queries", qo_lens=(9,), kv_lens=(4,), causal=False)
    for window in (0, 1, 15, 16, 1000):
        yield Case(
            name=f"window_{window}",
            qo_lens=(1, 6, 3),
            kv_lens=(70, 35, 2),
            window_left=window,
        )
    yield Case(name="window_prefill", qo_lens=(50,), kv_lens=(50,), window_left=5, head_dim_qk=32)
    yield Case(
        name="window_both_sides",
        qo_lens=(7, 1),
        kv_lens=(40, 40),
        causal=False,
        window_left=3,
        window_right=2,
    )
    yield Case(name="window_right_0", qo_lens=(5,), kv_lens=(20,), causal=False, window_right=0)
    yield Case(
        name="window_left_not_causal", qo_lens=(5,), kv_lens=(60,), causal=False, window_left=4
    )
    yield Case(name="window_negative_positions", qo_lens=(9,), kv_lens=(4,), window_left=1)
    yield Case(
        name="window_far_from_start", kv_lens=(900,), window_left=20, sink=0.0, head_dim_qk=32
    )


def _softmax() -> Iterator[Case]:
    long: dict[str, Any] = {"qo_lens": (1, 3), "kv_lens": (70, 33)}
    yield Case(name="cap_1", logits_soft_cap=1.0, **long)
    yield Case(name="cap_30_sharp", logits_soft_cap=30.0, spread=8.0, **long)
    yield Case(name="cap_50_fp32", logits_soft_cap=50.0, dtype="float32", **long)
    yield Case(name="sink_random", sink="random", **long)
    yield Case(name="sink_zero", sink=0.0, **long)
    yield Case(name="sink_huge", sink=1e4, **long)
    yield Case(name="sink_very_negative", sink=-1e4, **long)
    yield Case(name="sink_minus_infinity", sink="-inf", **long)
    yield Case(
        name="sink_split", sink=4.0, qo_lens=(1, 1), kv_lens=(1000, 0), head_dim_qk=32, call="batch"
    )
    yield Case(name="sink_cap_window", sink="random", logits_soft_cap=5.0, window_left=9, **long)
    yield Case(name="scale_0", sm_scale=0.0, **long)
    yield Case(name="scale_1", sm_scale=1.0, **long)
    yield Case(name="scale_negative", sm_scale=-0.2, **long)
    yield Case(name="scale_0_sink_cap", sm_scale=0.0, sink=1.0, logits_soft_cap=2.0, **long)


def _caches() -> Iterator[Case]:
    per_head = ((40, 0), (1, 33), (0, 0))
    lists: dict[str, Any] = {"qo_lens": (1, 3, 1), "kv_lens": per_head}
    for layout in ("NHD", "HND"):
        yield Case(name=f"per_head_{layout}", layout=layout, ids="negative", **lists)
        yield Case(
            name=f"per_head_window_sink_{layout}",
            layout=layout,
            window_left=7,
            sink="random",
            **lists,
        )
        yield Case(
            name=f"layer_axis_{layout}",
            layout=layout,
            pool="layer_axis",
            qo_lens=(1, 2),
            kv_lens=(50, 20),
            ids="negative",
        )
        yield Case(
            name=f"interleaved_{layout}",
            layout=layout,
            pool="interleaved",
            qo_lens=(1, 2),
            kv_lens=(50, 20),
            poison="inf",
        )
        flat: dict[str, Any] = {"cache_kind": "contiguous", "layout": layout}
        yield Case(name=f"contiguous_{layout}", qo_lens=(1, 4), kv_lens=(60, 7), **flat)
        yield Case(
            name=f"contiguous_full_{layout}",
            qo_lens=(2, 2),
            kv_lens=(45, 45),
            spare=0,
            has_lengths=False,
            call="block",
            **flat,
        )
        yield Case(
            name=f"contiguous_layer_axis_{layout}",
            qo_lens=(1, 1),
            kv_lens=(60, 0),
            pool="layer_axis",
            call="batch",
            **flat,
        )
        yield Case(name=f"contiguous_per_head_{layout}", **lists, **flat)
        yield Case(
            name=f"fp8_head_scales_{layout}",
            qo_lens=(1, 3),
            kv_lens=(50, 20),
            layout=layout,
            kv_dtype=FP8,
            kv_scales="head",
        )
    yield Case(name="contiguous_empty", kv_lens=(0,), cache_kind="contiguous", spare=0)
    for kind, dtype in ((None, "bfloat16"), ("tensor", "float16"), ("number", "float32")):
        yield Case(
            name=f"fp8_{kind}_{dtype}",
            qo_lens=(1, 3),
            kv_lens=(50, 20),
            dtype=dtype,
            kv_dtype=FP8,
            kv_scales=kind,
        )
    yield Case(
        name="fp8_contiguous",
        kv_lens=(70,),
        cache_kind="contiguous",
        kv_dtype=FP8,
        kv_scales="head",
    )
    for form in ("strided", "transposed"):
        yield Case(name=f"q_{form}", qo_lens=(1, 4), kv_lens=(50, 20), q_form=form)
        yield Case(
            name=f"q_{form}_block", qo_lens=(3,) * 2, kv_lens=(9, 20), q_form=form, call="block"
        )
    for ids in ("negative", "huge", "stale"):
        yield Case(name=f"ids_{ids}", qo_lens=(1, 1), kv_lens=(17, 300), ids=ids, poison="inf")


HOSTILE: tuple[Case, ...] = (*_lengths(), *_geometry(), *_masks(), *_softmax(), *_caches())

# A handful that covers most of the contract, for tests that pay much a case (the interpreter).
SMALL: tuple[Case, ...] = tuple(
    case
    for case in HOSTILE
    if case.name
    in {
        "length_0",
        "empty_between",
        "batch_0",
        "page_size_3",
        "dims_96_80",
        "group_5",
        "dtype_float32",
        "verify_negative_positions",
        "mixed_phases",
        "not_causal",
        "window_15",
        "window_both_sides",
        "sink_cap_window",
        "scale_0",
        "per_head_HND",
        "layer_axis_NHD",
        "contiguous_HND",
        "contiguous_full_NHD",
        "fp8_head_scales_NHD",
        "q_strided",
        "ids_negative",
    }
)

REQUIRED_FEATURES = frozenset(
    [
        *("length 0", "length 1", "page - 1", "page", "page + 1", "tile - 1", "tile", "tile + 1"),
        *("empty row", "empty request beside others", "all requests empty", "batch 0", "batch 1"),
        *("ids negative", "ids huge", "ids stale", "poison nan", "poison inf"),
        *("pool layer_axis", "pool interleaved", "q strided", "q transposed"),
        *(f"group {group}" for group in (*GROUPS, 64, 128)),
        *(f"page size {size}" for size in PAGE_SIZES),
        *(f"head dim {dim}" for dim in HEAD_DIMS),
        *("unequal dims", "more splits than tiles", "negative positions", "zero queries", "block"),
        *(
            "window 0",
            "window 1",
            "window page - 1",
            "window right",
            "window per row",
            "not causal",
        ),
        *("cap", "sink random", "sink huge", "sink very negative", "scale 0", "scale negative"),
        *("per-head lists", "per-head lengths, contiguous", "empty list beside a full one"),
        *("fp8 None", "fp8 tensor", "fp8 head", "fp8 number"),
        *("dtype bfloat16", "dtype float16", "dtype float32"),
        *("contiguous NHD", "contiguous HND", "paged NHD", "paged HND", "contiguous, no lengths"),
        *("phase decode", "phase verify", "phase append", "phase prefill", "phase mixed"),
    ]
)


def features(case: Case) -> frozenset[str]:
    """What a case exercises, derived from its data (never from its name)."""
    parts = (_length_features, _geometry_features, _option_features)
    return frozenset(feature for part in parts for feature in part(case))


def _length_features(case: Case) -> Iterable[str]:
    lens = [n for b in range(case.batch) for n in case.lens_of(b)]
    pairs = [(m, n) for b, m in enumerate(case.qo_lens) for n in case.lens_of(b)]
    yield from (f"batch {n}" for n in (0, 1) if case.batch == n)
    yield from (f"length {n}" for n in (0, 1) if n in lens)
    for name, unit in (("page", (case.page_size,)), ("tile", TILES)):
        if name == "page" and (case.cache_kind != "paged" or case.page_size < 3):
            continue
        for step, label in ((-1, " - 1"), (0, ""), (1, " + 1")):
            if any(size + step in lens for size in unit):
                yield name + label
    if any(m and not n for m, n in pairs) and any(lens):
        yield "empty request beside others"
    if lens and not any(lens):
        yield "all requests empty"
    if any(m > n and case.causal for m, n in pairs):
        yield "empty row"
        yield from ("negative positions",) if any(m > n > 0 for m, n in pairs) else ()
    if 0 in case.qo_lens:
        yield "zero queries"
    if len(lens) > 1 and min(lens) < 16 and max(lens) > 1000:
        yield "more splits than tiles"
    if case.per_head_lists and any(0 in ns and max(ns) for ns in case.kv_lens):
        yield "empty list beside a full one"
    phases = {_phase(m, n) for m, n in pairs if m}
    yield from (f"phase {phase}" for phase in (phases if len(phases) < 3 else {"mixed"}))


def _phase(qo_len: int, kv_len: int) -> str:
    if qo_len == 1:
        return "decode"
    if qo_len == kv_len:
        return "prefill"
    return "verify" if qo_len <= 16 else "append"


def _geometry_features(case: Case) -> Iterable[str]:
    yield f"group {case.group}"
    yield f"head dim {case.head_dim_qk}"
    if case.dim_vo != case.head_dim_qk:
        yield "unequal dims"
    if case.cache_kind == "paged":
        yield f"page size {case.page_size}"
        yield f"ids {case.ids}"
    yield f"{case.cache_kind} {case.layout}"
    yield f"dtype {case.dtype}"
    yield f"poison {case.poison}"
    yield f"pool {case.pool}"
    yield f"q {case.q_form}"
    if case.call == "block":
        yield "block"
    if case.per_head_lists:
        paged = case.cache_kind == "paged"
        yield "per-head lists" if paged else "per-head lengths, contiguous"
    if not case.has_lengths:
        yield "contiguous, no lengths"


def _option_features(case: Case) -> Iterable[str]:
    window = case.window_left
    if window is not None:
        yield from (f"window {n}" for n in (0, 1) if window == n)
        yield from ("window page - 1",) if window == case.page_size - 1 else ()
        yield from (
            ("window per row",) if any(1 < m and window + 1 < n for m, n in _rows(case)) else ()
        )
    if case.window_right is not None:
        yield "window right"
    if not case.causal:
        yield "not causal"
    if case.logits_soft_cap is not None:
        yield "cap"
    if case.sink == "random":
        yield "sink random"
    elif case.sink is not None:
        yield from ("sink huge",) if float(case.sink) > 1000 else ()
        yield from ("sink very negative",) if float(case.sink) < -1000 else ()
    if case.sm_scale is not None:
        yield from ("scale 0",) if case.sm_scale == 0 else ()
        yield from ("scale negative",) if case.sm_scale < 0 else ()
    if case.kv_dtype == FP8:
        yield f"fp8 {case.kv_scales}"


def _rows(case: Case) -> list[tuple[int, int]]:
    return [(m, n) for b, m in enumerate(case.qo_lens) for n in case.lens_of(b)]
