// The C ABI of the state kernels: plain structs and functions, no CUDA or torch type.
//
// One attention state is a pair (out, lse): `out` the normalised output of one part of the keys,
// `lse` the natural log of the sum of exp(logit) over that part. Merging states is exact:
//   lse = log(sum_i exp(lse_i) [+ exp(sink)]),   out = sum_i exp(lse_i - lse) * out_i.
// A state with lse == -inf is empty: its `out` is never read into the result.
//
// Every library `libstream_attention_sm*.so` exports these same names. The libraries are opened
// with local symbol scope, so equal names do not collide and a caller is written once.
#ifndef STREAM_ATTENTION_STATE_ABI_H_
#define STREAM_ATTENTION_STATE_ABI_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raised by one whenever a struct below, a code or the meaning of a function changes.
#define STREAM_ATTENTION_ABI_VERSION 1

#define STREAM_ATTENTION_EXPORT __attribute__((visibility("default")))

enum StreamAttentionDtype {
  STREAM_ATTENTION_FLOAT32 = 0,
  STREAM_ATTENTION_FLOAT16 = 1,
  STREAM_ATTENTION_BFLOAT16 = 2,
};

// Results: 0 is success, positive values are cudaError_t, negative values are refusals.
enum StreamAttentionStatus {
  STREAM_ATTENTION_OK = 0,
  STREAM_ATTENTION_NULL_POINTER = -1,
  STREAM_ATTENTION_BAD_DTYPE = -2,
  STREAM_ATTENTION_BAD_NUM_STATES = -3,
  STREAM_ATTENTION_BAD_HEAD_DIM = -4,
  STREAM_ATTENTION_BAD_NUM_HEADS = -5,
  STREAM_ATTENTION_BAD_ROWS = -6,
  STREAM_ATTENTION_BAD_STRIDE = -7,
  STREAM_ATTENTION_BAD_NUM_SMS = -8,
  STREAM_ATTENTION_ALIASED_OUTPUT = -9,
  STREAM_ATTENTION_MISALIGNED = -10,
  STREAM_ATTENTION_BAD_FLAGS = -11,
};

enum StreamAttentionFlags {
  // The launch may begin while its predecessor in the stream drains (programmatic dependent
  // launch); the kernel waits for it before the first access. Ignored by sm_80 code.
  STREAM_ATTENTION_DEPENDENT_LAUNCH = 1,
};

// Which struct `stream_attention_params_bytes` should measure.
enum StreamAttentionStruct {
  STREAM_ATTENTION_STATE_MERGE_PARAMS = 0,
  STREAM_ATTENTION_STATE_PAIR_PARAMS = 1,
  STREAM_ATTENTION_STATE_GEOMETRY = 2,
};

// Merge of num_states states of every row. Strides count elements and are >= 0; the head_dim axis
// is dense. Outputs must not overlap inputs.
struct StreamAttentionStateMergeParams {
  const void* out_parts;       // [num_states, rows, head_dim] parts_dtype
  const float* lse_parts;      // [num_states, rows] natural log, -inf = empty
  const float* attn_sink;      // [num_heads] logit of row % num_heads, or null
  void* out;                   // [rows, head_dim] out_dtype
  float* lse;                  // [rows] stride 1, or null
  int64_t parts_state_stride;
  int64_t parts_row_stride;
  int64_t lse_state_stride;
  int64_t lse_row_stride;
  int64_t out_row_stride;      // >= head_dim where rows > 1
  int64_t rows;                // >= 0; 0 is a no-op
  int32_t num_states;          // 0 .. 2^30; 0 gives empty rows
  int32_t head_dim;            // 1 .. 512
  int32_t num_heads;           // >= 1 where attn_sink is given, otherwise unused
  int32_t parts_dtype;         // enum StreamAttentionDtype
  int32_t out_dtype;           // enum StreamAttentionDtype
  int32_t flags;               // enum StreamAttentionFlags
};

