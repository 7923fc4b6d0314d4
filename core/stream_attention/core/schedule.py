"""`KernelSchedule`: how a compiled kernel does its work, as data that prints and evaluates back.

A record holds what is decided when a kernel is compiled, and nothing of a call: batch, rows and
tokens are not in it, so one binary serves many problems and one record describes it for all of
them. `VOCABULARY` says what every word means on the hardware; what an architecture allows is
`core.legality`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int, is_name

VOCABULARY: dict[str, dict[str, str]] = {
    # What a block has for its own, and is alone to read or to write.
    "ownership": {
        "kv_range": "a contiguous range of the KV tiles of one KV head, requests in a row: it "
        "reads them once and ends as many requests as the range has",
        "query_tile": "a tile of query rows, whose whole KV sequence it walks along",
        "kv_tile": "a tile of KV tokens, for which it walks along all query rows",
        "output_vectors": "vectors of the output's rows, for which it reads all partial states",
    },
    # Which operand of S = Q Kᵀ lies on M, the long side of a tensor-core product.
    "orientation": {
        "tokens_on_m": "Sᵀ = K Qᵀ and Oᵀ += Vᵀ P: KV tokens on M, query rows on N; few rows "
        "leave no part of M empty",
        "rows_on_m": "S = Q Kᵀ and O += P V: query rows on M, KV tokens on N",
        "none": "no product: sums of vectors",
    },
    # Who has one online-softmax state of its own, to be merged with the others' at the end.
    "state_scope": {
        "thread": "every thread, of its vector and its share of the partial states",
        "warp": "every warp, of its own tokens of each tile",
        "block": "the block as a whole, of all tokens of a tile",
    },
    # How the warps of a block share the work.
    "roles": {
        "alike": "every warp copies, multiplies and weighs what is its own",
        "weigh_and_add": "one warpgroup makes scores and weights, another one adds values up and "
        "copies the tiles ahead",
        "producer_consumer": "one warp copies for the others, which multiply",
    },
    # What brings K and V, or partial states, from global memory.
    "load_engine": {
        "ld_global": "loads into registers, up to the architecture's widest (ld.global)",
        "cp_async": "16 bytes a thread into shared memory, past registers (cp.async)",
        "tma_bulk": "contiguous bytes into shared memory, one thread asks (cp.async.bulk)",
        "tma_tensor": "boxes of a tensor map into shared memory (cp.async.bulk.tensor)",
    },
    # How the address of a token is found.
    "gather": {
        "none": "rows lie at strides from a base",
        "page_of_sixteen": "one page id for sixteen neighbouring tokens",
        "page_of_token": "one page id for each token",
    },
    # What multiplies.
    "mma_engine": {
        "none": "no tensor cores",
        "mma_sync": "products of a warp, operands in registers (mma.sync)",
        "wgmma": "products of a warpgroup of 128 threads, operands in shared memory "
        "(wgmma.mma_async)",
        "tcgen05": "products that one thread asks for, operands in shared memory, sums in tensor "
        "memory (tcgen05.mma)",
    },
    # Where S and O are summed up.
    "accumulator": {
        "registers": "in registers of the threads that multiply",
        "tmem": "in tensor memory, columns of 128 lanes of 32 bits",
    },
    # How the reduction over one output row's tokens, or states, is parted among blocks.
    "split": {
        "none": "one block has all of it",
        "equal_ranges": "blocks have equal ranges of tiles, cut on the device from the lengths; "
        "a range's end may lie anywhere in a request",
        "tree_nodes": "equal ranges whose ends are moved up to nodes of a tree that each request "
        "has for itself, so that the order of sums is the request's own",
        "fixed_tokens": "every so many tokens a part, whatever the lengths",
    },
    # How the parts of a row that several blocks have come together.
    "merge": {
        "none": "there are none",
        "exchange": "inside the launch: blocks put states into global memory, and each polls and "
        "merges its slice of the answer, in the order of the blocks",
        "tree_exchange": "the same, in the order of the request's tree, which makes the bits "
        "independent of the cuts",
        "cluster": "inside the launch, through shared memory of a cluster's blocks",
        "second_launch": "states go to global memory, and a kernel of its own merges them",
    },
    # How a block comes to its work.
    "scheduler": {
        "grid": "by its number in the grid: one piece of work a block",
        "device_ranges": "one block an SM at most; each finds its range from the lengths, and "
        "nothing is planned on the host",
        "host_list": "from a list that the host has planned",
        "work_queue": "one block an SM; each asks for the next piece of work by an atomic",
    },
    # What the launch asks of the driver.
    "launch": {
        "plain": "nothing: it begins when the kernel before has ended",
        "dependent": "it may begin while the kernel before it ends (programmatic dependent launch)",
        "dependent_cooperative": "the same, and where blocks wait for one another all of them are "
        "resident at once (cooperative launch)",
    },
    # How exp(S - max) keeps in range.
    "softmax": {
        "online": "the maximum is raised, and sums are scaled, by every tile that exceeds it",
        "online_headroom": "only by a tile that exceeds it by more than some powers of two",
        "states": "weights exp(lse - max) of states whose softmax is done",
    },
    # What happens to a finished row.
    "epilogue": {
        "normalise": "sink, division by the sum, rounding once to the output's dtype, and lse",
        "partial_state": "sums and maximum as they are, for somebody else to merge",
    },
}
"""Field → word → what it means on the hardware. A field's value must be one of its words."""

