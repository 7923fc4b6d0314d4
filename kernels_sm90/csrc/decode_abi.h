// The C ABI of exact decode: a plain struct is prepared once, a run is one call. Results are as in
// state_abi.h: 0 is success, positive values are cudaError_t, negative values are refusals.
#ifndef STREAM_ATTENTION_DECODE_ABI_H_
#define STREAM_ATTENTION_DECODE_ABI_H_

#include "stream_attention/state_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

enum StreamAttentionDecodeStatus {
  STREAM_ATTENTION_DECODE_BAD_SHAPE = -101,
  STREAM_ATTENTION_DECODE_BAD_HEAD_DIM = -102,
  STREAM_ATTENTION_DECODE_BAD_DTYPE = -103,
  STREAM_ATTENTION_DECODE_NULL_POINTER = -104,
  STREAM_ATTENTION_DECODE_MISALIGNED = -105,
  STREAM_ATTENTION_DECODE_BAD_STRIDE = -106,
  STREAM_ATTENTION_DECODE_BAD_PAGES = -107,
  STREAM_ATTENTION_DECODE_BAD_CALL = -108,
  STREAM_ATTENTION_DECODE_NOT_PREPARED = -109,
};

// What K and V hold.
enum StreamAttentionKvDtype {
  STREAM_ATTENTION_KV_LIKE_Q = 0,
  STREAM_ATTENTION_KV_FLOAT8_E4M3 = 1,
};

// Strides count elements of their tensor. Rows (the head_dim axis) are dense and 16-byte aligned.
struct StreamAttentionDecodeParams {
  const void* q;               // [batch * qo_len, num_qo_heads, head_dim]
  const void* key;             // pages: [num_pages, page_size, num_kv_heads, head_dim], strided
  const void* value;
  const int32_t* page_table;   // null: contiguous, page b is request b
  const int32_t* kv_lens;      // null: every request holds `capacity` tokens
  const float* attn_sink;      // [num_qo_heads], null: none
  const float* key_scale;      // fp8 K and V: of each KV head, null: 1
  const float* value_scale;
  void* out;                   // [batch * qo_len, num_qo_heads, head_dim], dtype of q
  float* lse;                  // natural log; null: not wanted
  float* scratch;              // scratch_floats, all bits set before the first run
  int64_t q_token_stride, q_head_stride;
  int64_t k_page_stride, k_token_stride, k_head_stride;
  int64_t v_page_stride, v_token_stride, v_head_stride;
  int64_t table_batch_stride, table_head_stride;
  int64_t lens_batch_stride, lens_head_stride;
  int64_t key_scale_stride, value_scale_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t lse_token_stride, lse_head_stride;
  int32_t batch, qo_len, num_kv_heads, group;
  int32_t capacity, page_size, head_dim, dtype;  // dtype: StreamAttentionDtype
  int32_t kv_dtype;                              // StreamAttentionKvDtype
  int32_t causal, window_left;                   // window_left < 0: none
  float sm_scale, soft_cap;                      // soft_cap <= 0: none
  int32_t num_pages;                             // of key and value
  int32_t batch_invariant;  // not 0: the bits of a request depend on no other request
};

// How a problem is launched; depends on shapes and the device, never on lengths.
struct StreamAttentionDecodeGeometry {
  int64_t scratch_floats;
  int32_t grid;             // blocks
  int32_t blocks_per_head;  // blocks that share the tiles of one KV head (and group of rows)
  int32_t row_groups;       // packed query rows are served `rows` at a time
  int32_t rows;
  int32_t tile_tokens;
  int32_t threads;
  int32_t shared_bytes;
  int32_t slots;            // of the ring: each holds K or V of a tile
};

// sizeof of the params (0), the geometry (1) or a prepared call (2) as this library was compiled;
// -1 for any other.
STREAM_ATTENTION_EXPORT int64_t stream_attention_decode_struct_bytes(int32_t which);

