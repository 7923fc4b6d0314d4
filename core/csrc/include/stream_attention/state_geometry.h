// Launch geometry of the state kernels: checks, vector width, grid, and the map from a thread to
// its vector. Host arithmetic only needs a C++17 compiler; nothing here touches a device.
#ifndef STREAM_ATTENTION_STATE_GEOMETRY_H_
#define STREAM_ATTENTION_STATE_GEOMETRY_H_

#include <stdint.h>

#include "stream_attention/online_state.h"
#include "stream_attention/state_abi.h"

namespace stream_attention {

constexpr int kMaxHeadDim = 512;
constexpr int kWarp = 32;
// Threads of a block: enough warps to keep loads in flight, few enough that a block is one small
// unit of work for the scheduler. Only slices beyond kBlockThreads / kWarp exceed it.
constexpr int kBlockThreads = 128;
constexpr int kMaxStateSlices = 8;
constexpr int kMaxNumStates = 1 << 30;  // so that a thread's loop counter cannot overflow
constexpr int kMaxBlockThreads = kWarp * kMaxStateSlices;
// States whose loads one thread has in flight at a time.
constexpr int kStatesInFlight = 4;
constexpr int64_t kMaxGrid = 2147483647;  // CUDA's limit of gridDim.x

STREAM_ATTENTION_HOST_DEVICE constexpr int dtype_bytes(int dtype) {
  return dtype == STREAM_ATTENTION_FLOAT32 ? 4 : 2;
}

inline bool is_dtype(int dtype) {
  return dtype >= STREAM_ATTENTION_FLOAT32 && dtype <= STREAM_ATTENTION_BFLOAT16;
}

// One tensor of rows as the geometry sees it: where vectors of it may start.
struct RowTensor {
  const void* base;
  int64_t strides[2];  // elements
  int dtype;
};

// Whether every vector of `elements` of the tensor is aligned to its own size, at most 32 bytes.
inline bool vector_aligned(const RowTensor& tensor, int elements, int access_bytes) {
  const int64_t bytes = static_cast<int64_t>(elements) * dtype_bytes(tensor.dtype);
  const int64_t need = bytes < access_bytes ? bytes : access_bytes;
  if (reinterpret_cast<uintptr_t>(tensor.base) % need != 0) return false;
  for (const int64_t stride : tensor.strides) {
    if (stride * dtype_bytes(tensor.dtype) % need != 0) return false;
  }
  return true;
}

// Widest legal vector: max_bytes of the parts, then 16 bytes, else one element. `tensors` are
// the parts followed by the output, whose stores are 16 bytes wide at most.
template <int kCount>
int vector_elements(const RowTensor (&tensors)[kCount], int head_dim, int max_bytes) {
  for (int bytes = max_bytes; bytes >= 16; bytes /= 2) {
    const int elements = bytes / dtype_bytes(tensors[0].dtype);
    bool legal = head_dim % elements == 0;
    for (int i = 0; i < kCount && legal; ++i) {
      legal = vector_aligned(tensors[i], elements, i + 1 == kCount ? 16 : bytes);
    }
    if (legal) return elements;
  }
  return 1;
}

// A power of two, from num_states alone: one slice for every kStatesInFlight states.
inline int state_slices(int num_states) {
  int slices = 1;
  while (slices < kMaxStateSlices && slices * kStatesInFlight < num_states) slices *= 2;
  return slices;
}

inline int shared_bytes(int slices, int block_vectors, int elements) {
  if (slices == 1) return 0;
  return slices * block_vectors * (elements + 2) * static_cast<int>(sizeof(float));
}

// Fills the launch shape for rows of vectors; false where the grid exceeds CUDA's limit.
inline bool shape_launch(int64_t rows, int head_dim, int elements, int slices, int num_sms,
                         StreamAttentionStateGeometry* geometry) {
  const int vectors_per_row = head_dim / elements;
  if (rows > INT64_MAX / vectors_per_row - kBlockThreads) return false;
  const int64_t vectors = rows * vectors_per_row;
  int block_vectors = kBlockThreads / slices < kWarp ? kWarp : kBlockThreads / slices;
  // Few rows: one warp of vectors a block spreads them over the most multiprocessors.
  if ((vectors + block_vectors - 1) / block_vectors < 2 * static_cast<int64_t>(num_sms)) {
    block_vectors = kWarp;
  }
  const int64_t grid = (vectors + block_vectors - 1) / block_vectors;
  if (grid > kMaxGrid) return false;
  geometry->num_vectors = vectors;
  geometry->grid = static_cast<int32_t>(grid);
  geometry->block_vectors = block_vectors;
  geometry->state_slices = slices;
  geometry->vector_elements = elements;
  geometry->vectors_per_row = vectors_per_row;
  geometry->shared_bytes = shared_bytes(slices, block_vectors, elements);
  return true;
}

// Where a thread works: a row and the first element of its vector there.
struct VectorPosition {
  int64_t row;
  int32_t column;
  bool valid;
};

STREAM_ATTENTION_HOST_DEVICE VectorPosition locate_vector(
    const StreamAttentionStateGeometry& geometry, int64_t block, int thread) {
  const int64_t vector = block * geometry.block_vectors + thread;
  VectorPosition position;
  position.valid = vector < geometry.num_vectors;
  // 32-bit division is several times cheaper, and nearly every launch fits.
  if (geometry.num_vectors <= INT32_MAX) {
    const uint32_t narrow = static_cast<uint32_t>(vector);
    const uint32_t row = narrow / static_cast<uint32_t>(geometry.vectors_per_row);
    position.row = row;
    position.column = static_cast<int32_t>(
        (narrow - row * static_cast<uint32_t>(geometry.vectors_per_row)) *
        static_cast<uint32_t>(geometry.vector_elements));
  } else {
    position.row = vector / geometry.vectors_per_row;
    position.column =
        static_cast<int32_t>(vector - position.row * geometry.vectors_per_row) *
        geometry.vector_elements;
  }
  return position;
}

STREAM_ATTENTION_HOST_DEVICE int head_of_row(int64_t row, int num_heads) {
  if (row <= INT32_MAX) return static_cast<int>(static_cast<uint32_t>(row) % num_heads);
  return static_cast<int>(row % num_heads);
}

// Element alignment of a tensor's address: a float at an odd address traps on the device.
inline bool element_aligned(const void* pointer, int dtype) {
  return reinterpret_cast<uintptr_t>(pointer) % dtype_bytes(dtype) == 0;
}

// The checks that both merges share. Null pointers come first: the rest would read through them.
template <class Params>
int check_common(const Params& p, int num_sms) {
  if (!is_dtype(p.parts_dtype) || !is_dtype(p.out_dtype)) return STREAM_ATTENTION_BAD_DTYPE;
  if (p.head_dim < 1 || p.head_dim > kMaxHeadDim) return STREAM_ATTENTION_BAD_HEAD_DIM;
  if (p.rows < 0) return STREAM_ATTENTION_BAD_ROWS;
  if (num_sms < 1) return STREAM_ATTENTION_BAD_NUM_SMS;
  if (p.attn_sink != nullptr && p.num_heads < 1) return STREAM_ATTENTION_BAD_NUM_HEADS;
  if ((p.flags & ~STREAM_ATTENTION_DEPENDENT_LAUNCH) != 0) return STREAM_ATTENTION_BAD_FLAGS;
  if (p.rows > 0 && p.out == nullptr) return STREAM_ATTENTION_NULL_POINTER;
  if (p.out_row_stride < 0 || (p.rows > 1 && p.out_row_stride < p.head_dim)) {
    return STREAM_ATTENTION_BAD_STRIDE;
  }
  if (!element_aligned(p.out, p.out_dtype) ||
      !element_aligned(p.lse, STREAM_ATTENTION_FLOAT32) ||
      !element_aligned(p.attn_sink, STREAM_ATTENTION_FLOAT32)) {
    return STREAM_ATTENTION_MISALIGNED;
  }
  return STREAM_ATTENTION_OK;
}

inline int state_merge_geometry(const StreamAttentionStateMergeParams& p, int num_sms,
                                int max_vector_bytes, StreamAttentionStateGeometry* geometry) {
  *geometry = {};
  const int status = check_common(p, num_sms);
  if (status != STREAM_ATTENTION_OK) return status;
  if (p.num_states < 0 || p.num_states > kMaxNumStates) return STREAM_ATTENTION_BAD_NUM_STATES;
  if (p.parts_state_stride < 0 || p.parts_row_stride < 0 || p.lse_state_stride < 0 ||
      p.lse_row_stride < 0) {
    return STREAM_ATTENTION_BAD_STRIDE;
  }
  if (p.rows == 0) return STREAM_ATTENTION_OK;
  if (p.num_states > 0) {
    if (p.out_parts == nullptr || p.lse_parts == nullptr) return STREAM_ATTENTION_NULL_POINTER;
    if (p.out == p.out_parts || (p.lse != nullptr && p.lse == p.lse_parts)) {
      return STREAM_ATTENTION_ALIASED_OUTPUT;
    }
  }
  if (!element_aligned(p.out_parts, p.parts_dtype) ||
      !element_aligned(p.lse_parts, STREAM_ATTENTION_FLOAT32)) {
    return STREAM_ATTENTION_MISALIGNED;
  }
  const RowTensor tensors[2] = {
      {p.out_parts, {p.parts_state_stride, p.parts_row_stride}, p.parts_dtype},
      {p.out, {p.out_row_stride, 0}, p.out_dtype},
  };
  const int elements = vector_elements(tensors, p.head_dim, max_vector_bytes);
  if (!shape_launch(p.rows, p.head_dim, elements, state_slices(p.num_states), num_sms, geometry)) {
    return STREAM_ATTENTION_BAD_ROWS;
  }
  return STREAM_ATTENTION_OK;
}

inline int state_pair_geometry(const StreamAttentionStatePairParams& p, int num_sms,
                               int max_vector_bytes, StreamAttentionStateGeometry* geometry) {
  *geometry = {};
  const int status = check_common(p, num_sms);
  if (status != STREAM_ATTENTION_OK) return status;
  if (p.out_a_row_stride < 0 || p.out_b_row_stride < 0 || p.lse_a_row_stride < 0 ||
      p.lse_b_row_stride < 0) {
    return STREAM_ATTENTION_BAD_STRIDE;
  }
  if (p.rows == 0) return STREAM_ATTENTION_OK;
  if (p.out_a == nullptr || p.out_b == nullptr || p.lse_a == nullptr || p.lse_b == nullptr) {
    return STREAM_ATTENTION_NULL_POINTER;
  }
  if (p.out == p.out_a || p.out == p.out_b ||
      (p.lse != nullptr && (p.lse == p.lse_a || p.lse == p.lse_b))) {
    return STREAM_ATTENTION_ALIASED_OUTPUT;
  }
  if (!element_aligned(p.out_a, p.parts_dtype) || !element_aligned(p.out_b, p.parts_dtype) ||
      !element_aligned(p.lse_a, STREAM_ATTENTION_FLOAT32) ||
      !element_aligned(p.lse_b, STREAM_ATTENTION_FLOAT32)) {
    return STREAM_ATTENTION_MISALIGNED;
  }
  const RowTensor tensors[3] = {
      {p.out_a, {p.out_a_row_stride, 0}, p.parts_dtype},
      {p.out_b, {p.out_b_row_stride, 0}, p.parts_dtype},
      {p.out, {p.out_row_stride, 0}, p.out_dtype},
  };
  const int elements = vector_elements(tensors, p.head_dim, max_vector_bytes);
  if (!shape_launch(p.rows, p.head_dim, elements, 1, num_sms, geometry)) {
    return STREAM_ATTENTION_BAD_ROWS;
  }
  return STREAM_ATTENTION_OK;
}

inline const char* status_string(int status) {
  switch (status) {
    case STREAM_ATTENTION_OK: return "success";
    case STREAM_ATTENTION_NULL_POINTER: return "a required pointer is null";
    case STREAM_ATTENTION_BAD_DTYPE:
      return "dtype: must be 0 (float32), 1 (float16) or 2 (bfloat16)";
    case STREAM_ATTENTION_BAD_NUM_STATES: return "num_states: must be 0 .. 2^30";
    case STREAM_ATTENTION_BAD_HEAD_DIM: return "head_dim: must be 1 .. 512";
    case STREAM_ATTENTION_BAD_NUM_HEADS: return "num_heads: must be >= 1 with attn_sink";
    case STREAM_ATTENTION_BAD_ROWS:
      return "rows: must be >= 0 and fill at most 2147483647 blocks; merge in several calls";
    case STREAM_ATTENTION_BAD_STRIDE:
      return "stride: must be >= 0, and out_row_stride >= head_dim where rows > 1";
    case STREAM_ATTENTION_BAD_NUM_SMS: return "num_sms: must be >= 1";
    case STREAM_ATTENTION_ALIASED_OUTPUT: return "an output is the same tensor as an input";
    case STREAM_ATTENTION_MISALIGNED: return "a pointer is not aligned to its element size";
    case STREAM_ATTENTION_BAD_FLAGS: return "flags: unknown bit";
    default: return nullptr;
  }
}

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_STATE_GEOMETRY_H_
