// What the decode kernel does around its products: where the tokens of a block lie, the ring that
// its warps fill, the answer, the merge of what blocks share.
#ifndef STREAM_ATTENTION_DECODE_WORK_CUH_
#define STREAM_ATTENTION_DECODE_WORK_CUH_

#include <stddef.h>

#include <type_traits>

#include "decode_cursor.cuh"
#include "decode_exchange.cuh"
#include "decode_ops.cuh"
#include "decode_shape.cuh"

namespace stream_attention {

constexpr float kLn2 = 0.6931471805599453f;

// Where a warp's next chunk lies: a page and a slot in it for each sixteen tokens, or, where pages
// do not hold whole sixteens, for each lane's token.
template <int kSubs>
struct Place {
  int page[kSubs];
  int slot[kSubs];
  int live;  // tokens of the chunk that the request has; none: nothing to copy
};

enum Tokens { kKey, kValue };

// Tokens of the request at hand that all rows see, where scores have no cap.
struct Seen {
  int from, to;
};

// A request of the block's range that other blocks share.
struct Shared {
  int request;
  int first_block;
  int parts;
  int log2_size;  // of the slices of its answer
};

// A batch-invariant request of the block's range: `parts` blocks have nodes of it, of which the
// block is the `slice`-th.
struct SharedNodes {
  int request;
  int parts;
  int log2_size;  // of the slices of its answer
  int slice;
  NodeCuts cuts;
};

// What the threads of a block hold together in shared memory, so that none has it in a register.
template <class Sharing>
struct Control {
  // Where the block stands.
  int lead;  // of the KV heads times groups of rows
  int head, row_start, live_rows;
  int block;  // of those that share the head's tiles
  // Its range, and the request at hand.
  Range range;  // `before`: the tiles ahead of that request
  int first_request;
  int request_tiles;
  int release_at;  // tiles left when the next launch's blocks may come
  Sharing current;
  Sharing owed;     // a request that ends inside the range and that others began: merged later
  uint64_t merged;  // barrier: the warps' states have been merged
};

template <class T, class E, class Shape, bool kWholePages>
class DecodeWork {
 protected:
  static constexpr int D = Shape::D, N = Shape::N;
  static constexpr int kSubs = Shape::kChunk / 16;
  static constexpr int kVectorsPerRow = D / 4;
  static constexpr int kAhead = Shape::kAhead;
  using ChunkPlace = Place<kSubs>;
  using Sharing = std::conditional_t<Shape::kInvariant, SharedNodes, Shared>;
  using Control = stream_attention::Control<Sharing>;

  __device__ __forceinline__ DecodeWork(const DecodeLaunch& launched, char* shared)
      : launch(launched),
        p(launched.p),
        control(*reinterpret_cast<Control*>(shared + Shape::kControlAt)),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32) {
    static_assert(sizeof(Control) <= Shape::kControlBytes);
    ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    // Neighbours in the grid read the heads of a page together.
    const int lead = blockIdx.x % launch.heads, head = lead / launch.row_groups;
    const int row_start = lead % launch.row_groups * N;
    if (threadIdx.x == 0) {
      control.lead = lead;
      control.head = head;
      control.row_start = row_start;
      control.live_rows = min(N, launch.rows_total - row_start);
      control.block = blockIdx.x / launch.heads;
      control.owed.parts = 1;
      init_barrier(merged(), Shape::kThreads);
    }
    __syncthreads();
    const uint32_t own_ring = ring + warp * Shape::kChunkBytes;
    own_tokens = warp * Shape::kChunk;
    write_at = own_ring + Shape::Tokens::offset(row_of(0), piece_of(0));
    // Where K and V are widened, registers are too few.
    if constexpr (sizeof(E) > 1 || !Shape::kInvariant) write_at = computed_once(write_at);
    read_key_at = own_ring + Shape::Tokens::offset(lane % 16, lane / 16);
    read_value_at = own_ring + Shape::Tokens::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    if constexpr (sizeof(E) > 1) {
      read_key_at = computed_once(read_key_at);
      read_value_at = computed_once(read_value_at);
    }
    key = static_cast<const char*>(p.key) + head * p.k_head_stride * sizeof(E);
    value = static_cast<const char*>(p.value) + head * p.v_head_stride * sizeof(E);
    if constexpr (kRegular) {
      key += (row_of(0) * uint64_t{launch.k_token_pieces} + piece_of(0)) * 16;
      value += (row_of(0) * uint64_t{launch.v_token_pieces} + piece_of(0)) * 16;
    }
    key = computed_once(key);
    value = computed_once(value);
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  }

