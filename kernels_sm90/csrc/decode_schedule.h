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

// The tiles of one request: [first, first + count) of its own tiles. A request without visible
// tokens still owns one tile, so that some block writes its empty rows.
struct RequestTiles {
  int first;
  int count;
};

// window_left < 0: no window. The oldest query of the request sits at kv_len - qo_len.
STREAM_ATTENTION_BOTH RequestTiles request_tiles(int kv_len, int qo_len, int window_left,
                                                 int tile_tokens) {
  int first = 0;
  if (window_left >= 0) {
    const int64_t oldest = static_cast<int64_t>(kv_len) - qo_len - window_left;
    if (oldest > 0) first = static_cast<int>(oldest / tile_tokens);
  }
  const int end = static_cast<int>((static_cast<int64_t>(kv_len) + tile_tokens - 1) / tile_tokens);
  const int count = end - first;
  return RequestTiles{first, count > 0 ? count : 1};
}

// Block `block` of `blocks` owns tiles [begin(block), begin(block + 1)) of `total` >= 1 tiles. With
// fewer tiles than blocks the last blocks own none and the others one each.
struct EqualCuts {
  int64_t total;
  int blocks;

  STREAM_ATTENTION_BOTH EqualCuts(int64_t total_tiles, int num_blocks)
      : total(total_tiles),
        blocks(total_tiles < num_blocks ? static_cast<int>(total_tiles) : num_blocks) {}

  STREAM_ATTENTION_BOTH int64_t begin(int block) const {
    return block >= blocks ? total : total * block / blocks;
  }

  // The block that owns tile `tile`: the last one that begins at or before it.
  STREAM_ATTENTION_BOTH int owner(int64_t tile) const {
    return static_cast<int>(((tile + 1) * blocks - 1) / total);
  }
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_SCHEDULE_H_