STREAM_ATTENTION_EXPORT const char* stream_attention_decode_error_string(int32_t status);

// Needs no GPU. num_sms >= 1.
STREAM_ATTENTION_EXPORT int32_t stream_attention_decode_geometry(
    const struct StreamAttentionDecodeParams* params, int32_t num_sms,
    struct StreamAttentionDecodeGeometry* geometry);

// Loads the kernel onto the current device and fills `call` with all that its launches share, a
// copy of the params included. call: the caller's memory, aligned to 8, of the size that
// `stream_attention_decode_struct_bytes(2)` gives; what it holds is the library's business, and
// valid in this process alone. It may be copied, and prepared anew while launches of it run on the
// device, but not during a call that launches it. A `call` whose preparation was refused is none.
STREAM_ATTENTION_EXPORT int32_t stream_attention_decode_prepare(
    const struct StreamAttentionDecodeParams* params, int32_t num_sms, void* call,
    int64_t call_bytes);

// Enqueues a prepared call on `stream`, a cudaStream_t of the device that was current when it was
// prepared and is current now. Writes nothing to `call`, so that threads may share it. Refuses
// memory that was not prepared. No allocation, no synchronisation.
STREAM_ATTENTION_EXPORT int32_t stream_attention_decode(const void* call, void* stream);

// The schedule's arithmetic, for tests without a GPU. tiles: of one request, {first, count}.
STREAM_ATTENTION_EXPORT void stream_attention_decode_tiles(int32_t kv_len, int32_t qo_len,
                                                           int32_t window_left, int32_t tile_tokens,
                                                           int32_t* first, int32_t* count);
STREAM_ATTENTION_EXPORT int32_t stream_attention_decode_begin(int32_t total_tiles, int32_t blocks,
                                                              int32_t block);
STREAM_ATTENTION_EXPORT int32_t stream_attention_decode_owner(int32_t total_tiles, int32_t blocks,
                                                              int32_t tile);
// The shares tried where requests may have blocks of their own; the tiles of such a block.
STREAM_ATTENTION_EXPORT void stream_attention_decode_shares(int32_t total_tiles, int32_t blocks,
                                                            int32_t* first, int32_t* last,
                                                            int32_t* step);
STREAM_ATTENTION_EXPORT int32_t stream_attention_decode_blocks_for(int32_t count, int32_t share);
STREAM_ATTENTION_EXPORT int32_t stream_attention_decode_part_begin(int32_t count, int32_t parts,
                                                                   int32_t part);
STREAM_ATTENTION_EXPORT int32_t stream_attention_decode_divide(int32_t n, int32_t divisor);
// Batch-invariant: how a request of `count` tiles behind `before` others is parted into nodes.
struct StreamAttentionDecodeNodes {
  int32_t span;     // tiles of a span
  int32_t level;    // of the nodes in the request's tree
  int32_t tiles;    // of a node
  int32_t count;    // nodes
  int32_t sharers;  // blocks that have nodes
};
STREAM_ATTENTION_EXPORT void stream_attention_decode_nodes(
    int32_t total_tiles, int32_t blocks, int32_t before, int32_t count,
    struct StreamAttentionDecodeNodes* nodes);
// Where the cut in front of a block, which lies in the request, is moved to.
STREAM_ATTENTION_EXPORT int32_t stream_attention_decode_node_begin(int32_t total_tiles,
                                                                   int32_t blocks, int32_t before,
                                                                   int32_t count, int32_t block);
// Of a node: its block, that block's number among those that share the request, and the place that
// the block puts it in.
STREAM_ATTENTION_EXPORT void stream_attention_decode_node(int32_t total_tiles, int32_t blocks,
                                                          int32_t before, int32_t count,
                                                          int32_t node, int32_t* owner,
                                                          int32_t* sharer, int32_t* place);
STREAM_ATTENTION_EXPORT int32_t stream_attention_decode_slice_log2(int32_t vectors, int32_t parts);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // STREAM_ATTENTION_DECODE_ABI_H_
