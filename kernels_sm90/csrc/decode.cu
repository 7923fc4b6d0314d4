// Exact decode on sm_90: choice of instance, launch geometry, and the exported functions.
#include <type_traits>

#include "decode_kernel.cuh"

namespace stream_attention {
namespace {

// A grid that is a multiple of 16 fills every GPC evenly: on an H200 128 blocks beat 132 by 1-3 %.
constexpr int kMostBlocks = 128;
constexpr int kMostRows = 64;
// A tile past the last token must not overflow an int32.
constexpr int kMostCapacity = INT32_MAX - 4096;

template <class T, int kHeadDim, int kRows>
struct Instance {
  using Type = T;
  static constexpr int D = kHeadDim;
  static constexpr int N = kRows;
  using Shape = DecodeShape<kHeadDim, kRows>;
};

int rows_of(const StreamAttentionDecodeParams& p) { return p.qo_len * p.group; }

template <class T, int kHeadDim, class Use>
int with_rows(const StreamAttentionDecodeParams& p, Use&& use) {
  return rows_of(p) <= 8 ? use(Instance<T, kHeadDim, 8>{}) : use(Instance<T, kHeadDim, 16>{});
}

template <class T, class Use>
int with_head_dim(const StreamAttentionDecodeParams& p, Use&& use) {
  switch (p.head_dim) {
    case 64: return with_rows<T, 64>(p, use);
    case 128: return with_rows<T, 128>(p, use);
    default: return STREAM_ATTENTION_DECODE_BAD_HEAD_DIM;
  }
}

template <class Use>
int with_instance(const StreamAttentionDecodeParams& p, Use&& use) {
  switch (p.dtype) {
    case STREAM_ATTENTION_FLOAT16: return with_head_dim<__half>(p, use);
    case STREAM_ATTENTION_BFLOAT16: return with_head_dim<__nv_bfloat16>(p, use);
    default: return STREAM_ATTENTION_DECODE_BAD_DTYPE;
  }
}

int check(const StreamAttentionDecodeParams& p, int num_sms) {
  const bool counts = p.batch >= 1 && p.qo_len >= 1 && p.num_kv_heads >= 1 && p.group >= 1 &&
                      p.page_size >= 1 && p.capacity >= 0 && p.capacity <= kMostCapacity &&
                      static_cast<int64_t>(p.qo_len) * p.group <= kMostRows && num_sms >= 1;
  if (!counts) return STREAM_ATTENTION_DECODE_BAD_SHAPE;
  return STREAM_ATTENTION_OK;
}

template <class Chosen>
StreamAttentionDecodeGeometry geometry_of(const StreamAttentionDecodeParams& p, int num_sms) {
  using Shape = typename Chosen::Shape;
  StreamAttentionDecodeGeometry g = {};
  g.rows = Shape::N;
  g.row_groups = (rows_of(p) + Shape::N - 1) / Shape::N;
  const int heads = p.num_kv_heads * g.row_groups;
  const int most = num_sms < kMostBlocks ? num_sms : kMostBlocks;
  g.blocks_per_head = most / heads > 0 ? most / heads : 1;
  g.grid = g.blocks_per_head * heads;
  g.tile_tokens = Shape::kTile;
  g.threads = kDecodeThreads;
  g.shared_bytes = Shape::kSharedBytes;
  g.stages = Shape::kStages;
  g.scratch_floats = int64_t{2} * g.grid * Shape::kPartFloats;
  g.num_counters = static_cast<int64_t>(p.batch) * heads;
  return g;
}

template <class Chosen>
constexpr auto kernel_of() {
  return decode_kernel<typename Chosen::Type, Chosen::D, Chosen::N>;
}

bool aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

int check_pointers(const StreamAttentionDecodeParams& p) {
  if (!p.q || !p.key || !p.value || !p.out || !p.scratch || !p.counters) {
    return STREAM_ATTENTION_DECODE_NULL_POINTER;
  }
  const bool fits = aligned(p.q, 16) && aligned(p.key, 16) && aligned(p.value, 16) &&
                    aligned(p.out, 8) && aligned(p.scratch, 16);
  if (!fits) return STREAM_ATTENTION_DECODE_MISALIGNED;
  return STREAM_ATTENTION_OK;
}

int finish_call(cudaError_t error) {
  // A refused call must not show up again as the error of some later one.
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return static_cast<int>(error);
}

}  // namespace
}  // namespace stream_attention

