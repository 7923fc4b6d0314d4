// How a block finds its range of tiles from the lengths alone, and how its warps walk along it.
#ifndef STREAM_ATTENTION_DECODE_CURSOR_CUH_
#define STREAM_ATTENTION_DECODE_CURSOR_CUH_

#include <cuda_runtime.h>

#include "decode_abi.h"
#include "decode_schedule.h"

namespace stream_attention {

// What the kernels take: the caller's params and what the host derives from them.
struct DecodeLaunch {
  StreamAttentionDecodeParams p;
  Divider page;    // page_size
  Divider group;
  Divider blocks;  // blocks that share the tiles of one KV head and group of rows
  int heads;       // KV heads times groups of rows
  int row_groups;
  int rows_total;  // qo_len * group
  float scale;     // of the scores, in powers of two; before a cap: of its argument
  float cap;       // 0: none
};

// Where a warp is in its block's range of tiles.
struct Cursor {
  int request;
  int tile;        // tile of the request
  int in_request;  // tiles of the request from here on
  int in_block;    // tiles of the block's range from here on
  int kv_len;
  int next_kv_len;
};

// A block's range and where it lies.
struct Range {
  int before;  // tiles of all requests ahead of the first one
  int total;   // tiles of all requests
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

__device__ __forceinline__ int inclusive_sum(int value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// Up to 32 requests: every warp finds the range for itself.
template <class Shape>
__device__ __forceinline__ void locate_in_warp(const DecodeLaunch& launch, const KvLens& lens,
                                               int block, Cursor& at, Range& range) {
  const StreamAttentionDecodeParams& p = launch.p;
  const int lane = threadIdx.x % 32;
  const int kv_len = lens(lane);
  const RequestTiles tiles = tiles_of<Shape>(p, kv_len);
  const int count = lane < p.batch ? tiles.count : 0;
  const int through = inclusive_sum(count);
  range.total = __shfl_sync(0xffffffffu, through, 31);
  const EqualCuts cuts(range.total, launch.blocks);
  const int begin = cuts.begin(block);
  at.in_block = cuts.begin(block + 1) - begin;
  // A block without tiles begins at `total`, past every request.
  at.request = min(__popc(__ballot_sync(0xffffffffu, through <= begin)), p.batch - 1);
  range.before = __shfl_sync(0xffffffffu, through - count, at.request);
  at.kv_len = __shfl_sync(0xffffffffu, kv_len, at.request);
  const int next = __shfl_sync(0xffffffffu, kv_len, (at.request + 1) % 32);
  at.next_kv_len = at.request + 1 < p.batch ? next : 0;
  const int first = __shfl_sync(0xffffffffu, tiles.first, at.request);
  const int skipped = begin - range.before;
  at.tile = first + skipped;
  at.in_request = __shfl_sync(0xffffffffu, count, at.request) - skipped;
}

// Any number of requests: the threads scan them together. `shared`: kWarps + 2 words.
template <class Shape>
__device__ void locate_in_block(const DecodeLaunch& launch, const KvLens& lens, int block,
                                int* shared, Cursor& at, Range& range) {
  const StreamAttentionDecodeParams& p = launch.p;
  constexpr int kThreads = 32 * Shape::kWarps;
  int* sums = shared;
  int* found = shared + Shape::kWarps;
  const auto scan = [&](int start, int ahead, int& count) {
    const int request = start + static_cast<int>(threadIdx.x);
    count = request < p.batch ? tiles_of<Shape>(p, lens(request)).count : 0;
    int through = inclusive_sum(count);
    __syncthreads();
    if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = through;
    __syncthreads();
    int all = 0;
#pragma unroll
    for (int i = 0; i < Shape::kWarps; ++i) {
      if (i < static_cast<int>(threadIdx.x / 32)) through += sums[i];
      all += sums[i];
    }
    range.total = ahead + all;
    return ahead + through;
  };
  const auto note = [&](int start, int begin, int through, int count) {
    if (count > 0 && through - count <= begin && begin < through) {
      found[0] = start + static_cast<int>(threadIdx.x);
      found[1] = through - count;
    }
  };
  int count, through = 0;
  range.total = 0;
  for (int start = 0; start < p.batch; start += kThreads) {
    through = scan(start, range.total, count);
  }
  const int total = range.total;
  const EqualCuts cuts(total, launch.blocks);
  const int begin = cuts.begin(block);
  at.in_block = cuts.begin(block + 1) - begin;
  if (at.in_block == 0) return;
  if (p.batch <= kThreads) {
    note(0, begin, through, count);
  } else {
    range.total = 0;
    for (int start = 0; start < p.batch && range.total <= begin; start += kThreads) {
      through = scan(start, range.total, count);
      note(start, begin, through, count);
    }
    range.total = total;
  }
  __syncthreads();
  at.request = found[0];
  range.before = found[1];
  at.kv_len = lens(at.request);
  at.next_kv_len = lens(at.request + 1);
  const RequestTiles tiles = tiles_of<Shape>(p, at.kv_len);
  const int skipped = begin - range.before;
  at.tile = tiles.first + skipped;
  at.in_request = tiles.count - skipped;
}

// The start of a block's range.
template <class Shape>
__device__ __forceinline__ void locate(const DecodeLaunch& launch, const KvLens& lens, int block,
                                       int* shared, Cursor& at, Range& range) {
  if (launch.p.batch == 1) {
    at.request = 0;
    at.kv_len = lens(0);
    at.next_kv_len = 0;
    const RequestTiles tiles = tiles_of<Shape>(launch.p, at.kv_len);
    range.before = 0;
    range.total = tiles.count;
    const EqualCuts cuts(range.total, launch.blocks);
    const int begin = cuts.begin(block);
    at.in_block = cuts.begin(block + 1) - begin;
    at.tile = tiles.first + begin;
    at.in_request = tiles.count - begin;
  } else if (launch.p.batch <= 32) {
    locate_in_warp<Shape>(launch, lens, block, at, range);
  } else {
    locate_in_block<Shape>(launch, lens, block, shared, at, range);
  }
}

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_CURSOR_CUH_
