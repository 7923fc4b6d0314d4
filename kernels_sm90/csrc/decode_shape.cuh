// Compile-time shape of one instance of the decode kernel, and where things lie in shared memory.
#ifndef STREAM_ATTENTION_DECODE_SHAPE_CUH_
#define STREAM_ATTENTION_DECODE_SHAPE_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include "decode_schedule.h"

namespace stream_attention {

// Rows of 16-byte pieces, so that eight neighbouring rows' equal pieces lie in different banks:
// pieces are permuted within groups, in another way in each row that would meet the same banks, or
// rows are an odd number of pieces apart.
template <int kPiecesOfRow>
struct Rows {
  static constexpr int kGroup = kPiecesOfRow % 8 == 0 ? 8 : kPiecesOfRow % 4 == 2 ? 2 : 1;
  static constexpr int kStride = 16 * (kGroup > 1 ? kPiecesOfRow : kPiecesOfRow | 1);

  // What the numbers of a row's pieces are changed by.
  static __host__ __device__ constexpr int change(int row) {
    return row / (8 / kGroup) % kGroup;
  }

  static __host__ __device__ constexpr uint32_t offset(int row, int piece) {
    return row * kStride + ((piece ^ change(row)) << 4);
  }

  // Whether eight neighbouring rows' equal pieces lie in different banks, and in their own rows.
  static constexpr bool are_apart() {
    for (int piece = 0; piece < kPiecesOfRow; ++piece) {
      uint32_t banks = 0;
      for (int row = 0; row < 8; ++row) {
        const uint32_t at = offset(row, piece);
        if (at / kStride != static_cast<uint32_t>(row)) return false;
        banks |= 1u << at / 16 % 8;
      }
      if (banks != 0xff) return false;
    }
    return true;
  }

  // The address of the piece `pieces` after that at `address`, in the same row, where the two
  // numbers have no bit in common. The first row begins at a multiple of 128.
  static __device__ __forceinline__ uint32_t after(uint32_t address, int pieces) {
    return (address ^ (pieces % kGroup << 4)) + (pieces / kGroup * kGroup << 4);
  }

  // The address `rows` rows below, where the two row numbers have no bit in common below 8.
  static __device__ __forceinline__ uint32_t below(uint32_t address, int rows) {
    return (address ^ (change(rows) << 4)) + rows * kStride;
  }
};

// D: head_dim. N: packed query rows, a multiple of 8. kElementBytes: of K and V. kBatchInvariant:
// the bits of a request depend on no other request.
template <int kHeadDim, int kRows, int kElementBytes, bool kBatchInvariant>
struct DecodeShape {
  static constexpr bool kInvariant = kBatchInvariant;
  static constexpr bool kAllTogether = false;  // warps' products are of their own tokens
  static constexpr int D = kHeadDim;
  static constexpr int N = kRows;
  static constexpr int kRowBlocks = N / 8;
  static constexpr int kWarps = D <= 128 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCopyWarps = kWarps, kQueryThreads = kThreads;  // that copy tokens, and q
  static constexpr int kPieces = D * kElementBytes / 16;  // of a token
  static constexpr int kChunk = kPieces <= 8 ? 32 : 16;   // tokens that a warp takes at once
  static constexpr int kTile = kChunk * kWarps;           // tokens that a block takes at once
  using Tokens = Rows<kPieces>;
  static_assert(Tokens::are_apart());
  static constexpr int kChunkBytes = kChunk * Tokens::kStride;  // K or V of a chunk
  static constexpr int kSlotBytes = kWarps * kChunkBytes;       // K or V of a tile
  // Few rows leave room for a second block an SM: one of the next launch, which finds its range
  // while this one ends.
  static constexpr int kBlocksPerSm = N == 8 && D <= 128 ? 2 : 1;
  // Hints are read before the wait for the producer by blocks that come early; batch-invariant
  // instances with fp8 have no registers for it.
  static constexpr bool kHints = kBlocksPerSm > 1 && !(kInvariant && kElementBytes == 1);
  static constexpr int kMostBytes = (228 * 1024 - kBlocksPerSm * 1024) / kBlocksPerSm;
  // Query rows, of the request at hand and of the next one. Fragments of many rows leave no
  // registers for the rest: they are read where the products need them.
  using Query = Rows<D / 8>;
  static constexpr bool kQueryShared = kElementBytes > 1 && N % 16 == 0 && N * D >= 16 * 192;
  static constexpr int kQueryBytes = N * Query::kStride;
  // For a merge a warp's state takes the place of its last chunk of V, eight rows at a time if they
  // fit.
  static constexpr int kMergeRows = 4 * 8 * D <= kChunkBytes ? 8 : 4;
  static_assert(4 * kMergeRows * D <= kChunkBytes, "a state takes a chunk's place");
  static constexpr int kSumBytes = 8 * N * kWarps;
  static constexpr int kControlBytes = kInvariant ? 176 : 96;
  // Instances that have not a register left: what others have in one they look up.
  static constexpr bool kScarce = kElementBytes == 1 && D > 128;
  // Where warps are. Batch-invariant also what the block has folded on the lowest level, and where
  // nodes of its first and last request lie.
  static constexpr int kTurnBytes = kInvariant || kScarce ? 16 * kWarps : 0;
  static constexpr int kFoldBytes = kInvariant ? 24 * N * D / 4 : 0;
  static constexpr int kItemBytes = kInvariant ? 2 * 4 * kMostSpans : 0;
  // Page ids of a warp's next tiles: two times one of each lane.
  static constexpr int kIdsBytes = 2 * 32 * 4 * kWarps;
  static constexpr int kSearchBytes = 4 * (kThreads + kWarps + 4);
  static constexpr int kFixedBytes =
      kIdsBytes + 2 * kQueryBytes + kSumBytes + kControlBytes + kTurnBytes + kFoldBytes +
      kItemBytes + kSearchBytes;
  // The ring has an odd number of slots: K and V of kAhead tiles, and K of one more. An even number
  // in between (four slots of head_dim 80 and 96, six of many rows) is slower by 1 to 3 %.
  static constexpr int kFitting = (kMostBytes - kFixedBytes) / kSlotBytes;
  static constexpr int kAhead = kFitting < 5 ? 1 : kFitting < 7 ? 2 : 3;
  static constexpr int kSlots = 2 * kAhead + 1;
  static_assert(kFitting >= 3, "the ring needs three slots");
  // Where what lies.
  static constexpr int kIdsAt = kSlots * kSlotBytes;
  static_assert(kIdsAt % 256 == 0, "addresses of ids are told apart by their bits");
  static constexpr int kQueryAt = kIdsAt + kIdsBytes;
  static constexpr int kSumsAt = kQueryAt + 2 * kQueryBytes;
  static constexpr int kControlAt = kSumsAt + kSumBytes;
  static constexpr int kTurnsAt = kControlAt + kControlBytes;
  static constexpr int kFoldAt = kTurnsAt + kTurnBytes;
  static constexpr int kItemsAt = kFoldAt + kFoldBytes;
  static_assert(kFoldAt % 16 == 0, "a state is read in vectors");
  static constexpr int kSearchAt = kItemsAt + kItemBytes;
  static constexpr int kSharedBytes = kSearchAt + kSearchBytes;
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_SHAPE_CUH_
