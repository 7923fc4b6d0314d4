// What the decode kernel does around its products: where the tokens of a block lie, and the ring
// that its warps fill.
#ifndef STREAM_ATTENTION_DECODE_WORK_CUH_
#define STREAM_ATTENTION_DECODE_WORK_CUH_

#include <stddef.h>

#include <type_traits>

#include "decode_cursor.cuh"
#include "decode_exchange.cuh"
#include "decode_ops.cuh"
#include "decode_shape.cuh"

namespace stream_attention {

// Where a warp's next chunk lies: a page and a slot in it for each sixteen tokens, or, where pages
// do not hold whole sixteens, for each lane's token.
template <int kSubs>
struct Place {
  int page[kSubs];
  int slot[kSubs];
  int live;  // tokens of the chunk that the request has, or kNoTile: nothing to copy
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
  float key_scale, value_scale;  // of fp8 K and V
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
  // No more than what `live` can be where there is something to copy. Products of all warps' tokens
  // read every chunk of a tile: of one without tokens zeros.
  static constexpr int kNoTile = Shape::kAllTogether ? -Shape::kTile : 0;
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
      if constexpr (Shape::kAllTogether) {
        Shape::init_barriers(ring);
      } else {
        init_barrier(merged(), Shape::kThreads);
      }
    }
    __syncthreads();
    const uint32_t own_ring = ring + chunk() * Shape::kChunkBytes;
    own_tokens = chunk() * Shape::kChunk;
    write_at = own_ring + Shape::Tokens::offset(row_of(0), piece_of(0));
    write_at = computed_once(write_at);
    if constexpr (!Shape::kAllTogether) {
      read_key_at = own_ring + Shape::Tokens::offset(lane % 16, lane / 16);
      read_value_at = own_ring + Shape::Tokens::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    }
    if constexpr (sizeof(E) > 1 && !Shape::kAllTogether) {
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

  // Which of a tile's chunks is the warp's, and whether the warp copies it.
  __device__ __forceinline__ int chunk() const { return warp % Shape::kCopyWarps; }
  __device__ __forceinline__ bool copies() const {
    return Shape::kCopyWarps == Shape::kWarps || warp >= Shape::kWarps - Shape::kCopyWarps;
  }

  __device__ __forceinline__ uint32_t merged() const {
    return ring + Shape::kControlAt + static_cast<uint32_t>(offsetof(Control, merged));
  }

  // The first token of the warp's chunk.
  __device__ __forceinline__ int chunk_begin(const Cursor& at) const {
    return at.tile * Shape::kTile + own_tokens;
  }

  // Asks for the scales of fp8 K and V as part of the next group of copies: where they are used, a
  // load would queue behind the tokens, or be waited for at the end.
  __device__ __forceinline__ void copy_scales() const {
    if (threadIdx.x == 0) copy_scale(control.key_scale, p.key_scale, p.key_scale_stride);
    if (threadIdx.x == 32) copy_scale(control.value_scale, p.value_scale, p.value_scale_stride);
  }
  __device__ __forceinline__ void copy_scale(float& target, const float* scales,
                                             int64_t stride) const {
    if (scales == nullptr) {
      target = 1.f;
    } else {
      copy_word_async(static_cast<uint32_t>(__cvta_generic_to_shared(&target)),
                      scales + control.head * stride);
    }
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
    advance<Shape>(p, [&](int request) { return len_of(request); }, at);
  }

  // Lengths of up to one request a thread lie in shared memory, unless registers are too few: a
  // load from global memory would queue behind the tokens.
  __device__ __forceinline__ Search<Shape>& search() const {
    static_assert(sizeof(Search<Shape>) <= Shape::kSearchBytes);
    return *reinterpret_cast<Search<Shape>*>(reinterpret_cast<char*>(&control) +
                                             (Shape::kSearchAt - Shape::kControlAt));
  }
  __device__ __forceinline__ int len_of(int request) const {
    if (Shape::kScarce || p.batch > Shape::kThreads) return lens()(request);
    return request < p.batch ? search().lens[request] : 0;
  }

  // The place at `at`, with `read` for the page ids.
  template <class Read>
  __device__ __forceinline__ ChunkPlace place_by(const Cursor& at, Read&& read) const {
    const int begin = chunk_begin(at);
    ChunkPlace place;
    place.live = at.in_block > 0 ? at.kv_len - begin : kNoTile;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      const int offset = offset_of(sub);
      place.page[sub] = at.request;
      place.slot[sub] = begin + offset;
      if (p.page_table != nullptr) {
        const uint32_t index = launch.page(begin + offset);
        place.slot[sub] -= index * p.page_size;
        place.page[sub] = read(sub, id_of(at.request, index), offset < place.live);
      }
    }
    return place;
  }

  // Of the token whose id is the lane's `sub`-th.
  __device__ __forceinline__ int offset_of(int sub) const {
    return kWholePages ? sub * 16 : lane % Shape::kChunk;
  }

  __device__ __forceinline__ ChunkPlace place_of(const Cursor& at) const {
    return place_by(at, [](int, const int32_t* from, bool live) { return live ? *from : 0; });
  }

