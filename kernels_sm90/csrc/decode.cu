// Exact decode on sm_90: the exported functions.
#include <cuda_runtime.h>

#include "decode_dispatch.h"
#include "decode_prepared.cuh"
#include "decode_schedule.h"

namespace stream_attention {
namespace {

constexpr int kMostRows = 64;
// A tile past the last token must not overflow an int32.
constexpr int kMostCapacity = INT32_MAX - 4096;

int check(const StreamAttentionDecodeParams& p, int num_sms) {
  const bool counts = p.batch >= 1 && p.qo_len >= 1 && p.num_kv_heads >= 1 && p.group >= 1 &&
                      p.page_size >= 1 && p.capacity >= 0 && p.capacity <= kMostCapacity &&
                      static_cast<int64_t>(p.qo_len) * p.group <= kMostRows && num_sms >= 1;
  if (!counts) return STREAM_ATTENTION_DECODE_BAD_SHAPE;
  return STREAM_ATTENTION_OK;
}

int dispatch(const DecodeCall& call) {
  const bool invariant = call.params->batch_invariant != 0;
  switch (call.params->dtype) {
    case STREAM_ATTENTION_FLOAT16:
      return invariant ? decode_float16_invariant(call) : decode_float16(call);
    case STREAM_ATTENTION_BFLOAT16:
      return invariant ? decode_bfloat16_invariant(call) : decode_bfloat16(call);
    default: return STREAM_ATTENTION_DECODE_BAD_DTYPE;
  }
}

}  // namespace
}  // namespace stream_attention

using namespace stream_attention;

