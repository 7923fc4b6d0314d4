// Every instance of the decode kernel for one dtype of q, batch-invariant or not: the choice among
// them, their geometry and launch. Each set is a translation unit of its own (decode_bfloat16.cu,
// decode_bfloat16_invariant.cu, ...).
#ifndef STREAM_ATTENTION_DECODE_INSTANCES_CUH_
#define STREAM_ATTENTION_DECODE_INSTANCES_CUH_

#include "decode_dispatch.h"
#include "decode_kernel.cuh"
#include "decode_prepared.cuh"

namespace stream_attention {
namespace {

// A grid that is a multiple of 16 fills every GPC evenly: on an H200 128 blocks beat 132 by 1-3 %.
constexpr int kMostBlocks = 128;

template <class T, class E, class OfShape, bool kWholePages>
struct Instance {
  using Shape = OfShape;
  static constexpr int kElementBytes = sizeof(E);
  static constexpr auto kKernel = decode_kernel<T, E, Shape, kWholePages>;
};

int rows_of(const StreamAttentionDecodeParams& p) { return p.qo_len * p.group; }

// Pages of whole sixteens of tokens need one page id for sixteen rows. Contiguous caches are pages
// that no request leaves.
template <class T, class E, class Shape, class Use>
int with_pages(const StreamAttentionDecodeParams& p, Use&& use) {
  return p.page_table == nullptr || p.page_size % 16 == 0
             ? use(Instance<T, E, Shape, true>{})
             : use(Instance<T, E, Shape, false>{});
}

// Whether more than eight rows are multiplied by warpgroups.
template <class E, int kHeadDim, bool kInvariant>
constexpr bool kIsWide = kHeadDim == 128 && sizeof(E) > 1 && !kInvariant;

// The rows of a problem's instance. More than an instance takes are served by neighbouring blocks,
// which share L2. Batch-invariant and wide instances take 17 to 24 rows as 32.
template <class E, int kHeadDim, bool kInvariant>
int rows_together(int rows) {
  if (rows <= 8 || kHeadDim > 192) return 8;  // registers for sixteen rows of 256 are too few
  if (rows <= 16 || kHeadDim > 128 || sizeof(E) == 1) return 16;
  return rows <= 24 && !kInvariant && !kIsWide<E, kHeadDim, kInvariant> ? 24 : 32;
}

template <class T, class E, int kHeadDim, bool kInvariant, class Use>
int with_rows(const StreamAttentionDecodeParams& p, Use&& use) {
  const int rows = rows_together<E, kHeadDim, kInvariant>(rows_of(p));
  const auto with = [&](auto number) {
    constexpr bool kWide = kIsWide<E, kHeadDim, kInvariant> && number > 8;
    return with_pages<T, E,
                      std::conditional_t<kWide, WideShape<kHeadDim, number>,
                                         DecodeShape<kHeadDim, number, sizeof(E), kInvariant>>>(
        p, use);
  };
  if constexpr (kHeadDim <= 192) {
    if (rows == 16) return with(std::integral_constant<int, 16>{});
  }
  if constexpr (kHeadDim <= 128 && sizeof(E) > 1) {
    if constexpr (!kInvariant && !kIsWide<E, kHeadDim, kInvariant>) {
      if (rows == 24) return with(std::integral_constant<int, 24>{});
    }
    if (rows == 32) return with(std::integral_constant<int, 32>{});
  }
  return with(std::integral_constant<int, 8>{});
}

template <class T, int kHeadDim, bool kInvariant, class Use>
int with_kv_dtype(const StreamAttentionDecodeParams& p, Use&& use) {
  switch (p.kv_dtype) {
    case STREAM_ATTENTION_KV_LIKE_Q: return with_rows<T, T, kHeadDim, kInvariant>(p, use);
    case STREAM_ATTENTION_KV_FLOAT8_E4M3:
      return with_rows<T, uint8_t, kHeadDim, kInvariant>(p, use);
    default: return STREAM_ATTENTION_DECODE_BAD_DTYPE;
  }
}

template <class T, bool kInvariant, class Use>
int with_head_dim(const StreamAttentionDecodeParams& p, Use&& use) {
  switch (p.head_dim) {
    case 64: return with_kv_dtype<T, 64, kInvariant>(p, use);
    case 80: return with_kv_dtype<T, 80, kInvariant>(p, use);
    case 96: return with_kv_dtype<T, 96, kInvariant>(p, use);
    case 128: return with_kv_dtype<T, 128, kInvariant>(p, use);
    case 192: return with_kv_dtype<T, 192, kInvariant>(p, use);
    case 256: return with_kv_dtype<T, 256, kInvariant>(p, use);
    default: return STREAM_ATTENTION_DECODE_BAD_HEAD_DIM;
  }
}

// The tiles of one KV head must number less than 2^31.
template <class Chosen>
bool countable(const StreamAttentionDecodeParams& p) {
  const int64_t tiles = (int64_t{p.capacity} + Chosen::Shape::kTile - 1) / Chosen::Shape::kTile;
  return p.batch * (tiles > 1 ? tiles : 1) <= INT32_MAX;
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
  g.threads = Shape::kThreads;
  g.shared_bytes = Shape::kSharedBytes;
  g.slots = Shape::kSlots;
  constexpr int kVectors = Shape::N * Shape::D / 4;
  if constexpr (Shape::kInvariant) {
    const int most = (p.capacity - 1) / Shape::kTile + 1;  // tiles of a request, one at least
    g.scratch_floats = node_floats(g.grid, g.blocks_per_head, kVectors) +
                       fold_floats(g.grid, kVectors, levels_of(most));
  } else if (g.blocks_per_head > 1) {
    g.scratch_floats =
        int64_t{2} * kItemFloats * g.grid * region_items(kVectors, g.blocks_per_head);
  }
  return g;
}

template <class Chosen>
DecodeLaunch launch_of(const StreamAttentionDecodeParams& p,
                       const StreamAttentionDecodeGeometry& g) {
  DecodeLaunch launch;
  launch.p = p;
  launch.page = Divider::of(p.page_size);
  launch.group = Divider::of(p.group);
  launch.blocks = Divider::of(g.blocks_per_head);
  launch.heads = p.num_kv_heads * g.row_groups;
  launch.row_groups = g.row_groups;
  launch.rows_total = rows_of(p);
  const bool capped = p.soft_cap > 0.f;
  launch.scale = capped ? p.sm_scale / p.soft_cap : p.sm_scale * kLog2E;
  launch.cap = capped ? p.soft_cap * kLog2E : 0.f;
  launch.region_items =
      region_items(Chosen::Shape::N * Chosen::Shape::D / 4, g.blocks_per_head);
  constexpr int64_t kPiece = 16 / Chosen::kElementBytes;
  launch.k_page_pieces = static_cast<uint32_t>(p.k_page_stride / kPiece);
  launch.k_token_pieces = static_cast<uint32_t>(p.k_token_stride / kPiece);
  launch.v_page_pieces = static_cast<uint32_t>(p.v_page_stride / kPiece);
  launch.v_token_pieces = static_cast<uint32_t>(p.v_token_stride / kPiece);
  return launch;
}

bool aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Strides of whole pieces of 16 bytes, whose number fits 32 bits (64 GiB).
template <class Chosen>
bool addressable(const StreamAttentionDecodeParams& p) {
  constexpr int64_t kPiece = 16 / Chosen::kElementBytes;
  for (const int64_t stride :
       {p.k_page_stride, p.k_token_stride, p.v_page_stride, p.v_token_stride}) {
    if (stride < 0 || stride % kPiece != 0 || stride / kPiece > UINT32_MAX) return false;
  }
  return p.table_batch_stride >= 0 && p.table_batch_stride <= UINT32_MAX;
}

int check_pointers(const StreamAttentionDecodeParams& p,
                   const StreamAttentionDecodeGeometry& g) {
  if (!p.q || !p.key || !p.value || !p.out || (g.scratch_floats > 0 && !p.scratch)) {
    return STREAM_ATTENTION_DECODE_NULL_POINTER;
  }
  if (p.num_pages < (p.page_table == nullptr ? p.batch : 1)) {
    return STREAM_ATTENTION_DECODE_BAD_PAGES;
  }
  const bool fits = aligned(p.q, 16) && aligned(p.key, 16) && aligned(p.value, 16) &&
                    aligned(p.out, 8) && aligned(p.scratch, 32);
  if (!fits) return STREAM_ATTENTION_DECODE_MISALIGNED;
  return STREAM_ATTENTION_OK;
}

void configure(PreparedDecode& call, const StreamAttentionDecodeGeometry& g) {
  CUlaunchConfig& config = call.config;
  config = {};
  config.gridDimX = g.grid;
  config.blockDimX = g.threads;
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = g.shared_bytes;
  CUlaunchAttribute* attributes = call.attributes;
  attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attributes[config.numAttrs++].value.programmaticStreamSerializationAllowed = 1;
  if (g.blocks_per_head > 1) {  // blocks wait for one another
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[config.numAttrs++].value.cooperative = 1;
  }
}

template <class Chosen>
cudaError_t load(PreparedDecode& call) {
  cudaError_t error =
      cudaFuncSetAttribute(Chosen::kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           Chosen::Shape::kSharedBytes);
  if (error == cudaSuccess) {  // room for the next launch's block beside this one's
    error = cudaFuncSetAttribute(Chosen::kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  const void* kernel = reinterpret_cast<const void*>(Chosen::kKernel);
  if (error == cudaSuccess) error = cudaGetFuncBySymbol(&call.function, kernel);
  if (error == cudaSuccess) error = find_enqueue(call);
  return error;
}

template <class Chosen>
int prepare(const DecodeCall& asked) {
  const StreamAttentionDecodeParams& p = *asked.params;
  if (!countable<Chosen>(p)) return STREAM_ATTENTION_DECODE_BAD_SHAPE;
  const StreamAttentionDecodeGeometry g = geometry_of<Chosen>(p, asked.num_sms);
  const int fault = check_pointers(p, g);
  if (fault != STREAM_ATTENTION_OK) return fault;
  if (!addressable<Chosen>(p)) return STREAM_ATTENTION_DECODE_BAD_STRIDE;
  PreparedDecode& call = *asked.prepared;
  const cudaError_t error = load<Chosen>(call);
  if (error != cudaSuccess) return finish_call(error);
  configure(call, g);
  call.launch = launch_of<Chosen>(p, g);
  call.prepared = PreparedDecode::kPrepared;
  return STREAM_ATTENTION_OK;
}

template <class T, bool kInvariant>
int decode_call(const DecodeCall& call) {
  return with_head_dim<T, kInvariant>(*call.params, [&](auto chosen) {
    using Chosen = decltype(chosen);
    switch (call.action) {
      case DecodeAction::kGeometry:
        if (!countable<Chosen>(*call.params)) {
          return static_cast<int>(STREAM_ATTENTION_DECODE_BAD_SHAPE);
        }
        *call.geometry = geometry_of<Chosen>(*call.params, call.num_sms);
        return static_cast<int>(STREAM_ATTENTION_OK);
      default: return prepare<Chosen>(call);
    }
  });
}

}  // namespace
}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_INSTANCES_CUH_