// Merge of two states that live at separate addresses.
struct StreamAttentionStatePairParams {
  const void* out_a;           // [rows, head_dim] parts_dtype
  const void* out_b;           // [rows, head_dim] parts_dtype
  const float* lse_a;          // [rows] natural log, -inf = empty
  const float* lse_b;          // [rows]
  const float* attn_sink;      // as above
  void* out;                   // [rows, head_dim] out_dtype
  float* lse;                  // [rows] stride 1, or null
  int64_t out_a_row_stride;
  int64_t out_b_row_stride;
  int64_t lse_a_row_stride;
  int64_t lse_b_row_stride;
  int64_t out_row_stride;
  int64_t rows;
  int32_t head_dim;
  int32_t num_heads;
  int32_t parts_dtype;
  int32_t out_dtype;
  int32_t flags;
  int32_t reserved;            // 0
};

// How a merge is launched: a pure function of the parameters and the number of multiprocessors.
// One thread owns one vector of one row; block.y threads share that vector's states.
struct StreamAttentionStateGeometry {
  int64_t num_vectors;         // rows * vectors_per_row
  int32_t grid;                // blocks, 1-D; 0 = nothing to launch
  int32_t block_vectors;       // blockDim.x: vectors a block covers
  int32_t state_slices;        // blockDim.y: depends on num_states alone, so that the bits of a
                               // row do not depend on how many other rows there are
  int32_t vector_elements;     // elements a thread loads at once
  int32_t vectors_per_row;     // head_dim / vector_elements
  int32_t shared_bytes;        // dynamic shared memory a block
};

STREAM_ATTENTION_EXPORT int32_t stream_attention_abi_version(void);

// sizeof of one of the structs above as this library was compiled, -1 for an unknown one.
STREAM_ATTENTION_EXPORT int64_t stream_attention_params_bytes(int32_t which);

// The compute capability the library is built for: 80, 90 or 100.
STREAM_ATTENTION_EXPORT int32_t stream_attention_arch(void);

// Text of a result of any function here; static storage.
STREAM_ATTENTION_EXPORT const char* stream_attention_error_string(int32_t status);

// Needs no GPU. num_sms >= 1.
STREAM_ATTENTION_EXPORT int32_t stream_attention_state_merge_geometry(
    const struct StreamAttentionStateMergeParams* params, int32_t num_sms,
    struct StreamAttentionStateGeometry* geometry);
STREAM_ATTENTION_EXPORT int32_t stream_attention_state_pair_geometry(
    const struct StreamAttentionStatePairParams* params, int32_t num_sms,
    struct StreamAttentionStateGeometry* geometry);

// Loads the kernel that these parameters take onto the current device. CUDA loads code on first
// use, which is not legal while a stream is captured: call this once before the first launch. It
// also reports that the library has no code for the device.
STREAM_ATTENTION_EXPORT int32_t stream_attention_state_merge_prepare(
    const struct StreamAttentionStateMergeParams* params, int32_t num_sms);
STREAM_ATTENTION_EXPORT int32_t stream_attention_state_pair_prepare(
    const struct StreamAttentionStatePairParams* params, int32_t num_sms);

// Enqueues the merge on `stream` (a cudaStream_t of the current device) and returns at once. No
// allocation, no synchronisation, legal under stream capture.
STREAM_ATTENTION_EXPORT int32_t stream_attention_state_merge(
    const struct StreamAttentionStateMergeParams* params, int32_t num_sms, void* stream);
STREAM_ATTENTION_EXPORT int32_t stream_attention_state_pair(
    const struct StreamAttentionStatePairParams* params, int32_t num_sms, void* stream);

// The same merge on host pointers: every block and thread of the geometry in turn, with the same
// index arithmetic and algebra as the kernel. For tests on machines without a GPU.
STREAM_ATTENTION_EXPORT int32_t stream_attention_state_merge_host(
    const struct StreamAttentionStateMergeParams* params, int32_t num_sms);
STREAM_ATTENTION_EXPORT int32_t stream_attention_state_pair_host(
    const struct StreamAttentionStatePairParams* params, int32_t num_sms);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // STREAM_ATTENTION_STATE_ABI_H_
