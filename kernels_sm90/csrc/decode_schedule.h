// The device-side schedule of decode: the KV tiles of one KV head, all requests in a row, are cut
// into equal ranges, one a block. Nothing is planned on the host, so lengths may change under a
// captured graph. The same code runs on the CPU, where it is tested exhaustively.
#ifndef STREAM_ATTENTION_DECODE_SCHEDULE_H_
#define STREAM_ATTENTION_DECODE_SCHEDULE_H_

#include <stdint.h>

#ifdef __CUDACC__
#define STREAM_ATTENTION_BOTH __host__ __device__ __forceinline__
#else
#define STREAM_ATTENTION_BOTH inline
#endif

namespace stream_attention {

// n / divisor for 0 <= n < 2^31 by one multiplication. With 2^shift >= divisor > 2^(shift-1) the
// multiplier ceil(2^(31+shift) / divisor) fits 32 bits and the quotient is exact.
struct Divider {
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;

  STREAM_ATTENTION_BOTH static Divider of(int divisor) {
    Divider made{static_cast<uint32_t>(divisor), 0, 0};
    while ((uint64_t{1} << made.shift) < made.divisor) ++made.shift;
    if (made.shift > 0) {
      const uint64_t scaled = uint64_t{1} << (31 + made.shift);
      made.multiplier = static_cast<uint32_t>((scaled + made.divisor - 1) / made.divisor);
    }
    return made;
  }

  STREAM_ATTENTION_BOTH int operator()(int n) const {
    if (shift == 0) return n;
#ifdef __CUDA_ARCH__
    const uint32_t high = __umulhi(static_cast<uint32_t>(n), multiplier);
#else
    const uint64_t product = uint64_t{static_cast<uint32_t>(n)} * multiplier;
    const uint32_t high = static_cast<uint32_t>(product >> 32);
#endif
    return static_cast<int>(high >> (shift - 1));
  }
};

// The tiles of one request: [first, first + count) of its own tiles. A request without visible
// tokens still owns one tile, so that some block writes its empty rows.
struct RequestTiles {
  int first;
  int count;
};

// window_left < 0: no window. The oldest query of the request sits at kv_len - qo_len.
// tile_tokens: a power of two. kv_len < 2^31 - tile_tokens.
STREAM_ATTENTION_BOTH RequestTiles request_tiles(int kv_len, int qo_len, int window_left,
                                                 int tile_tokens) {
  int first = 0;
  if (window_left >= 0) {
    const int64_t oldest = static_cast<int64_t>(kv_len) - qo_len - window_left;
    if (oldest > 0) first = static_cast<int>(oldest) / tile_tokens;
  }
  const int count = (kv_len + tile_tokens - 1) / tile_tokens - first;
  return RequestTiles{first, count > 0 ? count : 1};
}

// Block `block` of `blocks` owns tiles [begin(block), begin(block + 1)) of 1 <= `total` < 2^31
// tiles: `share` each, one more in the first `extra` blocks. With fewer tiles than blocks the last
// blocks own none and the others one each.
struct EqualCuts {
  int blocks;
  int share;
  int extra;

  STREAM_ATTENTION_BOTH EqualCuts(int total, const Divider& num_blocks) {
    const int most = static_cast<int>(num_blocks.divisor);
    blocks = total < most ? total : most;
    share = total < most ? 1 : num_blocks(total);
    extra = total - share * blocks;
  }

  STREAM_ATTENTION_BOTH int begin(int block) const {
    const int b = block < blocks ? block : blocks;
    return b * share + (b < extra ? b : extra);
  }

  // The block that owns tile `tile`: the last one that begins at or before it.
  STREAM_ATTENTION_BOTH int owner(int tile) const {
    const int longer = extra * (share + 1);
    return tile < longer ? tile / (share + 1) : extra + (tile - longer) / share;
  }
};

// Requests may have blocks of their own, so that no block serves two: with `share` tiles a block, a
// request of `count` tiles takes this many.
STREAM_ATTENTION_BOTH int blocks_for(int count, int share) { return (count + share - 1) / share; }

// The shares that are tried for that: from the equal one up to about a sixteenth more.
struct Shares {
  int first;
  int last;
  int step;

