// What the decode kernel does around its products: where the tokens of a block lie, the ring that
// its warps fill, the answer, the merge of what blocks share.
#ifndef STREAM_ATTENTION_DECODE_WORK_CUH_
#define STREAM_ATTENTION_DECODE_WORK_CUH_

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

// A request of the block's range that other blocks share.
struct Shared {
  int request;
  int first_block;
  int parts;
};

template <class T, class E, class Shape, bool kWholePages>
class DecodeWork {
 protected:
  static constexpr int D = Shape::D, N = Shape::N;
  static constexpr int kSubs = Shape::kChunk / 16;
  static constexpr int kVectorsPerRow = D / 4;
  static constexpr int kAhead = Shape::kStages - 1;  // chunks whose pages are looked up ahead
  using ChunkPlace = Place<kSubs>;

  __device__ __forceinline__ DecodeWork(const DecodeLaunch& launched, char* shared)
      : launch(launched), p(launched.p), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {
    lead = blockIdx.x % launch.heads;  // neighbours in the grid read the heads of a page together
    head = lead / launch.row_groups;
    row_start = lead % launch.row_groups * N;
    live_rows = min(N, launch.rows_total - row_start);
    block = blockIdx.x / launch.heads;
    ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    key = static_cast<const E*>(p.key) + head * p.k_head_stride;
    value = static_cast<const E*>(p.value) + head * p.v_head_stride;
    if constexpr (kRegular) {
      key += row_of(0) * p.k_token_stride + piece_of(0) * (16 / static_cast<int>(sizeof(E)));
      value += row_of(0) * p.v_token_stride + piece_of(0) * (16 / static_cast<int>(sizeof(E)));
    }
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  }

  // K of warp `of`'s chunk in ring slot `slot`; V follows.
  __device__ __forceinline__ uint32_t chunk_of(int of, int slot) const {
    return ring + (slot * Shape::kWarps + of) * (2 * Shape::kChunkBytes);
  }

  __device__ __forceinline__ int page_of(int request, int index) const {
    return __ldg(p.page_table + request * p.table_batch_stride + head * p.table_head_stride +
                 index);
  }

