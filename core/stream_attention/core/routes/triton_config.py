"""Tiles and schedules of the Triton route: pure functions of a problem and a device.

Lengths are not known here, only capacities; the kernels cut the work from the lengths at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

from stream_attention.core.device import DeviceFacts
from stream_attention.core.dtypes import dtype_bytes
from stream_attention.core.ir import Rule, check_rules, evaluable_repr
from stream_attention.core.problem import AttentionProblem

# Scratch of one plan: fewer splits rather than more memory than this.
MAX_SCRATCH_BYTES = 256 << 20
# A scan of the lengths by every program costs about 1 us per 512 requests; past this many requests
# there is work for all programs without splits.
MAX_SCANNED_REQUESTS = 1024
# Tokens below which a split costs more in the merge than it saves: measured on an H200 at D128 and
# D64, 16 MiB of K/V in one request, and 128 MiB to 2 GiB in several.
MIN_SPLIT_TOKENS = 256
MIN_SPLIT_TOKENS_BATCHED = 512
MOST_WAVES = 4  # the finest split size that the device weighs is 1 / 4 of an equal share
# Batch-invariant: fewest tokens a split, and most query tiles times splits of a request over all KV
# heads, about two programs for each of an H200's 132 processors.
BATCH_INVARIANT_SPLIT_TOKENS = 1024
BATCH_INVARIANT_PROGRAMS = 256
# Factors of the scores beyond these bounds, either way, are applied one by one: their product may
# be no float32. With fp8, whose scales are known to the device alone, the bounds are narrower.
WIDE_FACTOR = 1e30
WIDE_FACTOR_FP8 = 1e6
LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class TritonConfig:
    """Tiles and schedule of one plan; a pure function of problem and device.

    block_m: packed query rows a tile. block_n: KV tokens a tile. schedule: `"direct"`, `"even"`,
    `"scan"` or `"fixed"` (see the kernel). max_splits: partial states a row can have. slots:
    programs a KV head that run at once; `"fixed"`: most query tiles times splits of one request
    and KV head. min_tiles: fewest tiles a split; `"fixed"`: chunk_tiles. items: programs a KV head
    on grid axis 0.
    """

    block_m: int
    block_n: int
    block_qk: int
    block_vo: int
    num_warps: int
    num_stages: int
    schedule: str
    max_splits: int = 1
    slots: int = 1
    min_tiles: int = 1
    chunk_tiles: int = 1
    items: int = 1

    def __post_init__(self) -> None:
        check_rules(self, _CONFIG_RULES)

    __repr__ = evaluable_repr


def _power_of_two(name: str, low: int) -> Rule:
    return Rule(
        name,
        f"must be a power of two >= {low}",
        lambda c: getattr(c, name) >= low and getattr(c, name) & (getattr(c, name) - 1) == 0,
        lambda c: low,
    )


_CONFIG_RULES = (
    _power_of_two("block_m", 16),
    _power_of_two("block_n", 16),
    _power_of_two("block_qk", 16),
    _power_of_two("block_vo", 16),
    Rule(
        "schedule",
        "must be 'direct', 'even', 'scan' or 'fixed'",
        lambda c: c.schedule in ("direct", "even", "scan", "fixed"),
    ),
    Rule(
        "max_splits",
        "must be >= 1, and 1 when direct",
        lambda c: c.max_splits >= 1 and (c.schedule != "direct" or c.max_splits == 1),
    ),
)


def _next_power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def choose_tiles(problem: AttentionProblem) -> tuple[int, int, int, int, int, int]:
    """(block_m, block_n, block_qk, block_vo, num_warps, num_stages) for a problem.

    Shared memory is at most 160 KiB with the query tile counted, so that compute capability 8.0
    holds it; a compile test asserts that for every row of the table.
    """
    block_qk = max(16, _next_power_of_two(problem.head_dim_qk))
    block_vo = max(16, _next_power_of_two(problem.head_dim_vo))
    widest = max(block_qk, block_vo)
    rows = problem.max_qo_len * problem.gqa_group_size
    if problem.batch_invariant:  # the tile may not depend on the longest request of the batch
        rows = problem.gqa_group_size
    size = max(dtype_bytes(problem.q_dtype), dtype_bytes(problem.kv_dtype))
    most_rows = 128 if widest <= 128 else 64 if widest == 256 else 32
    if size == 4:
        most_rows = min(most_rows, 32 if widest >= 256 else 64)
    block_m = min(max(16, _next_power_of_two(rows)), most_rows)
    row_bytes = (block_qk + block_vo) * size
    # K and V tiles of about 32 KiB and two of them in flight a program, two programs an SM. On an
    # H200 four warps beat eight by 1.4 × at D128, block_n 64 tied with 128 and beat 32 by 2-8 %.
    block_n = min(128, max(16, 1 << ((32 << 10) // row_bytes).bit_length() - 1))
    num_warps = 8 if block_m >= 128 or (block_m >= 64 and widest >= 256) else 4
    room = (160 << 10) - block_m * (block_qk + block_n) * size
    buffers = max(1, min(3 if widest <= 64 else 2, room // (block_n * row_bytes)))
    # The pipeliner spends a stage between page id and tile: 2 n + 1 stages keep n tiles in flight.
    num_stages = 2 * buffers + 1 if problem.cache_kind == "paged" else buffers + 1
    return block_m, block_n, block_qk, block_vo, num_warps, num_stages


def choose_config(
    problem: AttentionProblem, device: DeviceFacts, has_indptr: bool = False
) -> TritonConfig:
    """The launch geometry of a problem on a device; lengths are not known here, only capacities.

    has_indptr: the queries come with a `qo_indptr`, equally many a request or not. A program then
    finds its request by the offsets, at slot `qo_indptr[b] * group // block_m + b`, and there are
    more slots than tiles.
    """
    block_m, block_n, block_qk, block_vo, num_warps, num_stages = choose_tiles(problem)
    tiles = {
        "block_m": block_m,
        "block_n": block_n,
        "block_qk": block_qk,
        "block_vo": block_vo,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }
    packed = problem.total_qo_len * problem.gqa_group_size
    if problem.uniform and problem.batch and (problem.batch == 1 or not has_indptr):
        units = problem.batch * _ceil_div(problem.max_qo_len * problem.gqa_group_size, block_m)
    else:
        units = _ceil_div(packed, block_m) + problem.batch
    row_bytes = problem.total_qo_len * problem.num_qo_heads * (problem.head_dim_vo + 1) * 4
    most_splits = max(1, MAX_SCRATCH_BYTES // max(row_bytes, 1))

    if problem.batch_invariant:
        return TritonConfig(schedule="fixed", items=units, **_fixed_fields(problem, tiles), **tiles)

    slots = max(1, 2 * device.num_sms // problem.num_kv_heads)
    tokens = MIN_SPLIT_TOKENS if problem.batch == 1 else MIN_SPLIT_TOKENS_BATCHED
    min_tiles = max(1, tokens // block_n)
    splits = min(_ceil_div(problem.kv_capacity, min_tiles * block_n), slots, most_splits)
    if splits <= 1 or problem.batch > MAX_SCANNED_REQUESTS or units >= slots * 4 * MOST_WAVES:
        return TritonConfig(schedule="direct", items=units, **tiles)
    common = {"max_splits": splits, "slots": slots, "min_tiles": min_tiles, **tiles}
    if problem.batch == 1:
        most = max(1, min(splits, slots // units))
        return TritonConfig(schedule="even", items=units, **{**common, "max_splits": most})
    finest = units * _ceil_div(problem.kv_capacity, min_tiles * block_n)
    return TritonConfig(
        schedule="scan",
        items=units + min(finest, slots * MOST_WAVES),
        **common,
    )


def _fixed_fields(problem: AttentionProblem, tiles: dict[str, int]) -> dict[str, int]:
    """Splits of a batch-invariant problem.

    The kernel cuts a request by `slots`, `chunk_tiles` and its own lengths (`fixed_splits`), so
    these two follow from heads and dimensions alone; the capacity and the window bound no more than
    the splits that there is room for.
    """
    chunk_tiles = max(1, BATCH_INVARIANT_SPLIT_TOKENS // tiles["block_n"])
    slots = max(1, BATCH_INVARIANT_PROGRAMS // problem.num_kv_heads)
    shown = _ceil_div(problem.kv_capacity, tiles["block_n"])
    if problem.window_left is not None:  # whose first token may lie anywhere in a tile
        reach = problem.window_left + problem.max_qo_len
        shown = min(shown, _ceil_div(reach, tiles["block_n"]) + 1)
    units = _ceil_div(problem.max_qo_len * problem.gqa_group_size, tiles["block_m"])
    most = slots // max(units, 1) if problem.uniform else slots
    splits = max(1, min(_ceil_div(shown, chunk_tiles), most))
    return {"chunk_tiles": chunk_tiles, "slots": slots, "max_splits": splits}


@dataclass(frozen=True, slots=True)
class SlotShape:
    """Scratch of the `"fixed"` schedule: `[batch, num_kv_heads, slots, rows, head_dim_vo]` fp32.

    slots: one for each query tile and split. rows: query rows of a tile. merge_rows: rows of a
    request and KV head that can be split. All 0 where none can: one split leaves no state.

    With the lse that is at most `BATCH_INVARIANT_PROGRAMS * block_m * (head_dim_vo + 1) * 4` bytes
    a request (or that of one program a KV head, where there are more of those), whatever its
    capacity; 1 MiB a request for decode with 8 query heads a KV head of 128.
    """

    slots: int
    rows: int
    merge_rows: int

    @classmethod
    def of(cls, problem: AttentionProblem, config: TritonConfig) -> SlotShape:
        """The smallest shape that holds every request of the problem."""
        packed = problem.max_qo_len * problem.gqa_group_size
        if config.max_splits == 1 or not packed:
            return cls(0, 0, 0)
        units = _ceil_div(packed, config.block_m)
        return cls(
            slots=min(config.slots, units * config.max_splits),
            rows=min(config.block_m, packed),
            merge_rows=min(packed, config.slots // 2 * config.block_m),
        )


def wide_scale(problem: AttentionProblem) -> bool:
    """Whether the factors of the scores must be applied one by one: see `WIDE_FACTOR`."""
    scale, cap = abs(problem.sm_scale), problem.logits_soft_cap
    factors = (scale * LOG2E,) if cap is None else (scale, scale / cap, cap * LOG2E)
    bound = WIDE_FACTOR if problem.kv_scales is None else WIDE_FACTOR_FP8
    return any(factor >= bound or 0 < factor <= 1 / bound for factor in factors)