extern "C" {

int64_t stream_attention_decode_struct_bytes(int32_t which) {
  switch (which) {
    case 0: return sizeof(StreamAttentionDecodeParams);
    case 1: return sizeof(StreamAttentionDecodeGeometry);
    case 2: return sizeof(PreparedDecode);
    default: return -1;
  }
}

const char* stream_attention_decode_error_string(int32_t status) {
  switch (status) {
    case STREAM_ATTENTION_OK: return "success";
    case STREAM_ATTENTION_DECODE_BAD_SHAPE:
      return "batch, qo_len, num_kv_heads, group, page_size, num_sms: must be >= 1; capacity: "
             "0 .. 2^31 - 4097; qo_len * group: at most 64; tiles of the batch: below 2^31";
    case STREAM_ATTENTION_DECODE_BAD_HEAD_DIM:
      return "head_dim: must be 64, 80, 96, 128, 192 or 256";
    case STREAM_ATTENTION_DECODE_BAD_DTYPE:
      return "dtype: must be 1 (float16) or 2 (bfloat16), kv_dtype: 0 (like q) or 1 (float8_e4m3)";
    case STREAM_ATTENTION_DECODE_NULL_POINTER: return "a required pointer is null";
    case STREAM_ATTENTION_DECODE_MISALIGNED:
      return "q, key, value: must be aligned to 16 bytes, out to 8, scratch to 32";
    case STREAM_ATTENTION_DECODE_BAD_STRIDE:
      return "strides of pages and tokens: must be multiples of 16 bytes below 64 GiB; of the page "
             "table: below 2^32 elements";
    case STREAM_ATTENTION_DECODE_BAD_PAGES:
      return "num_pages: must be >= 1, and >= batch where there is no page table";
    case STREAM_ATTENTION_DECODE_BAD_CALL:
      return "call: must be aligned to 8 and as large as decode_struct_bytes(2) says";
    case STREAM_ATTENTION_DECODE_NOT_PREPARED:
      return "call: must have been prepared by decode_prepare, without an error";
    default: return cudaGetErrorString(static_cast<cudaError_t>(status));
  }
}

int32_t stream_attention_decode_geometry(const StreamAttentionDecodeParams* params, int32_t num_sms,
                                         StreamAttentionDecodeGeometry* geometry) {
  const int status = check(*params, num_sms);
  if (status != STREAM_ATTENTION_OK) return status;
  return dispatch({DecodeAction::kGeometry, params, num_sms, geometry, nullptr});
}

int32_t stream_attention_decode_prepare(const StreamAttentionDecodeParams* params, int32_t num_sms,
                                        void* call, int64_t call_bytes) {
  if (call == nullptr) return STREAM_ATTENTION_DECODE_NULL_POINTER;
  const bool fits = call_bytes == sizeof(PreparedDecode) &&
                    reinterpret_cast<uintptr_t>(call) % alignof(PreparedDecode) == 0;
  if (!fits) return STREAM_ATTENTION_DECODE_BAD_CALL;
  auto* prepared = static_cast<PreparedDecode*>(call);
  prepared->prepared = 0;  // what was prepared before is gone, even if this is refused
  const int status = check(*params, num_sms);
  if (status != STREAM_ATTENTION_OK) return status;
  return dispatch({DecodeAction::kPrepare, params, num_sms, nullptr, prepared});
}

int32_t stream_attention_decode(const void* call, void* stream) {
  if (call == nullptr) return STREAM_ATTENTION_DECODE_NULL_POINTER;
  const auto& prepared = *static_cast<const PreparedDecode*>(call);
  if (prepared.prepared != PreparedDecode::kPrepared) return STREAM_ATTENTION_DECODE_NOT_PREPARED;
  const int status = enqueue(prepared, stream);
  return status == CUDA_ERROR_INVALID_CONTEXT ? enqueue_in_new_thread(prepared, stream) : status;
}

void stream_attention_decode_tiles(int32_t kv_len, int32_t qo_len, int32_t window_left,
                                   int32_t tile_tokens, int32_t* first, int32_t* count) {
  const RequestTiles tiles = request_tiles(kv_len, qo_len, window_left, tile_tokens);
  *first = tiles.first;
  *count = tiles.count;
}

int32_t stream_attention_decode_begin(int32_t total_tiles, int32_t blocks, int32_t block) {
  return EqualCuts(total_tiles, Divider::of(blocks)).begin(block);
}

int32_t stream_attention_decode_owner(int32_t total_tiles, int32_t blocks, int32_t tile) {
  return EqualCuts(total_tiles, Divider::of(blocks)).owner(tile);
}

void stream_attention_decode_shares(int32_t total_tiles, int32_t blocks, int32_t* first,
                                    int32_t* last, int32_t* step) {
  const Shares shares(EqualCuts(total_tiles, Divider::of(blocks)));
  *first = shares.first;
  *last = shares.last;
  *step = shares.step;
}

int32_t stream_attention_decode_blocks_for(int32_t count, int32_t share) {
  return blocks_for(count, share);
}

int32_t stream_attention_decode_part_begin(int32_t count, int32_t parts, int32_t part) {
  return part_begin(count, parts, part);
}

int32_t stream_attention_decode_divide(int32_t n, int32_t divisor) {
  return Divider::of(divisor)(n);
}

void stream_attention_decode_nodes(int32_t total_tiles, int32_t blocks, int32_t before,
                                   int32_t count, StreamAttentionDecodeNodes* nodes) {
  const NodeCuts made(EqualCuts(total_tiles, Divider::of(blocks)), before, count);
  *nodes = {made.nodes.span, made.nodes.level, made.nodes.tiles, made.nodes.count, made.sharers()};
}

int32_t stream_attention_decode_node_begin(int32_t total_tiles, int32_t blocks, int32_t before,
                                           int32_t count, int32_t block) {
  return NodeCuts(EqualCuts(total_tiles, Divider::of(blocks)), before, count).begin(block);
}

void stream_attention_decode_node(int32_t total_tiles, int32_t blocks, int32_t before,
                                  int32_t count, int32_t node, int32_t* owner, int32_t* sharer,
                                  int32_t* place) {
  const NodeCuts made(EqualCuts(total_tiles, Divider::of(blocks)), before, count);
  *owner = made.owner(node);
  *sharer = made.sharer(node);
  *place = made.place(node, *owner);
}

int32_t stream_attention_decode_slice_log2(int32_t vectors, int32_t parts) {
  return slice_log2(vectors, parts);
}

}  // extern "C"