  __device__ __forceinline__ ChunkPlace place_of(const Cursor& at) const {
    const int begin = at.tile * Shape::kTile + warp * Shape::kChunk;
    ChunkPlace place;
    place.live = at.in_block > 0 ? at.kv_len - begin : 0;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      const int offset = kWholePages ? sub * 16 : lane % Shape::kChunk;
      if (offset < place.live) {
        const int token = begin + offset;
        if (p.page_table == nullptr) {
          place.page[sub] = at.request;
          place.slot[sub] = token;
        } else {
          const int index = launch.page(token);
          place.slot[sub] = token - index * p.page_size;
          place.page[sub] = page_of(at.request, index);
        }
      }
    }
    return place;
  }

  // Copies the chunk at `place` to ring slot `slot`. Always one group of copies.
  __device__ __forceinline__ void copy_chunk(int slot, const ChunkPlace& place) const {
    if (place.live > 0) {
      const uint32_t target = chunk_of(warp, slot);
      copy_tokens(target, key, p.k_page_stride, p.k_token_stride, place);
      copy_tokens(target + Shape::kChunkBytes, value, p.v_page_stride, p.v_token_stride, place);
    }
    commit_copies();
  }

  // Where a lane's i-th copy of sixteen tokens goes: a row and a piece of it. Copies of rows that
  // divide a warp's copy are regular: a lane has one piece, and rows at equal distances.
  static constexpr int kCopies = (16 * Shape::kPieces + 31) / 32;
  static constexpr bool kEven = 16 * Shape::kPieces % 32 == 0;  // all lanes have all copies
  static constexpr bool kRegular = kWholePages && 32 % Shape::kPieces == 0;
  static constexpr int kRowsEach = 32 / Shape::kPieces;
  __device__ __forceinline__ int row_of(int i) const { return (lane + i * 32) / Shape::kPieces; }
  __device__ __forceinline__ int piece_of(int i) const { return (lane + i * 32) % Shape::kPieces; }

  // `source`: where copies are regular, of the lane's row and piece.
  __device__ __forceinline__ void copy_tokens(uint32_t target, const E* source,
                                              int64_t page_stride, int64_t token_stride,
                                              const ChunkPlace& place) const {
    constexpr int kEach = 16 / sizeof(E);
    if constexpr (kWholePages) {
      const uint32_t own = target + Shape::Tokens::offset(row_of(0), piece_of(0));
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
        if (sub * 16 + 16 > place.live) {
          copy_some(target, source, page_stride, token_stride, place, sub);
          continue;
        }
        const E* tokens = source + place.page[sub] * page_stride + place.slot[sub] * token_stride;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          if constexpr (kRegular) {
            copy_async(Shape::Tokens::below(own, sub * 16 + i * kRowsEach), tokens, policy);
            tokens += kRowsEach * token_stride;
          } else {
            if (!kEven && row_of(i) >= 16) break;
            copy_async(target + Shape::Tokens::offset(sub * 16 + row_of(i), piece_of(i)),
                       tokens + row_of(i) * token_stride + piece_of(i) * kEach, policy);
          }
        }
      }
    } else {
      const int64_t of_token =
          lane % Shape::kChunk < place.live
              ? place.page[0] * page_stride + place.slot[0] * token_stride
              : 0;
#pragma unroll
      for (int i = 0; i < Shape::kChunk * Shape::kPieces / 32; ++i) {
        const int64_t offset = __shfl_sync(0xffffffffu, of_token, row_of(i));
        copy_async(target + Shape::Tokens::offset(row_of(i), piece_of(i)),
                   source + offset + piece_of(i) * kEach, row_of(i) < place.live ? 16 : 0, policy);
      }
    }
  }

  // Sixteen tokens of which the request has not all; zeros for the others.
  __device__ __forceinline__ void copy_some(uint32_t target, const E* source, int64_t page_stride,
                                            int64_t token_stride, const ChunkPlace& place,
                                            int sub) const {
    constexpr int kEach = 16 / sizeof(E);
    const E* tokens = source;
    if (sub * 16 < place.live) {
      tokens += place.page[sub] * page_stride + place.slot[sub] * token_stride;
    }
    // Unrolled: of a loop here ptxas 13.0 makes an illegal uniform-register operand (head_dim 192).
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (!kEven && row_of(i) >= 16) break;
      const bool live = sub * 16 + row_of(i) < place.live;
      const int row = kRegular ? row_of(i) - row_of(0) : row_of(i);
      const int piece = kRegular ? 0 : piece_of(i);
      const E* from = tokens + (live ? row * token_stride + piece * kEach : 0);
      copy_async(target + Shape::Tokens::offset(sub * 16 + row_of(i), piece_of(i)), from,
                 live ? 16 : 0, policy);
    }
  }

  // How many blocks share the request at `at`, and the first of them.
  __device__ __forceinline__ Shared sharers(const Cursor& at, bool from_start) const {
    const bool to_end = at.in_request <= at.in_block;
    const EqualCuts cuts(range.total, launch.blocks);
    const int count = tiles_of<Shape>(p, at.kv_len).count;
    Shared shared;
    shared.request = at.request;
    shared.first_block = from_start ? block : cuts.owner(range.before);
    const int last_block = to_end ? block : cuts.owner(range.before + count - 1);
    shared.parts = last_block - shared.first_block + 1;
    return shared;
  }

  // A block has two regions: one for the request that it begins and others end, one for the
  // request that it does not begin.
  __device__ __forceinline__ Region region_of(const Shared& shared, int slice) const {
    const int blocks = static_cast<int>(launch.blocks.divisor), vectors = N * kVectorsPerRow;
    const int index = 2 * (lead * blocks + shared.first_block + slice) + (slice == 0 ? 1 : 0);
    return Region(p.scratch + index * region_floats(vectors, blocks),
                  region_items(vectors, blocks));
  }

  // The state of four columns of a row, the `vector`-th of the block's: the answer, if no other
  // block shares the request, else it goes to the block that merges it.
  __device__ __forceinline__ void give(const Shared& shared, int log2_size, int vector,
                                       const State& state) const {
    if (shared.parts == 1) {
      write(shared.request, vector, state);
    } else {
      const int part = block - shared.first_block;
      const int item = (part << log2_size) + (vector & ((1 << log2_size) - 1));
      region_of(shared, vector >> log2_size).publish(item, state);
    }
  }

  // This block's slice of the answer of a shared request. A warp takes a few vectors, its lanes
  // the parts of each; the order of additions depends on the shape alone.
  __device__ void merge_slice(const Shared& shared) const {
    const int vectors = live_rows * kVectorsPerRow;
    const int log2_size = slice_log2(vectors, shared.parts);
    const int slice = block - shared.first_block, size = 1 << log2_size;
    const int begin = slice << log2_size;
    const Region region = region_of(shared, slice);
    int groups = 32;
    while (groups > shared.parts && 32 / groups < size) groups /= 2;
    const int columns = 32 / groups;
    for (int round = warp * columns; round < size; round += Shape::kWarps * columns) {
      const int column = round + lane % columns, vector = begin + column;
      State state = empty_state();
      if (vector < vectors) {
        for (int part = lane / columns; part < shared.parts; part += 2 * groups) {
          const int other = part + groups < shared.parts ? part + groups : part;
          region.take(state, (part << log2_size) + column, (other << log2_size) + column);
        }
      }
      add_across_lanes(state, columns);
      if (lane < columns && vector < vectors) write(shared.request, vector, state);
    }
  }

  // Four elements of one row's answer; the thread of column 0 writes the lse.
  __device__ __forceinline__ void write(int request, int vector, State state) const {
    const int row = row_start + vector / kVectorsPerRow, column = vector % kVectorsPerRow * 4;
    const int token = launch.group(row);
    const int q_head = head * p.group + row - token * p.group;
    const int64_t place = static_cast<int64_t>(request) * p.qo_len + token;
    const bool empty = state.sum == 0.f;
    if (p.attn_sink != nullptr && !empty) {
      const float sink = __ldg(p.attn_sink + q_head) * kLog2E;
      add(state, State{make_float4(0.f, 0.f, 0.f, 0.f), sink, 1.f});
    }
    float inverse = empty ? 0.f : __fdividef(1.f, state.sum);
    if (p.value_scale != nullptr) inverse *= __ldg(p.value_scale + head * p.value_scale_stride);
    uint2 words;
    words.x = empty ? 0u : Half<T>::pack(state.out.x * inverse, state.out.y * inverse);
    words.y = empty ? 0u : Half<T>::pack(state.out.z * inverse, state.out.w * inverse);
    T* target = static_cast<T*>(p.out) + place * p.out_token_stride +
                static_cast<int64_t>(q_head) * p.out_head_stride + column;
    *reinterpret_cast<uint2*>(target) = words;
    if (p.lse != nullptr && column == 0) {
      p.lse[place * p.lse_token_stride + q_head * p.lse_head_stride] =
          empty ? -INFINITY : (state.top + log2f(state.sum)) * kLn2;
    }
  }

  const DecodeLaunch& launch;
  const StreamAttentionDecodeParams& p;
  const int lane, warp;
  int lead, head, row_start, live_rows, block;
  uint32_t ring;  // in shared memory
  const E* key;
  const E* value;
  uint64_t policy;
  Range range;
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_WORK_CUH_