  __device__ __forceinline__ uint32_t merged() const {
    return ring + Shape::kControlAt + static_cast<uint32_t>(offsetof(Control, merged));
  }

  // The first token of the warp's chunk.
  __device__ __forceinline__ int chunk_begin(const Cursor& at) const {
    return at.tile * Shape::kTile + own_tokens;
  }

  // Where the id of the index-th page of a request lies.
  __device__ __forceinline__ const int32_t* id_of(int request, uint32_t index) const {
    const uint64_t batch_stride = static_cast<uint32_t>(p.table_batch_stride);
    return p.page_table + control.head * p.table_head_stride +
           (static_cast<uint32_t>(request) * batch_stride + index);
  }

  __device__ __forceinline__ Lens lens() const { return Lens(p, control.head); }

  template <class AnyLens>
  __device__ __forceinline__ void next_tile(const AnyLens& known, Cursor& at) const {
    advance<Shape>(p, known, at);
  }

  __device__ __forceinline__ void next_tile(Cursor& at) const {
    advance<Shape>(p, [&](int request) { return lens()(request); }, at);
  }

  // kHint: before the wait for the producer; what is found there may not be true.
  template <bool kHint>
  __device__ __forceinline__ ChunkPlace place_of(const Cursor& at) const {
    const int begin = chunk_begin(at);
    ChunkPlace place;
    place.live = at.in_block > 0 ? at.kv_len - begin : 0;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      const int offset = kWholePages ? sub * 16 : lane % Shape::kChunk;
      place.page[sub] = at.request;
      place.slot[sub] = begin + offset;
      if (p.page_table != nullptr) {
        const uint32_t index = launch.page(begin + offset);
        place.slot[sub] -= index * p.page_size;
        place.page[sub] = 0;
        const int32_t* from = id_of(at.request, index);
        if (offset < place.live) place.page[sub] = kHint ? read_hint(from) : *from;
      }
    }
    return place;
  }

  // Begins to look up places from `at` on: the first ids are on their way when this returns.
  __device__ __forceinline__ void begin_lookup(const Cursor& at) {
    if constexpr (kWholePages) {
      ids.left = 0;
      if (at.in_block > 0) ids.next = read_ids(at.request, at.tile, at.kv_len);
    } else {
      looked_up = place_of<false>(at);
    }
  }

  // The place at `at`, which moves on by a tile. Every call asks for what a later one needs.
  __device__ __forceinline__ ChunkPlace look_up(Cursor& at) {
    ChunkPlace place;
    if constexpr (kWholePages) {
      place = known_place(at);
      if (at.in_block > 0) next_tile(at);
    } else {
      place = looked_up;
      if (at.in_block > 0) next_tile(at);
      looked_up = place_of<false>(at);
    }
    return place;
  }

  // Asks for the tokens of K at `place`, which may not be there to be read yet, to come into L2.
  __device__ __forceinline__ void prefetch_keys(const ChunkPlace& place) const {
    constexpr int kLineBytes = 128, kLines = (D * sizeof(E) + kLineBytes - 1) / kLineBytes;
    const int token = lane % Shape::kChunk, sub = kWholePages ? token / 16 : 0;
    if (token >= place.live) return;
    const int page = sub == 0 ? place.page[0] : place.page[kSubs - 1];
    int slot = sub == 0 ? place.slot[0] : place.slot[kSubs - 1];
    if constexpr (kWholePages) slot += token % 16;
    const char* row = static_cast<const char*>(p.key) +
                      control.head * p.k_head_stride * sizeof(E) +
                      pieces_to(page, slot, launch.k_page_pieces, launch.k_token_pieces) * 16;
#pragma unroll
    for (int line = 0; line < kLines; line += 32 / Shape::kChunk) {
      const int own = line + lane / Shape::kChunk;
      if (own < kLines) prefetch_to_l2(row + own * kLineBytes);
    }
  }

  // Of a place that was read as a hint: whether it lies in the pool.
  __device__ __forceinline__ bool exists(const ChunkPlace& place) const {
    bool inside = true;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      inside = inside && place.page[sub] >= 0 && place.page[sub] < p.num_pages;
    }
    return __all_sync(0xffffffffu, inside);
  }

  static __device__ __forceinline__ bool same_pages(const ChunkPlace& a, const ChunkPlace& b) {
    bool same = a.live == b.live;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) same = same && a.page[sub] == b.page[sub];
    return same;
  }

  // Page ids of a warp's chunks in the tiles from `first_tile` on, a lane's each.
  static constexpr int kTilesOfIds = 32 / kSubs;
  __device__ __forceinline__ int read_ids(int request, int first_tile, int kv_len) const {
    const int token = (first_tile + lane / kSubs) * Shape::kTile + own_tokens + lane % kSubs * 16;
    if (p.page_table == nullptr || token >= kv_len) return 0;
    return *id_of(request, launch.page(token));
  }

  // Ids are read many tiles at once and long before they are used: they queue behind the tokens.
  __device__ __forceinline__ ChunkPlace known_place(const Cursor& at) {
    ChunkPlace place;
    place.live = 0;
    if (at.in_block <= 0) return place;
    if (ids.left == 0) {
      ids.now = ids.next;
      ids.left = min(at.in_request, kTilesOfIds);
      const bool same = at.in_request > kTilesOfIds, another = at.in_block > at.in_request;
      ids.next = read_ids(
          at.request + (same ? 0 : 1),
          same ? at.tile + kTilesOfIds : tiles_of<Shape>(p, at.next_kv_len).first,
          same ? at.kv_len : another ? at.next_kv_len : 0);
    }
    const int begin = chunk_begin(at);
    place.live = at.kv_len - begin;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      const int token = begin + sub * 16;
      place.page[sub] = at.request;
      place.slot[sub] = token;
      if (p.page_table != nullptr) {
        place.page[sub] = __shfl_sync(0xffffffffu, ids.now, sub);
        place.slot[sub] -= launch.page(token) * p.page_size;
      }
    }
    ids.now = __shfl_down_sync(0xffffffffu, ids.now, kSubs);
    --ids.left;
    return place;
  }

  // Copies K or V of the chunk at `place` to ring slot `slot`. Always one group of copies.
  template <Tokens kOf>
  __device__ __forceinline__ void copy(int slot, const ChunkPlace& place) const {
    constexpr bool kIsKey = kOf == kKey;
    if (place.live > 0) {
      copy_tokens(slot * Shape::kSlotBytes, kIsKey ? key : value,
                  kIsKey ? launch.k_page_pieces : launch.v_page_pieces,
                  kIsKey ? launch.k_token_pieces : launch.v_token_pieces, place);
    }
    commit_copies();
  }

  // Fills the ring.
  __device__ __forceinline__ void copy_first(const ChunkPlace (&places)[kAhead + 1]) const {
#pragma unroll
    for (int slot = 0; slot < Shape::kSlots; ++slot) {
      if (slot % 2 == 0) {
        copy<kKey>(slot, places[slot / 2]);
      } else {
        copy<kValue>(slot, places[slot / 2]);
      }
    }
  }

  // Where a lane's i-th copy of sixteen tokens goes: a row and a piece of it. Copies of rows that
  // divide a warp's copy are regular: a lane has one piece, and rows at equal distances.
  static constexpr int kCopies = (16 * Shape::kPieces + 31) / 32;
  static constexpr bool kEven = 16 * Shape::kPieces % 32 == 0;  // all lanes have all copies
  static constexpr bool kRegular = kWholePages && 32 % Shape::kPieces == 0;
  static constexpr int kRowsEach = 32 / Shape::kPieces;
  __device__ __forceinline__ int row_of(int i) const { return (lane + i * 32) / Shape::kPieces; }
  __device__ __forceinline__ int piece_of(int i) const { return (lane + i * 32) % Shape::kPieces; }

  static __device__ __forceinline__ uint64_t pieces_to(int page, int slot, uint32_t page_pieces,
                                                       uint32_t token_pieces) {
    return static_cast<uint32_t>(page) * uint64_t{page_pieces} +
           static_cast<uint32_t>(slot) * uint64_t{token_pieces};
  }

  // Of the lane's i-th copy of sixteen tokens, in ring slot 0.
  __device__ __forceinline__ uint32_t target_of(int sub, int i) const {
    if constexpr (kRegular) return Shape::Tokens::below(write_at, sub * 16 + i * kRowsEach);
    return ring + warp * Shape::kChunkBytes +
           Shape::Tokens::offset(sub * 16 + row_of(i), piece_of(i));
  }

  // Zeros for tokens that the request does not have; their addresses mean nothing. `slot_at`: of
  // the ring slot; `source`: of the head, and where copies are regular of the lane's row and piece.
  __device__ __forceinline__ void copy_tokens(uint32_t slot_at, const char* source,
                                              uint32_t page_pieces, uint32_t token_pieces,
                                              const ChunkPlace& place) const {
    if constexpr (kWholePages) {
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
        const char* tokens =
            source + pieces_to(place.page[sub], place.slot[sub], page_pieces, token_pieces) * 16;
        const int left = place.live - sub * 16 - (kRegular ? row_of(0) : 0);
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          if constexpr (kRegular) {
            copy_async(slot_at + target_of(sub, i), tokens, i * kRowsEach < left ? 16 : 0, policy);
            tokens += uint64_t{token_pieces} * (16 * kRowsEach);
          } else {
            if (!kEven && row_of(i) >= 16) break;
            copy_async(slot_at + target_of(sub, i),
                       tokens + (row_of(i) * uint64_t{token_pieces} + piece_of(i)) * 16,
                       row_of(i) < left ? 16 : 0, policy);
          }
        }
      }
    } else {
      const uint64_t of_token =
          lane % Shape::kChunk < place.live
              ? pieces_to(place.page[0], place.slot[0], page_pieces, token_pieces)
              : 0;
#pragma unroll
      for (int i = 0; i < Shape::kChunk * Shape::kPieces / 32; ++i) {
        const uint64_t pieces = __shfl_sync(0xffffffffu, of_token, row_of(i)) + piece_of(i);
        copy_async(slot_at + target_of(0, i), source + pieces * 16,
                   row_of(i) < place.live ? 16 : 0, policy);
      }
    }
  }

  // How many blocks share the request at `at`, and the first of them.
  __device__ __forceinline__ Shared sharers(const Cursor& at, bool from_start,
                                            const Range& range) const {
    const bool to_end = at.in_request <= at.in_block;
    if (from_start && to_end) return Shared{at.request, control.block, 1, 0};
    if (range.parts > 0) {
      const int log2_size = slice_log2(control.live_rows * kVectorsPerRow, range.parts);
      return Shared{at.request, range.first_block, range.parts, log2_size};
    }
    const EqualCuts cuts(range.total, launch.blocks);
    const int count = tiles_of<Shape>(p, at.kv_len).count;
    Shared shared;
    shared.request = at.request;
    shared.first_block = from_start ? control.block : cuts.owner(range.before);
    const int last_block = to_end ? control.block : cuts.owner(range.before + count - 1);
    shared.parts = last_block - shared.first_block + 1;
    shared.log2_size = slice_log2(control.live_rows * kVectorsPerRow, shared.parts);
    return shared;
  }

  // A block has two regions: one for the request that it begins and others end, one for the
  // request that it does not begin.
  __device__ __forceinline__ Region region_of(const Shared& shared, int slice) const {
    const int blocks = static_cast<int>(launch.blocks.divisor), vectors = N * kVectorsPerRow;
    const int of_block = control.lead * blocks + shared.first_block + slice;
    const int index = 2 * of_block + (slice == 0 ? 1 : 0);
    return Region(p.scratch + index * region_floats(vectors, blocks),
                  region_items(vectors, blocks));
  }

  // The state of four columns of a row, the `vector`-th of the block's: the answer, if no other
  // block shares the request, else it goes to the block that merges it.
  __device__ __forceinline__ void give(const Shared& shared, int vector,
                                       const State& state) const {
    if (shared.parts == 1) {
      write(shared.request, vector, state);
    } else {
      const int part = control.block - shared.first_block;
      const int size = 1 << shared.log2_size;
      const int item = (part << shared.log2_size) + (vector & (size - 1));
      region_of(shared, vector >> shared.log2_size).publish(item, state);
    }
  }

  // This block's slice of the answer of a shared request. A warp takes a few vectors, its lanes
  // the parts of each; the order of additions depends on the shape alone.
  __device__ void merge_slice(const Shared& shared) const {
    const int vectors = control.live_rows * kVectorsPerRow;
    const int log2_size = shared.log2_size;
    const int slice = control.block - shared.first_block, size = 1 << log2_size;
    const int begin = slice << log2_size;
    const Region region = region_of(shared, slice);
    int groups = 32;
    while (groups > shared.parts && 32 / groups < size) groups /= 2;
    const int columns = 32 / groups;
    for (int round = warp * columns; round < size; round += Shape::kWarps * columns) {
      const int column = round + lane % columns, vector = begin + column;
      State state = empty_state();
      for (int start = 0; start < shared.parts; start += 2 * groups) {
        const int part = start + lane / columns, other = part + groups;
        const int count = vector >= vectors ? 0 : (part < shared.parts) + (other < shared.parts);
        region.take(state, count, (part << log2_size) + column, (other << log2_size) + column);
      }
      add_across_lanes(state, columns);
      if (lane < columns && vector < vectors) write(shared.request, vector, state);
    }
  }

  // Natural logarithm of the sum of weights.
  static __device__ __forceinline__ float log_of(const State& state) {
    const float power = log2f(state.sum);
    if constexpr (Shape::kInvariant) return __fmul_rn(__fadd_rn(state.top, power), kLn2);
    return (state.top + power) * kLn2;
  }

  // Four elements of one row's answer; the thread of column 0 writes the lse.
  __device__ __forceinline__ void write(int request, int vector, State state) const {
    const int row = control.row_start + vector / kVectorsPerRow;
    const int column = vector % kVectorsPerRow * 4, head = control.head;
    const int token = launch.group(row);
    const int q_head = head * p.group + row - token * p.group;
    const int64_t place = static_cast<int64_t>(request) * p.qo_len + token;
    const bool empty = state.sum == 0.f;
    if (p.attn_sink != nullptr && !empty) {
      const float4 nothing = make_float4(0.f, 0.f, 0.f, 0.f);
      if constexpr (Shape::kInvariant) {
        state = add_rounded(state, State{nothing, __fmul_rn(p.attn_sink[q_head], kLog2E), 1.f});
      } else {
        add(state, State{nothing, p.attn_sink[q_head] * kLog2E, 1.f});
      }
    }
    float inverse = empty ? 0.f : __fdividef(1.f, state.sum);
    if (p.value_scale != nullptr) inverse *= p.value_scale[head * p.value_scale_stride];
    uint2 words;
    words.x = empty ? 0u : Half<T>::pack(state.out.x * inverse, state.out.y * inverse);
    words.y = empty ? 0u : Half<T>::pack(state.out.z * inverse, state.out.w * inverse);
    T* target = static_cast<T*>(p.out) + place * p.out_token_stride +
                static_cast<int64_t>(q_head) * p.out_head_stride + column;
    *reinterpret_cast<uint2*>(target) = words;
    if (p.lse != nullptr && column == 0) {
      p.lse[place * p.lse_token_stride + q_head * p.lse_head_stride] =
          empty ? -INFINITY : log_of(state);
    }
  }

  const DecodeLaunch& launch;
  const StreamAttentionDecodeParams& p;
  Control& control;
  const int lane, warp;
  int own_tokens;     // where the warp's chunk begins in a tile
  uint32_t ring;      // in shared memory
  uint32_t write_at, read_key_at, read_value_at;  // the lane's first access to the warp's slot 0
  const char* key;
  const char* value;
  uint64_t policy;
  struct {
    int now, next;  // from the tile at hand on, the first lane's first; and of those that follow
    int left;       // tiles that `now` has ids for
  } ids;                 // where pages hold whole sixteens
  ChunkPlace looked_up;  // elsewhere: the next place
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_WORK_CUH_