TARGETS = ("sm_80", "sm_90a", "sm_100a")
ASYNCHRONOUS = ("cp_async", "tma_bulk", "tma_tensor")
IN_LAUNCH_MERGES = ("exchange", "tree_exchange")
WARPGROUP_ENGINES = ("wgmma", "tcgen05")
# The least M of a product; N is a multiple of 8 everywhere (PTX ISA: mma, wgmma, tcgen05.mma).
LEAST_M = {"mma_sync": 16, "wgmma": 64, "tcgen05": 64}


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class KernelSchedule:
    """How one compiled kernel works.

    name: unique in its package. kernel: the name of the launched function. target: what it is
    compiled for. instances: its compiled instances by their names in the library's resources;
    those of one record differ in dtypes only. The fields of `VOCABULARY` take its words.
    threads: most threads of a block. rows: query rows of a tile (packed: queries times group).
    tile_tokens: KV tokens of a tile. head_dim: columns; rows, tile_tokens and head_dim are 0 where
    nothing is multiplied and a call decides. element_bytes: of what is streamed, K and V or partial
    states. vector_elements: elements that a thread moves at once. stages: slots of the ring in
    shared memory, each of K or V of one tile; 0 where loads go to registers.
    shared_bytes: most dynamic shared memory of a block. blocks_per_sm: blocks that must find room
    on an SM together. tmem_columns: of tensor memory. cluster_size: blocks of a cluster.
    """

    name: str
    kernel: str
    target: str
    ownership: str
    threads: int
    element_bytes: int
    vector_elements: int
    load_engine: str
    softmax: str
    state_scope: str
    instances: tuple[str, ...] = ()
    orientation: str = "none"
    roles: str = "alike"
    rows: int = 0
    tile_tokens: int = 0
    head_dim: int = 0
    gather: str = "none"
    stages: int = 0
    mma_engine: str = "none"
    accumulator: str = "registers"
    tmem_columns: int = 0
    shared_bytes: int = 0
    blocks_per_sm: int = 1
    split: str = "none"
    merge: str = "none"
    scheduler: str = "grid"
    cluster_size: int = 1
    launch: str = "plain"
    epilogue: str = "normalise"

    def __post_init__(self) -> None:
        check_rules(self, SCHEDULE_RULES)

    __repr__ = evaluable_repr

    @property
    def ring_bytes(self) -> int:
        """Bytes that the ring's tiles take, without what lies between rows."""
        return self.stages * self.tile_tokens * self.head_dim * self.element_bytes


def _word(name: str) -> Rule:
    words = VOCABULARY[name]
    return Rule(
        name,
        f"must be one of {', '.join(words)}",
        lambda s: getattr(s, name) in words,
        lambda s: repr(next(iter(words))),
    )


def _count(name: str, low: int) -> Rule:
    return Rule(
        name,
        f"must be an int >= {low}",
        lambda s: is_int(getattr(s, name)) and getattr(s, name) >= low,
        lambda s: low,
    )


def _m_and_n(schedule: KernelSchedule) -> tuple[int, int]:
    sides = schedule.tile_tokens, schedule.rows
    return sides if schedule.orientation == "tokens_on_m" else sides[::-1]