  STREAM_ATTENTION_BOTH explicit Shares(const EqualCuts& cuts) {
    first = cuts.share + (cuts.extra > 0 ? 1 : 0);
    last = first + first / 16 + 1;
    step = first / 64 + 1;
  }
};

// The `part`-th of `parts` blocks that a request of `count` >= `parts` tiles has for itself owns
// tiles [part_begin(part), part_begin(part + 1)).
STREAM_ATTENTION_BOTH int part_begin(int count, int parts, int part) {
  const int each = count / parts, longer = count - each * parts;
  return part * each + (part < longer ? part : longer);
}

// A request that `parts` blocks share is merged by the same blocks: each takes a slice of
// 2^log2_size of its `vectors` vectors; slice j goes to the j-th of the blocks.
STREAM_ATTENTION_BOTH int slice_log2(int vectors, int parts) {
  int log2_size = 0;
  while ((parts << log2_size) < vectors) ++log2_size;
  return log2_size;
}

// Batch-invariant requests are folded in one fixed order, whoever does it: spans of tiles, counted
// from the request's first tile, are the leaves of a binary tree in which a node without a right
// half is its left half. Spans depend on the request's own tiles alone.
constexpr int kFewestSpanTiles = 8;
constexpr int kMostSpans = 64;
constexpr int kMostLevels = 6;  // of the tree above its leaves
constexpr int kMostNodes = 9;   // that a block hands out

STREAM_ATTENTION_BOTH int span_tiles(int count) {
  const int tiles = (count - 1) / kMostSpans + 1;
  return tiles < kFewestSpanTiles ? kFewestSpanTiles : tiles;
}

// How a request of `count` tiles behind `before` others is parted among blocks: into nodes of one
// level of its tree, each whole in one block. A node has at most a quarter of a block's share of
// tiles, if a span has: so far a range may grow. Where the equal cuts already lie at larger nodes,
// those are taken.
struct Nodes {
  int span;   // tiles of a span
  int level;  // of the nodes
  int tiles;  // of a node
  int count;  // nodes of the request

  STREAM_ATTENTION_BOTH static Nodes of(const EqualCuts& cuts, int before, int count) {
    Nodes nodes{span_tiles(count), 0, 0, 0};
    while (nodes.level < kMostLevels && nodes.span <= cuts.share / 4 >> (nodes.level + 1)) {
      ++nodes.level;
    }
    if (cuts.extra == 0 && cuts.share % nodes.span == 0 && before % nodes.span == 0) {
      const int spans = cuts.share / nodes.span | before / nodes.span;
      int level = 0;
      while (level < kMostLevels && (spans >> level) % 2 == 0) ++level;
      if (level > nodes.level) nodes.level = level;
    }
    nodes.tiles = nodes.span << nodes.level;
    nodes.count = (count - 1) / nodes.tiles + 1;
    return nodes;
  }
};

// A request as it lies among all: `count` tiles behind `before` others. A node belongs to the block
// that owns its first tile under the equal cuts.
struct NodeCuts {
  EqualCuts cuts;
  int before;
  int count;
  Nodes nodes;

  STREAM_ATTENTION_BOTH NodeCuts(const EqualCuts& equal, int tiles_before, int tiles)
      : cuts(equal),
        before(tiles_before),
        count(tiles),
        nodes(Nodes::of(equal, tiles_before, tiles)) {}

  // The first node at or behind the equal cut in front of `block`.
  STREAM_ATTENTION_BOTH int first_node(int block) const {
    const int offset = cuts.begin(block) - before;
    return offset <= 0 ? 0 : (offset - 1) / nodes.tiles + 1;
  }

  // Where the cut in front of `block`, which lies in the request, is moved to: up to a node.
  STREAM_ATTENTION_BOTH int begin(int block) const {
    const int node = first_node(block);
    return before + (node < nodes.count ? node * nodes.tiles : count);
  }

  STREAM_ATTENTION_BOTH int owner(int node) const {
    return cuts.owner(before + node * nodes.tiles);
  }

  // Blocks that have nodes are numbered from 0. Where a node has more tiles than a block's share,
  // some blocks have none, and the others one each; else all between the first and the last have.
  STREAM_ATTENTION_BOTH bool apart() const { return nodes.tiles > cuts.share; }
  STREAM_ATTENTION_BOTH int sharer(int node) const {
    return apart() ? node : owner(node) - owner(0);
  }
  STREAM_ATTENTION_BOTH int sharers() const { return sharer(nodes.count - 1) + 1; }

  // Where the block `of_block` that owns `node` puts it: those of the request that it begins come
  // last first, those of the request that it goes on with first first. They never meet.
  STREAM_ATTENTION_BOTH int place(int node, int of_block) const {
    return of_block == owner(0) ? kMostNodes - 1 - node : node - first_node(of_block);
  }
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_SCHEDULE_H_
