// Compile-time shape of one instance of the decode kernel, and where things lie in shared memory.
#ifndef STREAM_ATTENTION_DECODE_SHAPE_CUH_
#define STREAM_ATTENTION_DECODE_SHAPE_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

namespace stream_attention {

constexpr int kMostSharedBytes = 227 * 1024;

// Rows of 16-byte pieces, so that eight neighbouring rows' equal pieces lie in different banks:
// pieces are permuted within eights, or rows are an odd number of pieces apart.
template <int kPiecesOfRow>
struct Rows {
  static constexpr bool kPermuted = kPiecesOfRow % 8 == 0;
  static constexpr int kStride = 16 * (kPermuted ? kPiecesOfRow : kPiecesOfRow | 1);

  static __device__ __forceinline__ uint32_t offset(int row, int piece) {
    return row * kStride + ((kPermuted ? piece ^ (row & 7) : piece) << 4);
  }

  // The address of the piece `pieces` after that at `address`, in the same row, where the two
  // numbers have no bit in common. Rows begin at multiples of 128.
  static __device__ __forceinline__ uint32_t after(uint32_t address, int pieces) {
    return kPermuted ? (address ^ ((pieces & 7) << 4)) + ((pieces & ~7) << 4)
                     : address + (pieces << 4);
  }

  // The address `rows` rows below, where the two row numbers have no bit in common below 8.
  static __device__ __forceinline__ uint32_t below(uint32_t address, int rows) {
    return (kPermuted ? address ^ ((rows & 7) << 4) : address) + rows * kStride;
  }
};

// D: head_dim. N: packed query rows, a multiple of 8. kElementBytes: of K and V.
template <int kHeadDim, int kRows, int kElementBytes>
struct DecodeShape {
  static constexpr int D = kHeadDim;
  static constexpr int N = kRows;
  static constexpr int kRowBlocks = N / 8;
  static constexpr int kWarps = D <= 128 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kPieces = D * kElementBytes / 16;  // of a token
  static constexpr int kChunk = kPieces <= 8 ? 32 : 16;   // tokens that a warp takes at once
  static constexpr int kTile = kChunk * kWarps;           // tokens that a block takes at once
  using Tokens = Rows<kPieces>;
  static constexpr int kChunkBytes = kChunk * Tokens::kStride;  // K or V of a chunk
  static constexpr int kStageBytes = 2 * kWarps * kChunkBytes;
  // The warps' states are merged eight rows at a time; the stride suits both sides.
  static constexpr int kMergeStride = D + 4;
  static constexpr int kMergeFloats = kWarps * 8 * kMergeStride;
  // The query fragments of many rows leave no registers for the rest: they lie in shared memory.
  static constexpr bool kQueryShared = kElementBytes > 1 && N % 16 == 0 && N * D >= 16 * 192;
  using Query = Rows<D / 8>;
  static constexpr int kQueryBytes = kQueryShared ? N * Query::kStride : 0;
  static constexpr int kFixedBytes = kQueryBytes + 4 * (kMergeFloats + 2 * kWarps * 8);
  static constexpr int kFitting = (kMostSharedBytes - kFixedBytes) / kStageBytes;
  static constexpr int kStages = kFitting < 4 ? kFitting : 4;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kRingBytes + kFixedBytes;  // ring, query rows, merge
  static_assert(kStages >= 2, "the ring needs two stages");
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_SHAPE_CUH_
