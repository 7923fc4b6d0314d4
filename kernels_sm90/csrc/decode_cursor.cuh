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
  // What blocks hand each other goes through regions of this many items.
  uint32_t region_items;
  // Strides of K and V in pieces of 16 bytes.
  uint32_t k_page_pieces, k_token_pieces, v_page_pieces, v_token_pieces;
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
  // Where requests have blocks of their own: those of the block's. No parts: they have not.
  int first_block, parts;
};

// Reads what a producer may still be writing: a value that is old or new, which past the wait for
// the producer must be read again. Bypasses L1, so that nothing stale is left there.
__device__ __forceinline__ int read_hint(const int32_t* from) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}

// Lengths of one KV head's requests, in memory.
struct Lens {
  const StreamAttentionDecodeParams& p;
  const int32_t* lens;

  __device__ __forceinline__ Lens(const StreamAttentionDecodeParams& params, int head)
      : p(params),
        lens(params.kv_lens ? params.kv_lens + head * params.lens_head_stride : nullptr) {}

  // What memory says of a request; `request` < batch. kHint: before the wait for the producer.
  template <bool kHint>
  __device__ __forceinline__ int read(int request) const {
    if (lens == nullptr) return p.capacity;
    const int32_t* from = lens + request * p.lens_batch_stride;
    return kHint ? read_hint(from) : *from;
  }

  __device__ __forceinline__ int bounded(int kv_len) const {
    return min(max(kv_len, 0), p.capacity);
  }

  __device__ __forceinline__ int operator()(int request) const {
    return request < p.batch ? bounded(read<false>(request)) : 0;
  }
};

// Lengths that were read before: a lane's or a thread's own request's.
struct KnownLens {
  int batch;
  int own;
  const int* shared;  // of all requests, where they are more than lanes

  __device__ __forceinline__ int operator()(int request) const {
    if (request >= batch) return 0;
    return batch <= 32 ? __shfl_sync(0xffffffffu, own, request) : shared[request];
  }
};

template <class Shape>
__device__ __forceinline__ RequestTiles tiles_of(const StreamAttentionDecodeParams& p, int kv_len) {
  return request_tiles(kv_len, p.qo_len, p.window_left, Shape::kTile);
}

