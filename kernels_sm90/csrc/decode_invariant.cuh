// Batch-invariant requests: the fold of a request's spans, and the exchange of what blocks fold.
//
// Every span begins with a fresh state and ends with a merge of the warps. The states of spans are
// the leaves of one tree (`decode_schedule.h`), whose shape depends on the request alone. A block
// folds the nodes that are wholly its own, like the carries of a binary counter, and hands out
// nodes of one level; who merges a slice of the answer goes on with the same tree. So blocks, cuts
// and slices change where a sum is made, and never which sums are made.
#ifndef STREAM_ATTENTION_DECODE_INVARIANT_CUH_
#define STREAM_ATTENTION_DECODE_INVARIANT_CUH_

#include "decode_query.cuh"

namespace stream_attention {

// Scratch: the nodes that blocks hand out, where a head has several blocks, and behind them what
// blocks have folded so far above the lowest level. A block has places for every vector of each of
// its nodes; outputs of all blocks come first, then maxima and sums of all. As in
// decode_exchange.cuh, a reader empties what it took.
__host__ __device__ constexpr int64_t node_floats(int grid, int blocks_per_head, int vectors) {
  return blocks_per_head > 1 ? int64_t{kItemFloats} * grid * kMostNodes * vectors : 0;
}

// By level, then block, then vector: outputs of a level, then maxima and sums.
__host__ __device__ constexpr int64_t fold_floats(int grid, int vectors, int levels) {
  return int64_t{kItemFloats} * grid * vectors * levels;
}

// Levels of the fold of a request of up to `count` tiles that lie in scratch.
__host__ __device__ inline int levels_of(int count) {
  int levels = 0;
  while (levels < kMostLevels && kFewestSpanTiles << levels < count) ++levels;
  return levels > 0 ? levels - 1 : 0;
}

// Where a warp is, in shared memory for want of registers.
struct Turn {
  Seen seen;
  int last;    // `in_request` of the last tile of the span at hand
  int merges;  // ends of spans behind it
};

template <class T, class E, class Shape, bool kWholePages>
class DecodeSpans : protected DecodeQuery<T, E, Shape, kWholePages> {
 protected:
  using Query = DecodeQuery<T, E, Shape, kWholePages>;
  using Query::N, Query::kVectorsPerRow, Query::launch, Query::p, Query::lane, Query::warp;
  using Query::control;
  static constexpr int kVectors = N * kVectorsPerRow;

  __device__ __forceinline__ DecodeSpans(const DecodeLaunch& launched, char* shared)
      : Query(launched, shared), memory(shared) {}

  // The blocks that have nodes of the request at `at`, of which this block has the one at `at`.
  __device__ __forceinline__ SharedNodes sharers(const Cursor& at, bool, const Range& range) const {
    const EqualCuts equal(range.total, launch.blocks);
    const RequestTiles tiles = tiles_of<Shape>(p, at.kv_len);
    SharedNodes shared{at.request, 0, 0, 0, NodeCuts(equal, range.before, tiles.count)};
    const NodeCuts& cuts = shared.cuts;
    shared.parts = cuts.sharers();
    shared.slice = cuts.sharer((at.tile - tiles.first) / cuts.nodes.tiles);
    shared.log2_size = slice_log2(control.live_rows * kVectorsPerRow, shared.parts);
    return shared;
  }

  // The nodes that all blocks hand out.
  __device__ __forceinline__ Region handed_out() const {
    return Region(p.scratch, int64_t{gridDim.x} * (kMostNodes * kVectors));
  }

  // Of a request of the block's range, where the items of its nodes begin in `handed_out`. Requests
  // between the first and the last one are not shared.
  __device__ __forceinline__ int* items_of(int request) const {
    int* const items = reinterpret_cast<int*>(memory + Shape::kItemsAt);
    return items + (request == control.first_request ? 0 : kMostSpans);
  }

  // Finds them for the request at hand, which one thread has noted, by one warp: long before they
  // are used, for it takes several divisions.
  __device__ __forceinline__ void note_items() const {
    __syncwarp();
    const SharedNodes& shared = control.current;
    if (shared.parts == 1) return;
    int* const items = items_of(shared.request);
    const int blocks = static_cast<int>(launch.blocks.divisor);
    for (int node = lane; node < shared.cuts.nodes.count; node += 32) {
      const int owner = shared.cuts.owner(node), place = shared.cuts.place(node, owner);
      items[node] = ((control.lead * blocks + owner) * kMostNodes + place) * kVectors;
    }
  }

