// How a block finds its range of tiles from the lengths alone, and how its warps walk along it.
#ifndef STREAM_ATTENTION_DECODE_CURSOR_CUH_
#define STREAM_ATTENTION_DECODE_CURSOR_CUH_

#include <cuda_runtime.h>

#include "decode_abi.h"
#include "decode_schedule.h"

namespace stream_attention {

constexpr int kDecodeWarps = 8;
constexpr int kDecodeThreads = 32 * kDecodeWarps;

// Where a warp is in its block's range of tiles.
struct Cursor {
  int request;
  int tile;        // tile of the request
  int in_request;  // tiles of the request from here on
  int in_block;    // tiles of the block's range from here on
  int kv_len;
  int next_kv_len;
};

struct KvLens {
  const StreamAttentionDecodeParams& p;
  const int32_t* lens;

  __device__ __forceinline__ KvLens(const StreamAttentionDecodeParams& params, int head)
      : p(params),
        lens(params.kv_lens ? params.kv_lens + head * params.lens_head_stride : nullptr) {}

  __device__ __forceinline__ int operator()(int request) const {
    if (request >= p.batch) return 0;
    if (lens == nullptr) return p.capacity;
    const int kv_len = __ldg(lens + request * p.lens_batch_stride);
    return min(max(kv_len, 0), p.capacity);
  }
};

template <class Shape>
__device__ __forceinline__ RequestTiles tiles_of(const StreamAttentionDecodeParams& p, int kv_len) {
  return request_tiles(kv_len, p.qo_len, p.window_left, Shape::kTile);
}

template <class Shape>
__device__ __forceinline__ void advance(const StreamAttentionDecodeParams& p, const KvLens& lens,
                                        Cursor& at) {
  ++at.tile;
  --at.in_block;
  if (--at.in_request == 0 && at.in_block > 0) {
    ++at.request;
    at.kv_len = at.next_kv_len;
    at.next_kv_len = lens(at.request + 1);
    const RequestTiles tiles = tiles_of<Shape>(p, at.kv_len);
    at.tile = tiles.first;
    at.in_request = tiles.count;
  }
}

struct BlockScan {
  int64_t* sums;  // one a warp

  // Inclusive sum over the block; `total` is the whole sum. Two block barriers.
  __device__ __forceinline__ int64_t inclusive(int64_t value, int64_t& total) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffu, value, step);
      if (lane >= step) value += other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = value;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int i = 0; i < kDecodeWarps; ++i) {
      if (i < warp) value += sums[i];
      total += sums[i];
    }
    return value;
  }
};

// The start of a block's range. `before`: tiles of all requests ahead of the cursor's request.
template <class Shape>
__device__ void locate(const StreamAttentionDecodeParams& p, const KvLens& lens, int block,
                       int blocks, int64_t* sums, int64_t* found, Cursor& at, int64_t& before,
                       int64_t& total) {
  if (p.batch == 1) {
    before = 0;
    at.request = 0;
    total = tiles_of<Shape>(p, lens(0)).count;
  } else {
    const BlockScan scan{sums};
    total = 0;
    for (int start = 0; start < p.batch; start += kDecodeThreads) {
      const int request = start + threadIdx.x;
      const int count = request < p.batch ? tiles_of<Shape>(p, lens(request)).count : 0;
      int64_t part;
      const int64_t through = scan.inclusive(count, part);
      if (p.batch <= kDecodeThreads) {
        total = part;
        const int64_t begin = EqualCuts(total, blocks).begin(block);
        if (count > 0 && through - count <= begin && begin < through) {
          found[0] = request;
          found[1] = through - count;
        }
      } else {
        total += part;
      }
    }
    if (p.batch > kDecodeThreads) {
      const int64_t begin = EqualCuts(total, blocks).begin(block);
      int64_t ahead = 0;
      for (int start = 0; start < p.batch && ahead <= begin; start += kDecodeThreads) {
        const int request = start + threadIdx.x;
        const int count = request < p.batch ? tiles_of<Shape>(p, lens(request)).count : 0;
        int64_t part;
        const int64_t through = ahead + scan.inclusive(count, part);
        if (count > 0 && through - count <= begin && begin < through) {
          found[0] = request;
          found[1] = through - count;
        }
        ahead += part;
      }
    }
    __syncthreads();
    at.request = static_cast<int>(found[0]);
    before = found[1];
  }
  const EqualCuts cuts(total, blocks);
  const int64_t begin = cuts.begin(block);
  at.in_block = static_cast<int>(cuts.begin(block + 1) - begin);
  if (at.in_block == 0) return;
  at.kv_len = lens(at.request);
  at.next_kv_len = lens(at.request + 1);
  const RequestTiles tiles = tiles_of<Shape>(p, at.kv_len);
  const int skipped = static_cast<int>(begin - before);
  at.tile = tiles.first + skipped;
  at.in_request = tiles.count - skipped;
}

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_CURSOR_CUH_
