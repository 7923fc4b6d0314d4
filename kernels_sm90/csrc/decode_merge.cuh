// The states of a block's warps, and their merge in shared memory.
#ifndef STREAM_ATTENTION_DECODE_MERGE_CUH_
#define STREAM_ATTENTION_DECODE_MERGE_CUH_

#include <type_traits>

#include "decode_invariant.cuh"
#include "decode_query.cuh"

namespace stream_attention {

// What a block does between products, by whether requests are batch-invariant.
template <class T, class E, class Shape, bool kWholePages>
using DecodeParts = std::conditional_t<Shape::kInvariant, DecodeSpans<T, E, Shape, kWholePages>,
                                       DecodeQuery<T, E, Shape, kWholePages>>;

template <class T, class E, class Shape, bool kWholePages>
class DecodeMerge : protected DecodeParts<T, E, Shape, kWholePages> {
 protected:
  using Parts = DecodeParts<T, E, Shape, kWholePages>;
  using Parts::D, Parts::N, Parts::kVectorsPerRow, Parts::kFp8;
  using Parts::control, Parts::lane, Parts::warp;

  __device__ __forceinline__ DecodeMerge(const DecodeLaunch& launched, char* shared)
      : Parts(launched, shared), memory(shared) {}

  // Where a column of a row of a warp's state lies in the slot that serves the merge, in floats.
  static __device__ __forceinline__ int merge_at(int of_warp, int row, int column) {
    return of_warp * (Shape::kChunkBytes / 4) + row * Shape::kMergeStride +
           (Shape::kMergePermuted ? column ^ (row << 2) : column);
  }

  // Puts rows [first, first + rows) of the warp's state into its part of the slot at `outs`.
  __device__ __forceinline__ void put_state(float* outs, float2* sums, int first, int rows,
                                            const float (&of_rows)[N / 8][2]) const {
    const int nb = first / 8, start = first % 8;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = lane % 4 * 2 + c - start;
      if (row < 0 || row >= rows) continue;
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        if constexpr (kFp8) {
          *reinterpret_cast<float2*>(outs + merge_at(warp, row, i * 16 + lane / 4 * 2)) =
              make_float2(acc[nb][i][c], acc[nb][i][c + 2]);
        } else {
          outs[merge_at(warp, row, i * 16 + lane / 4)] = acc[nb][i][c];
          outs[merge_at(warp, row, i * 16 + lane / 4 + 8)] = acc[nb][i][c + 2];
        }
      }
      if (lane < 4) {
        sums[warp * N + first + row] = make_float2(row_max[nb][c], of_rows[nb][c]);
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
      return reinterpret_cast<float*>(memory + of_rows * Shape::kSlotBytes);
    };
    float2* const sums = reinterpret_cast<float2*>(memory + Shape::kSumsAt);
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
        use(aimed, v, merged_vector(outs(row), sums + row, row % kMost, column));
      }
    }
  }

  // Four columns of the merged state of a row, the `row`-th in the slot at `outs`.
  __device__ __forceinline__ State merged_vector(const float* outs, const float2* sums, int row,
                                                 int column) const {
    State state = empty_state();
    float2 of_warps[Shape::kWarps];
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) {
      of_warps[w] = sums[w * N];
      state.top = fmaxf(state.top, of_warps[w].x);
    }
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) {
      const float weight = weight_in(of_warps[w].x, state.top);
      const float4 part = *reinterpret_cast<const float4*>(outs + merge_at(w, row, column));
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