template <class Shape, class AnyLens>
__device__ __forceinline__ void advance(const StreamAttentionDecodeParams& p, const AnyLens& lens,
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

// A block's range without regard to requests, or, where they are batch-invariant, not yet.
struct Edges {
  int begin, end;

  __device__ __forceinline__ Edges(const EqualCuts& cuts, int block)
      : begin(cuts.begin(block)), end(cuts.begin(block + 1)) {}
};

// One request.
template <class Shape>
__device__ __forceinline__ void locate_single(const DecodeLaunch& launch, int kv_len, int block,
                                              Cursor& at, Range& range) {
  at.request = 0;
  at.kv_len = kv_len;
  at.next_kv_len = 0;
  const RequestTiles tiles = tiles_of<Shape>(launch.p, kv_len);
  range = Range{0, tiles.count, 0, 0};
  const EqualCuts cuts(range.total, launch.blocks);
  Edges edges(cuts, block);
  if constexpr (Shape::kInvariant) {
    const NodeCuts node_cuts(cuts, 0, tiles.count);
    edges.begin = node_cuts.begin(block);
    edges.end = node_cuts.begin(block + 1);
  }
  at.in_block = edges.end - edges.begin;
  at.tile = tiles.first + edges.begin;
  at.in_request = tiles.count - edges.begin;
}

// Whether each of up to 32 requests can have blocks of its own at nearly the equal share of tiles.
// `own`: the blocks of the lane's request with `count` tiles; `through`: those of all requests up
// to and with it.
__device__ __forceinline__ bool have_own_blocks(const DecodeLaunch& launch, int count,
                                          const EqualCuts& cuts, int& own, int& through) {
  const int most = static_cast<int>(launch.blocks.divisor);
  if (launch.p.batch > most) return false;
  const Shares shares(cuts);
#pragma unroll 1
  for (int share = shares.first; share <= shares.last; share += shares.step) {
    own = blocks_for(count, share);
    through = inclusive_sum(own);
    if (__shfl_sync(0xffffffffu, through, 31) <= most) return true;
  }
  return false;
}

// The equal cut in front of `block`, moved to a node of the request that it lies in: the lanes have
// a request each, with `count` tiles, the last of which is the `through`-th of all.
__device__ __forceinline__ int node_edge_in_warp(const EqualCuts& cuts, int through, int count,
                                                 int block) {
  const int total = __shfl_sync(0xffffffffu, through, 31), cut = cuts.begin(block);
  const int request = __popc(__ballot_sync(0xffffffffu, through <= cut)) % 32;
  const int before = __shfl_sync(0xffffffffu, through - count, request);
  const int of_request = __shfl_sync(0xffffffffu, count, request);
  return cut < total ? NodeCuts(cuts, before, of_request).begin(block) : total;
}

// Up to 32 requests: every warp finds the range for itself. `kv_len`: of the lane's request.
template <class Shape>
__device__ __forceinline__ void locate_in_warp(const DecodeLaunch& launch, int kv_len, int block,
                                               Cursor& at, Range& range) {
  const StreamAttentionDecodeParams& p = launch.p;
  const int lane = threadIdx.x % 32;
  const RequestTiles tiles = tiles_of<Shape>(p, kv_len);
  const int count = lane < p.batch ? tiles.count : 0;
  const int through = inclusive_sum(count);
  range.total = __shfl_sync(0xffffffffu, through, 31);
  range.parts = 0;
  const EqualCuts cuts(range.total, launch.blocks);
  int own, used_through;
  if (!Shape::kInvariant && have_own_blocks(launch, count, cuts, own, used_through)) {
    const int mine = __popc(__ballot_sync(0xffffffffu, used_through <= block));
    at.request = min(mine, p.batch - 1);
    range.parts = __shfl_sync(0xffffffffu, own, at.request);
    range.first_block = __shfl_sync(0xffffffffu, used_through - own, at.request);
    const RequestTiles here{__shfl_sync(0xffffffffu, tiles.first, at.request),
                            __shfl_sync(0xffffffffu, count, at.request)};
    at.kv_len = __shfl_sync(0xffffffffu, kv_len, at.request);
    at.next_kv_len = 0;
    // A block that no request needs lies past the last one's.
    const int part = min(block - range.first_block, range.parts);
    const int begin = part_begin(here.count, range.parts, part);
    at.in_block = mine < p.batch ? part_begin(here.count, range.parts, part + 1) - begin : 0;
    at.tile = here.first + begin;
    at.in_request = here.count - begin;
    return;
  }
  Edges edges(cuts, block);
  if constexpr (Shape::kInvariant) {
    edges.begin = node_edge_in_warp(cuts, through, count, block);
    edges.end = node_edge_in_warp(cuts, through, count, block + 1);
  }
  const int begin = edges.begin;
  at.in_block = edges.end - begin;
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

// What threads share when they search together, and the lengths that they walk along by.
template <class Shape>
struct Search {
  int sums[Shape::kWarps];
  int request, before;
  int lens[Shape::kThreads];
  int edges[2];  // batch-invariant: where the block's range begins and ends
};

// Tiles up to and with the thread's request, of a block's worth of requests; `all`: of all of them.
template <class Shape>
__device__ __forceinline__ int scan_block(Search<Shape>& search, int count, int& all) {
  int through = inclusive_sum(count);
  __syncthreads();
  if (threadIdx.x % 32 == 31) search.sums[threadIdx.x / 32] = through;
  __syncthreads();
  all = 0;
#pragma unroll
  for (int i = 0; i < Shape::kWarps; ++i) {
    if (i < static_cast<int>(threadIdx.x / 32)) through += search.sums[i];
    all += search.sums[i];
  }
  return through;
}

// Whether a request with `count` tiles, the last of which is the `through`-th, holds tile `begin`.
__device__ __forceinline__ bool holds(int through, int count, int begin) {
  return through - count <= begin && begin < through;
}

// Moves the block's edges to nodes: threads that have the requests which the equal cuts lie in say
// where to. `each_request` calls its argument with the last tile and the count of each.
template <class Shape, class Requests>
__device__ __forceinline__ void move_edges(const EqualCuts& cuts, int total, int block,
                                           Search<Shape>& search, Edges& edges,
                                           Requests&& each_request) {
  each_request([&](int through, int count) {
    const int before = through - count;
    if (holds(through, count, edges.begin)) {
      search.edges[0] = NodeCuts(cuts, before, count).begin(block);
    }
    if (holds(through, count, edges.end)) {
      search.edges[1] = NodeCuts(cuts, before, count).begin(block + 1);
    }
  });
  __syncthreads();
  if (edges.begin < total) edges.begin = search.edges[0];
  if (edges.end < total) edges.end = search.edges[1];
}

template <class Shape>
__device__ __forceinline__ void start_at(const DecodeLaunch& launch, const Search<Shape>& search,
                                         int begin, int kv_len, int next_kv_len, Cursor& at,
                                         Range& range) {
  at.request = search.request;
  range.before = search.before;
  at.kv_len = kv_len;
  at.next_kv_len = next_kv_len;
  const RequestTiles tiles = tiles_of<Shape>(launch.p, kv_len);
  const int skipped = begin - range.before;
  at.tile = tiles.first + skipped;
  at.in_request = tiles.count - skipped;
}

// Up to one request a thread: `kv_len` is that of the thread's.
template <class Shape>
__device__ __forceinline__ void locate_in_block(const DecodeLaunch& launch, int kv_len, int block,
                                                Search<Shape>& search, Cursor& at, Range& range) {
  const StreamAttentionDecodeParams& p = launch.p;
  const int request = threadIdx.x;
  const int count = request < p.batch ? tiles_of<Shape>(p, kv_len).count : 0;
  search.lens[request] = kv_len;
  range.parts = 0;
  const int through = scan_block(search, count, range.total);
  const EqualCuts cuts(range.total, launch.blocks);
  Edges edges(cuts, block);
  if constexpr (Shape::kInvariant) {
    move_edges(cuts, range.total, block, search, edges,
               [&](auto&& use) { use(through, count); });
  }
  const int begin = edges.begin;
  at.in_block = edges.end - begin;
  if (holds(through, count, begin)) {
    search.request = request;
    search.before = through - count;
  }
  __syncthreads();
  if (at.in_block == 0) return;
  const int next = search.request + 1;
  start_at(launch, search, begin, search.lens[search.request],
           next < p.batch ? search.lens[next] : 0, at, range);
}

// Any number of requests, in turns of one a thread.
template <class Shape>
__device__ void locate_in_turns(const DecodeLaunch& launch, const Lens& lens, int block,
                                Search<Shape>& search, Cursor& at, Range& range) {
  const StreamAttentionDecodeParams& p = launch.p;
  const auto count_of = [&](int request) {
    return request < p.batch ? tiles_of<Shape>(p, lens(request)).count : 0;
  };
  range.total = range.parts = 0;
  for (int start = 0; start < p.batch; start += Shape::kThreads) {
    int all;
    scan_block(search, count_of(start + threadIdx.x), all);
    range.total += all;
  }
  const EqualCuts cuts(range.total, launch.blocks);
  Edges edges(cuts, block);
  if constexpr (Shape::kInvariant) {
    move_edges(cuts, range.total, block, search, edges, [&](auto&& use) {
      int ahead = 0;
      for (int start = 0; start < p.batch && ahead <= edges.end; start += Shape::kThreads) {
        const int count = count_of(start + threadIdx.x);
        int all;
        use(ahead + scan_block(search, count, all), count);
        ahead += all;
      }
    });
  }
  const int begin = edges.begin;
  at.in_block = edges.end - begin;
  if (at.in_block == 0) return;
  int ahead = 0;
  for (int start = 0; start < p.batch && ahead <= begin; start += Shape::kThreads) {
    const int request = start + threadIdx.x, count = count_of(request);
    int all;
    const int through = ahead + scan_block(search, count, all);
    ahead += all;
    if (holds(through, count, begin)) {
      search.request = request;
      search.before = through - count;
    }
  }
  __syncthreads();
  start_at(launch, search, begin, lens(search.request), lens(search.request + 1), at, range);
}

// The start of a block's range, for up to one request a thread. `own`: the length of the request
// that is the lane's, or, where requests are more than lanes, the thread's.
template <class Shape>
__device__ __forceinline__ void locate(const DecodeLaunch& launch, int own, int block,
                                       Search<Shape>& search, Cursor& at, Range& range) {
  if (launch.p.batch == 1) {
    locate_single<Shape>(launch, own, block, at, range);
  } else if (launch.p.batch <= 32) {
    locate_in_warp<Shape>(launch, own, block, at, range);
  } else {
    locate_in_block<Shape>(launch, own, block, search, at, range);
  }
}

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_CURSOR_CUH_