  // Where the block keeps the vectors of a node of the fold. Whoever reads one is behind the
  // barrier of a merge that its writer passed too.
  __device__ __forceinline__ Region folded(int level) const {
    if (level == 0) return Region(reinterpret_cast<float*>(memory + Shape::kFoldAt), kVectors);
    const int blocks = static_cast<int>(launch.blocks.divisor), grid = gridDim.x;
    const int64_t items = int64_t{grid} * kVectors;
    const int64_t below = node_floats(grid, blocks, kVectors) + kItemFloats * items * (level - 1);
    Region region(p.scratch + below, items);
    region.outs += blockIdx.x * kVectors;
    region.sums += blockIdx.x * kVectors;
    return region;
  }

  // The state of four columns of a row, the `vector`-th of the block's, over the span that ends
  // `in_request` - 1 tiles before the request. Nodes that end with it are folded; the request's
  // answer is written, a node that other blocks need is handed out.
  __device__ __forceinline__ void give(const SharedNodes& shared, int in_request, int vector,
                                       State state) const {
    const NodeCuts& cuts = shared.cuts;
    const int span = (cuts.count - in_request) / cuts.nodes.span;
    const bool whole = shared.parts == 1, last = in_request == 1;
    const int levels = whole ? kMostLevels : cuts.nodes.level;
#pragma unroll 1
    for (int level = 0; level < levels; ++level) {
      const Region at = folded(level);
      if ((span >> level) % 2 != 0) {
        const float4 out = at.outs[vector];
        const float2 sums = at.sums[vector];
        state = add_rounded(State{out, sums.x, sums.y}, state);
      } else if (!last) {
        at.outs[vector] = state.out;
        at.sums[vector] = make_float2(state.top, state.sum);
        return;
      }
    }
    if (whole) {
      this->write(this->answer_at(shared.request, vector), state);
    } else {
      handed_out().publish(items_of(shared.request)[span >> levels] + vector, state);
    }
  }

  // Nodes that a lane reads at once.
  static constexpr int kMostTaken = 4;

  // What a lane's first `count` nodes are in the tree. Lanes without one have what means nothing.
  static __device__ __forceinline__ State fold_nodes(int count, State (&states)[kMostTaken]) {
#pragma unroll
    for (int step = 1; step < kMostTaken; step *= 2) {
#pragma unroll
      for (int i = 0; i + step < kMostTaken; i += 2 * step) {
        if (i + step < count) states[i] = add_rounded(states[i], states[i + step]);
      }
    }
    return states[0];
  }

  // The root of the tree over the states of `held` lanes, `apart` lanes from each other, in the
  // first of them.
  static __device__ __forceinline__ void fold_lanes(State& state, int lane_node, int held,
                                                    int lanes, int apart) {
#pragma unroll 1
    for (int step = 1; step < lanes; step *= 2) {
      const auto right = [&](float x) { return __shfl_down_sync(0xffffffffu, x, step * apart); };
      const State other{make_float4(right(state.out.x), right(state.out.y), right(state.out.z),
                                    right(state.out.w)),
                        right(state.top), right(state.sum)};
      // A lane that is no node's first goes on with what nobody reads.
      if (lane_node + step < held) state = add_rounded(state, other);
    }
  }

  // This block's slice of the answer of a shared request. A warp takes some vectors side by side,
  // whose items are neighbours in memory, its lanes up to four nodes of each.
  __device__ void merge_slice(const SharedNodes& shared) const {
    const int vectors = control.live_rows * kVectorsPerRow, size = 1 << shared.log2_size;
    const int begin = shared.slice << shared.log2_size;
    // Powers of two, lest anything be divided: this is on the way to every answer.
    const int nodes = shared.cuts.nodes.count, log2_each = nodes > 32 ? 2 : nodes > 16 ? 1 : 0;
    const int each = 1 << log2_each, held = (nodes + each - 1) >> log2_each;
    int log2_lanes = 5;
    while (1 << log2_lanes >> 1 >= held && 32 >> log2_lanes < size) --log2_lanes;
    const int lanes = 1 << log2_lanes, log2_columns = 5 - log2_lanes, columns = 1 << log2_columns;
    const int lane_node = lane >> log2_columns;
    const Region from = handed_out();
    const int* const of_nodes = items_of(shared.request) + (lane_node << log2_each);
    for (int round = warp << log2_columns; round < size; round += Shape::kWarps << log2_columns) {
      const int vector = begin + round + (lane & (columns - 1));
      const int left = vector < vectors ? nodes - (lane_node << log2_each) : 0;
      const int count = min(max(left, 0), each);
      const auto answer = this->answer_at(shared.request, vector < vectors ? vector : 0);
      int items[kMostTaken];
#pragma unroll
      for (int i = 0; i < kMostTaken; ++i) items[i] = i < count ? of_nodes[i] + vector : 0;
      State states[kMostTaken];
      from.take(count, items, states);
      State state = fold_nodes(count, states);
      fold_lanes(state, lane_node, held, lanes, columns);
      if (lane < columns && vector < vectors) this->write(answer, state);
    }
  }

  char* memory;  // shared
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_INVARIANT_CUH_