  // A place that was read before the wait for the producer, and where to read its ids again.
  struct Hint {
    ChunkPlace place;
    const char* from[kSubs];
    bool exists;  // or its pages do not lie in the pool, and `place` is emptied
  };

  __device__ __forceinline__ Hint hint_of(const Cursor& at) const {
    Hint hint;
    hint.place = place_by(at, [&](int sub, const int32_t* from, bool live) {
      hint.from[sub] = computed_once(reinterpret_cast<const char*>(from));
      return live ? read_hint(from) : 0;
    });
    hint.exists = exists(hint.place);
    if (!hint.exists) hint.place.live = kNoTile;
    return hint;
  }

  // What the ids of a hint with tokens are by now.
  __device__ __forceinline__ void read_again(const Hint& hint, int (&ids)[kSubs]) const {
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      ids[sub] = hint.place.page[sub];
      if (p.page_table != nullptr && offset_of(sub) < hint.place.live) {
        asm volatile("ld.global.s32 %0, [%1];" : "=r"(ids[sub]) : "l"(hint.from[sub]) : "memory");
      }
    }
  }

  // Begins to look up places from `at` on: the first ids are on their way when this returns, as
  // part of the next group of copies, or to registers.
  __device__ __forceinline__ void begin_lookup(const Cursor& at) {
    if constexpr (kWholePages) {
      start_ids();
      if (at.in_block > 0) copy_ids(ids_from(at.request, at.tile, at.kv_len), own_ids());
    } else {
      looked_up = place_of(at);
    }
  }

  __device__ __forceinline__ uint32_t own_ids() const {
    return ring + Shape::kIdsAt + chunk() * (2 * kHalfBytes);
  }
  // No ids are left, and those that come next are the first half's.
  __device__ __forceinline__ void start_ids() {
    ids.left = 0;
    ids.at = own_ids() + 2 * kHalfBytes;
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
      looked_up = place_of(at);
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

  // Whether a place lies in the pool.
  __device__ __forceinline__ bool exists(const ChunkPlace& place) const {
    bool inside = true;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      inside = inside && place.page[sub] >= 0 && place.page[sub] < p.num_pages;
    }
    return __all_sync(0xffffffffu, inside);
  }

  // A warp's ids lie in two halves, which take turns: an id of each lane.
  static constexpr int kTilesOfIds = 32 / kSubs, kHalfBytes = 32 * 4;

  // Where page ids of a warp's chunks in the tiles from `first_tile` on lie, a lane's each; null:
  // there is none.
  __device__ __forceinline__ const int32_t* ids_from(int request, int first_tile,
                                                     int kv_len) const {
    const int token = (first_tile + lane / kSubs) * Shape::kTile + own_tokens + lane % kSubs * 16;
    if (p.page_table == nullptr || token >= kv_len) return nullptr;
    return id_of(request, launch.page(token));
  }

  // Copies a lane's id to its place behind `target`, as part of the next group of copies.
  __device__ __forceinline__ void copy_ids(const int32_t* from, uint32_t target) const {
    if (from != nullptr && copies()) copy_word_async(target + lane * 4, from);
  }

  // Ids are asked for many tiles at once and long before they are used, for they queue behind the
  // tokens; and copied to shared memory, for of a load into a register some other wait that has the
  // same scoreboard would be a wait for it.
  __device__ __forceinline__ ChunkPlace known_place(const Cursor& at) {
    ChunkPlace place;
    place.live = kNoTile;
    if (at.in_block <= 0) return place;
    if (ids.left == 0) {
      // The half that was used last, and how much of it: of few tiles the copies that were made
      // since may still be waited for, those with the ids among them.
      const uint32_t last = ids.at - 4, half = last & ~(kHalfBytes - 1);
      if ((last - half) / (4 * kSubs) < kAhead) {
        wait_copies<1>();
        __syncwarp();
      }
      ids.at = half ^ kHalfBytes;
      ids.left = min(at.in_request, kTilesOfIds);
      const bool same = at.in_request > kTilesOfIds, another = at.in_block > at.in_request;
      copy_ids(ids_from(at.request + (same ? 0 : 1),
                        same ? at.tile + kTilesOfIds : tiles_of<Shape>(p, at.next_kv_len).first,
                        same ? at.kv_len : another ? at.next_kv_len : 0),
               half);
    }
    const int begin = chunk_begin(at);
    place.live = at.kv_len - begin;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      const int token = begin + sub * 16;
      place.page[sub] = at.request;
      place.slot[sub] = token;
      if (p.page_table != nullptr) {
        place.page[sub] = load_shared(ids.at + sub * 4);
        place.slot[sub] -= launch.page(token) * p.page_size;
      }
    }
    ids.at += 4 * kSubs;
    --ids.left;
    return place;
  }

  // Copies K or V of the chunk at `place` to ring slot `slot` if the warp copies tokens; always one
  // group of copies. Where other warps wait for it, the slot's barrier is told, unless it has been.
  template <Tokens kOf>
  __device__ __forceinline__ void copy(int slot, const ChunkPlace& place, bool tells = true) const {
    constexpr bool kIsKey = kOf == kKey;
    if (!copies()) return;
    if (place.live > kNoTile) {
      copy_tokens(slot * Shape::kSlotBytes, kIsKey ? key : value,
                  kIsKey ? launch.k_page_pieces : launch.v_page_pieces,
                  kIsKey ? launch.k_token_pieces : launch.v_token_pieces, place);
    }
    commit_copies();
    if (Shape::kAllTogether && tells) tell_copied(slot);
  }
  __device__ __forceinline__ void tell_copied(int slot) const {
    if constexpr (Shape::kAllTogether) arrive_when_copied(Shape::filled(ring, slot));
  }

  // Where K of the range's first chunk lies, for copies that shall be made at once: made before the
  // wait for the producer, and not, as the compiler would have it, where it is used.
  struct FirstKeys {
    const char* tokens[kWholePages ? kSubs : 1];
  };
  __device__ __forceinline__ FirstKeys first_keys(const ChunkPlace& place) const {
    FirstKeys first{};
    if constexpr (kWholePages) {
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
        first.tokens[sub] =
            computed_once(key + pieces_to(place.page[sub], place.slot[sub], launch.k_page_pieces,
                                          launch.k_token_pieces) *
                                    16);
      }
    }
    return first;
  }

  // Fills ring slot 0.
  __device__ __forceinline__ void copy_first_keys(const ChunkPlace& place,
                                                  const FirstKeys& first) const {
    if constexpr (kWholePages) {
      if (!copies()) return;
      if (place.live > kNoTile) {
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub) {
          copy_sixteen(0, sub, first.tokens[sub], launch.k_token_pieces, place.live - sub * 16);
        }
      }
      commit_copies();
      tell_copied(0);
    } else {
      copy<kKey>(0, place);
    }
  }

  // Fills the ring from slot `first` on.
  __device__ __forceinline__ void copy_first(const ChunkPlace (&places)[kAhead + 1], int first,
                                             bool tells = true) const {
#pragma unroll
    for (int slot = 0; slot < Shape::kSlots; ++slot) {
      if (slot < first) continue;
      if (slot % 2 == 0) {
        copy<kKey>(slot, places[slot / 2], tells);
      } else {
        copy<kValue>(slot, places[slot / 2], tells);
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
  __device__ __forceinline__ uint32_t ring_place(int sub, int i) const {
    if constexpr (kRegular) return Shape::Tokens::below(write_at, sub * 16 + i * kRowsEach);
    return ring + chunk() * Shape::kChunkBytes +
           Shape::Tokens::offset(sub * 16 + row_of(i), piece_of(i));
  }

  // The `sub`-th sixteen tokens of a chunk, which lie in one page at `tokens`; the request has
  // `live` of them.
  __device__ __forceinline__ void copy_sixteen(uint32_t slot_at, int sub, const char* tokens,
                                               uint32_t token_pieces, int live) const {
    const int left = live - (kRegular ? row_of(0) : 0);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if constexpr (kRegular) {
        copy_async(slot_at + ring_place(sub, i), tokens, i * kRowsEach < left ? 16 : 0, policy);
        tokens += uint64_t{token_pieces} * (16 * kRowsEach);
      } else {
        if (!kEven && row_of(i) >= 16) break;
        copy_async(slot_at + ring_place(sub, i),
                   tokens + (row_of(i) * uint64_t{token_pieces} + piece_of(i)) * 16,
                   row_of(i) < left ? 16 : 0, policy);
      }
    }
  }

  // Zeros for tokens that the request does not have; their addresses mean nothing. `slot_at`: of
  // the ring slot; `source`: of the head, and where copies are regular of the lane's row and piece.
  __device__ __forceinline__ void copy_tokens(uint32_t slot_at, const char* source,
                                              uint32_t page_pieces, uint32_t token_pieces,
                                              const ChunkPlace& place) const {
    if constexpr (kWholePages) {
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
        copy_sixteen(
            slot_at, sub,
            source + pieces_to(place.page[sub], place.slot[sub], page_pieces, token_pieces) * 16,
            token_pieces, place.live - sub * 16);
      }
    } else {
      const uint64_t of_token =
          lane % Shape::kChunk < place.live
              ? pieces_to(place.page[0], place.slot[0], page_pieces, token_pieces)
              : 0;
#pragma unroll
      for (int i = 0; i < Shape::kChunk * Shape::kPieces / 32; ++i) {
        const uint64_t pieces = __shfl_sync(0xffffffffu, of_token, row_of(i)) + piece_of(i);
        copy_async(slot_at + ring_place(0, i), source + pieces * 16,
                   row_of(i) < place.live ? 16 : 0, policy);
      }
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
    uint32_t at;  // in shared memory, of the tile at hand
    int left;     // tiles from it on that have theirs there
  } ids;          // where pages hold whole sixteens
  ChunkPlace looked_up;  // elsewhere: the next place
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_WORK_CUH_