def _fits_product(schedule: KernelSchedule) -> bool:
    if schedule.mma_engine not in LEAST_M:  # none, or a word that another rule refuses
        return True
    m, n = _m_and_n(schedule)
    return m > 0 and n > 0 and m % LEAST_M[schedule.mma_engine] == 0 and n % 8 == 0


def _distinct(names: Any) -> bool:
    return isinstance(names, tuple) and all(map(is_name, names)) and len(set(names)) == len(names)


SCHEDULE_RULES: tuple[Rule, ...] = (
    Rule("name", "must be a non-empty string", lambda s: is_name(s.name)),
    Rule("kernel", "must be a non-empty string", lambda s: is_name(s.kernel)),
    Rule(
        "target",
        f"must be one of {', '.join(TARGETS)}",
        lambda s: s.target in TARGETS,
        lambda s: repr(TARGETS[0]),
    ),
    Rule(
        "instances",
        "must be a tuple of distinct non-empty strings",
        lambda s: _distinct(s.instances),
    ),
    *(_word(name) for name in VOCABULARY),
    *(_count(name, 1) for name in ("element_bytes", "vector_elements", "blocks_per_sm")),
    *(_count(name, 0) for name in ("rows", "tile_tokens", "head_dim", "stages")),
    *(_count(name, 0) for name in ("tmem_columns", "shared_bytes")),
    Rule(
        "threads",
        "must be whole warps: a multiple of 32, at least 32",
        lambda s: is_int(s.threads) and s.threads >= 32 and s.threads % 32 == 0,
        lambda s: max(32, s.threads // 32 * 32),
    ),
    Rule(
        "cluster_size",
        "must be a power of two",
        lambda s: is_int(s.cluster_size) and s.cluster_size.bit_count() == 1 <= s.cluster_size,
        lambda s: 1,
    ),
    Rule(
        "threads",
        "warpgroup engines (wgmma, tcgen05) need whole warpgroups of 128",
        lambda s: s.mma_engine not in WARPGROUP_ENGINES or s.threads % 128 == 0,
        lambda s: -(-s.threads // 128) * 128,
    ),
    Rule(
        "orientation",
        "must be none without an mma_engine, and name the operand on M with one",
        lambda s: (s.orientation == "none") == (s.mma_engine == "none"),
        lambda s: "'none'" if s.mma_engine == "none" else "'tokens_on_m'",
    ),
    Rule(
        "mma_engine",
        "M of the tile must be a multiple of 16 (mma_sync) or 64 (wgmma, tcgen05), N of 8",
        _fits_product,
        value=lambda s: (s.mma_engine, *_m_and_n(s)),
    ),
    Rule(
        "accumulator",
        "must be tmem with tcgen05, registers without",
        lambda s: (s.accumulator == "tmem") == (s.mma_engine == "tcgen05"),
        lambda s: "'tmem'" if s.mma_engine == "tcgen05" else "'registers'",
    ),
    Rule(
        "tmem_columns",
        "must be a multiple of 32, positive with the accumulator in tmem and 0 without",
        lambda s: s.tmem_columns % 32 == 0 and (s.tmem_columns > 0) == (s.accumulator == "tmem"),
        lambda s: max(32, -(-s.tmem_columns // 32) * 32) if s.accumulator == "tmem" else 0,
    ),
    Rule(
        "stages",
        "asynchronous loads need a ring of one slot at least; others have none",
        lambda s: (s.stages > 0) == (s.load_engine in ASYNCHRONOUS),
        lambda s: 2 if s.load_engine in ASYNCHRONOUS else 0,
    ),
    Rule(
        "shared_bytes",
        "must hold the ring: stages * tile_tokens * head_dim * element_bytes",
        lambda s: s.shared_bytes >= s.ring_bytes,
        lambda s: s.ring_bytes,
    ),
    Rule(
        "merge",
        "must be none where nothing is split, and join the parts where something is",
        lambda s: (s.merge == "none") == (s.split == "none"),
        lambda s: "'none'" if s.split == "none" else "'exchange'",
    ),
    Rule(
        "launch",
        "blocks that wait for one another (exchange, tree_exchange) must be resident together",
        lambda s: s.merge not in IN_LAUNCH_MERGES or s.launch == "dependent_cooperative",
        lambda s: "'dependent_cooperative'",
    ),
    Rule(
        "cluster_size",
        "a merge in the cluster needs more than one block of it",
        lambda s: s.merge != "cluster" or s.cluster_size > 1,
        lambda s: 2,
    ),
)
