// The states of a block's warps, and their merge in shared memory.
#ifndef STREAM_ATTENTION_DECODE_MERGE_CUH_
#define STREAM_ATTENTION_DECODE_MERGE_CUH_

#include "decode_begin.cuh"

namespace stream_attention {

template <class T, class E, class Shape, bool kWholePages>
class DecodeMerge : protected DecodeBegin<T, E, Shape, kWholePages> {
 protected:
  using Parts = DecodeBegin<T, E, Shape, kWholePages>;
  using Parts::D, Parts::N, Parts::kVectorsPerRow, Parts::kFp8;
  using Parts::control, Parts::lane, Parts::warp;

  __device__ __forceinline__ DecodeMerge(const DecodeLaunch& launched, char* shared)
      : Parts(launched, shared), memory(shared) {}

  // Where a column of a row of a warp's state lies in the slot that serves the merge, in bytes:
  // permuted within rows of whole 128 bytes; else the rows' equal vectors lie together, permuted.
  // So banks are apart for those who write columns of several rows and for those who read vectors
  // of one.
  static constexpr bool kWholeLines = D % 32 == 0;
  static constexpr int kMergeRows = Shape::kMergeRows;
  static __device__ __forceinline__ uint32_t merge_at(uint32_t row, uint32_t column) {
    const uint32_t vector = column / 4, bytes = column * 4;
    return kWholeLines ? row * (D * 4) + (bytes ^ row << 4)
                       : (vector * kMergeRows + (row ^ vector % kMergeRows)) * 16 + bytes % 16;
  }
  // The address `columns` columns after `address`, where the numbers of that column and of columns
  // have no bit in common; a multiple of 8. Made of few operations: most of it is a constant.
  static __device__ __forceinline__ uint32_t columns_after(uint32_t address, int columns) {
    if constexpr (kWholeLines) return (address ^ columns % 32 * 4) + columns / 32 * 128;
    return (address ^ columns / 4 % kMergeRows * 16) + columns * (4 * kMergeRows);
  }

  // Puts rows [first, first + rows) of the warp's state into its part of the slot at `outs`.
  __device__ __forceinline__ void put_state(uint32_t outs, uint32_t sums, int first, int rows,
                                            const float (&of_rows)[N / 8][2]) const {
    const int nb = first / 8, start = first % 8;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = lane % 4 * 2 + c - start;
      if (row < 0 || row >= rows) continue;
      const uint32_t own =
          outs + warp * Shape::kChunkBytes + merge_at(row, lane / 4 * (kFp8 ? 2 : 1));
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        if constexpr (kFp8) {
          store_shared(columns_after(own, i * 16), acc[nb][i][c], acc[nb][i][c + 2]);
        } else {
          store_shared(columns_after(own, i * 16), acc[nb][i][c]);
          store_shared(columns_after(own, i * 16 + 8), acc[nb][i][c + 2]);
        }
      }
      if (lane < 4) {
        store_shared(sums + (warp * N + first + row) * 8, row_max[nb][c], of_rows[nb][c]);
      }
    }
  }

  // Merges the warps' states in ring slot `slot`, which every warp is done with but for its own
  // chunk, and gives each vector to `use`, with what `aim` made of its number (behind the barrier:
  // what `control` says of the request is not there before). `all_free`: every slot is as free, and
  // rows that do not fit into one go into others. Ends at different times for different warps.
  template <class Aim, class Use>
  __device__ __forceinline__ void merge_warps(int slot, bool all_free, Aim&& aim, Use&& use) const {
    constexpr int kMost = Shape::kMergeRows;
    static_assert(N <= kMost * Shape::kSlots);
    all_free = all_free && N > kMost;
    const auto outs = [&](int first) {
      const int of_rows = all_free ? first / kMost : slot;
      return this->ring + of_rows * Shape::kSlotBytes;
    };
    const uint32_t sums = this->ring + Shape::kSumsAt;
    float of_rows[N / 8][2];
#pragma unroll
    for (int nb = 0; nb < N / 8; ++nb) {
#pragma unroll
      for (int c = 0; c < 2; ++c) of_rows[nb][c] = sum_over_tokens(row_sum[nb][c]);
    }
#pragma unroll
    for (int first = 0; first < N; first += kMost) {
      const int rows = min(kMost, control.live_rows - first);
      if (rows <= 0) break;
      if (first > 0 && !all_free) __syncthreads();
      put_state(outs(first), sums, first, rows, of_rows);
      if (all_free && first + rows < control.live_rows) continue;
      __syncthreads();
      const unsigned end = (first + rows) * kVectorsPerRow;
      unsigned v = threadIdx.x + (all_free ? 0 : first * kVectorsPerRow);
      for (; v < end; v += Shape::kThreads) {
        const unsigned row = v / kVectorsPerRow, column = v % kVectorsPerRow * 4;
        const auto aimed = aim(v);
        use(aimed, v, merged_vector(outs(row), sums + row * 8, row % kMost, column));
      }
    }
  }

  // Four columns of the merged state of a row, the `row`-th in the slot at `outs`.
  __device__ __forceinline__ State merged_vector(uint32_t outs, uint32_t sums, int row,
                                                 int column) const {
    const uint32_t at = outs + merge_at(row, column);
    State state = empty_state();
    float2 of_warps[Shape::kWarps];
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) {
      load_shared(of_warps[w], sums + w * N * 8);
      state.top = fmaxf(state.top, of_warps[w].x);
    }
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) {
      const float weight = weight_in(of_warps[w].x, state.top);
      float4 part;
      load_shared(part, at + w * Shape::kChunkBytes);
      // One operation each, wherever this is used: batch-invariant bits depend on it.
      state.sum = __fmaf_rn(weight, of_warps[w].y, state.sum);
      state.out.x = __fmaf_rn(weight, part.x, state.out.x);
      state.out.y = __fmaf_rn(weight, part.y, state.out.y);
      state.out.z = __fmaf_rn(weight, part.z, state.out.z);
      state.out.w = __fmaf_rn(weight, part.w, state.out.w);
    }
    return state;
  }

  char* memory;  // shared
  // Of the warp: O^T, relative to powers of two of the rows' maxima, and those.
  float acc[Shape::kRowBlocks][D / 16][4];
  float row_max[Shape::kRowBlocks][2];
  float row_sum[Shape::kRowBlocks][2];
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_MERGE_CUH_
