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
BATCH_INVARIANT_SPLIT_TOKENS = 1024
MAX_BATCH_INVARIANT_SPLITS = 128


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class TritonConfig:
    """Tiles and schedule of one plan; a pure function of problem and device.

    block_m: packed query rows a tile. block_n: KV tokens a tile. schedule: `"direct"`, `"even"`,
    `"scan"` or `"fixed"` (see the kernel). max_splits: partial states a row can have. slots:
    programs a KV head that run at once. min_tiles: fewest tiles a split. chunk_tiles: tiles a
    split, `"fixed"` only. items: programs a KV head on grid axis 0.
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


def choose_config(problem: AttentionProblem, device: DeviceFacts) -> TritonConfig:
    """The launch geometry of a problem on a device; lengths are not known here, only capacities."""
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
    if problem.uniform and problem.batch:
        units = problem.batch * _ceil_div(problem.max_qo_len * problem.gqa_group_size, block_m)
    else:
        units = _ceil_div(packed, block_m) + problem.batch
    row_bytes = problem.total_qo_len * problem.num_qo_heads * (problem.head_dim_vo + 1) * 4
    most_splits = max(1, MAX_SCRATCH_BYTES // max(row_bytes, 1))

    if problem.batch_invariant:
        tokens = max(
            BATCH_INVARIANT_SPLIT_TOKENS,
            _next_power_of_two(_ceil_div(problem.kv_capacity, MAX_BATCH_INVARIANT_SPLITS)),
        )
        splits = _ceil_div(problem.kv_capacity, tokens)
        if splits <= 1:
            return TritonConfig(schedule="direct", items=units, **tiles)
        return TritonConfig(
            schedule="fixed",
            max_splits=splits,
            chunk_tiles=max(1, tokens // block_n),
            items=units,
            **tiles,
        )

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