using namespace stream_attention;

extern "C" {

int64_t stream_attention_decode_struct_bytes(int32_t which) {
  if (which == 0) return sizeof(StreamAttentionDecodeParams);
  return which == 1 ? static_cast<int64_t>(sizeof(StreamAttentionDecodeGeometry)) : -1;
}

const char* stream_attention_decode_error_string(int32_t status) {
  switch (status) {
    case STREAM_ATTENTION_OK: return "success";
    case STREAM_ATTENTION_DECODE_BAD_SHAPE:
      return "batch, qo_len, num_kv_heads, group, page_size, num_sms: must be >= 1; capacity: "
             "0 .. 2^31 - 4097; qo_len * group: at most 64";
    case STREAM_ATTENTION_DECODE_BAD_HEAD_DIM: return "head_dim: must be 64 or 128";
    case STREAM_ATTENTION_DECODE_BAD_DTYPE: return "dtype: must be 1 (float16) or 2 (bfloat16)";
    case STREAM_ATTENTION_DECODE_NULL_POINTER: return "a required pointer is null";
    case STREAM_ATTENTION_DECODE_MISALIGNED:
      return "q, key, value, scratch: must be aligned to 16 bytes, out to 8";
    default: return cudaGetErrorString(static_cast<cudaError_t>(status));
  }
}

int32_t stream_attention_decode_geometry(const StreamAttentionDecodeParams* params, int32_t num_sms,
                                         StreamAttentionDecodeGeometry* geometry) {
  const int status = check(*params, num_sms);
  if (status != STREAM_ATTENTION_OK) return status;
  return with_instance(*params, [&](auto chosen) {
    *geometry = geometry_of<decltype(chosen)>(*params, num_sms);
    return static_cast<int>(STREAM_ATTENTION_OK);
  });
}

int32_t stream_attention_decode_prepare(const StreamAttentionDecodeParams* params,
                                        int32_t num_sms) {
  int status = check(*params, num_sms);
  if (status == STREAM_ATTENTION_OK) status = check_pointers(*params);
  if (status != STREAM_ATTENTION_OK) return status;
  return with_instance(*params, [](auto chosen) {
    using Chosen = decltype(chosen);
    return finish_call(cudaFuncSetAttribute(kernel_of<Chosen>(),
                                            cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            Chosen::Shape::kSharedBytes));
  });
}

int32_t stream_attention_decode(const StreamAttentionDecodeParams* params, int32_t num_sms,
                                void* stream) {
  return with_instance(*params, [&](auto chosen) {
    using Chosen = decltype(chosen);
    const StreamAttentionDecodeGeometry g = geometry_of<Chosen>(*params, num_sms);
    kernel_of<Chosen>()<<<g.grid, kDecodeThreads, Chosen::Shape::kSharedBytes,
                          static_cast<cudaStream_t>(stream)>>>(*params);
    return finish_call(cudaGetLastError());
  });
}

void stream_attention_decode_tiles(int32_t kv_len, int32_t qo_len, int32_t window_left,
                                   int32_t tile_tokens, int32_t* first, int32_t* count) {
  const RequestTiles tiles = request_tiles(kv_len, qo_len, window_left, tile_tokens);
  *first = tiles.first;
  *count = tiles.count;
}

int64_t stream_attention_decode_begin(int64_t total_tiles, int32_t blocks, int32_t block) {
  return EqualCuts(total_tiles, blocks).begin(block);
}

int32_t stream_attention_decode_owner(int64_t total_tiles, int32_t blocks, int64_t tile) {
  return EqualCuts(total_tiles, blocks).owner(tile);
}

}  // extern "C"
