// The state kernels, once for all architectures. `Arch` supplies what differs between them: the
// widest load, the cache hints, and how a launch overlaps its predecessor (see arch.cuh of each
// kernels package).
//
// A block is block_vectors x state_slices threads. Thread (x, slice) owns one vector of one row
// and every state_slices-th state of it; the slices then meet in shared memory. All loads of a
// chunk of states are issued before the first is used, and the lse of the next chunk is fetched
// under them. The `out` of an empty state is not loaded at all.
#ifndef STREAM_ATTENTION_STATE_KERNELS_CUH_
#define STREAM_ATTENTION_STATE_KERNELS_CUH_

#include "stream_attention/elements.cuh"
#include "stream_attention/state_geometry.h"

namespace stream_attention {

// Memory access of the host twins, so that the bodies below serve both. The device's is Arch.
struct HostMemory {
  template <int kBytes, int kWordCount>
  __host__ __device__ static void load(const void* source, uint32_t (&words)[kWordCount]) {
    words[kWordCount - 1] = 0;
    __builtin_memcpy(words, source, kBytes);
  }
  template <int kBytes, int kWordCount>
  __host__ __device__ static void store(void* target, const uint32_t (&words)[kWordCount]) {
    __builtin_memcpy(target, words, kBytes);
  }
  __host__ __device__ static float load_lse(const float* source) { return *source; }
};

// The lse of kStatesInFlight states: first, first + slices, .. Past the end counts as empty.
template <class Memory>
__host__ __device__ __forceinline__ void load_lse_chunk(
    const float* source, int64_t step, int first, int slices, int num_states,
    float (&lse)[kStatesInFlight]) {
#pragma unroll
  for (int i = 0; i < kStatesInFlight; ++i) {
    lse[i] = first + i * slices < num_states ? Memory::load_lse(source + i * step)
                                             : kNegativeInfinity;
  }
}

// state += sum over the slice's states of exp(lse_s) * out_s, for one vector.
template <class Memory, int kPartsDtype, int kElements>
__host__ __device__ __forceinline__ void accumulate_slice(
    const StreamAttentionStateMergeParams& p, const VectorPosition& position, int slice,
    int slices, OnlineState<kElements>& state) {
  constexpr int kBytes = kElements * dtype_bytes(kPartsDtype);
  // From one state of this slice to its next; 64-bit products once, additions in the loop.
  const int64_t part_step = slices * p.parts_state_stride * dtype_bytes(kPartsDtype);
  const int64_t lse_step = slices * p.lse_state_stride;
  const char* part = static_cast<const char*>(p.out_parts) +
                     (slice * p.parts_state_stride + position.row * p.parts_row_stride +
                      position.column) *
                         dtype_bytes(kPartsDtype);
  const float* lse_source =
      p.lse_parts + slice * p.lse_state_stride + position.row * p.lse_row_stride;
  float lse[kStatesInFlight];
  load_lse_chunk<Memory>(lse_source, lse_step, slice, slices, p.num_states, lse);
  for (int first = slice; first < p.num_states; first += slices * kStatesInFlight) {
    uint32_t words[kStatesInFlight][kWords<kPartsDtype, kElements>] = {};
#pragma unroll
    for (int i = 0; i < kStatesInFlight; ++i) {
      if (!is_empty(lse[i])) Memory::template load<kBytes>(part + i * part_step, words[i]);
    }
    part += kStatesInFlight * part_step;
    lse_source += kStatesInFlight * lse_step;
    float next[kStatesInFlight];
    load_lse_chunk<Memory>(lse_source, lse_step, first + slices * kStatesInFlight, slices,
                           p.num_states, next);
    float chunk_max = kNegativeInfinity;
#pragma unroll
    for (int i = 0; i < kStatesInFlight; ++i) chunk_max = fmaxf(chunk_max, lse[i]);
    state.raise_max(chunk_max);
#pragma unroll
    for (int i = 0; i < kStatesInFlight; ++i) {
      if (!is_empty(lse[i])) {
        float value[kElements];
        decode<kPartsDtype, kElements>(words[i], value);
        state.add(lse[i], value);
      }
      lse[i] = next[i];
    }
  }
}

// The partial states of a block's slices, [slice][max, sum, acc...][vector]: lanes of a warp
// touch consecutive words, so no access has a bank conflict.
template <int kElements>
struct SliceExchange {
  float* base;
  int block_vectors;

  __host__ __device__ __forceinline__ float& at(int slice, int field, int x) const {
    return base[(slice * (kElements + 2) + field) * block_vectors + x];
  }

  __host__ __device__ __forceinline__ void put(int slice, int x,
                                               const OnlineState<kElements>& state) const {
    at(slice, 0, x) = state.max;
    at(slice, 1, x) = state.sum;
#pragma unroll
    for (int i = 0; i < kElements; ++i) at(slice, 2 + i, x) = state.acc[i];
  }

  // Adds slices 1 .. slices - 1 to slice 0's state, in that order: same bits every time.
  __host__ __device__ __forceinline__ void gather(int slices, int x,
                                                  OnlineState<kElements>& state) const {
    float highest = kNegativeInfinity;
    for (int slice = 1; slice < slices; ++slice) highest = fmaxf(highest, at(slice, 0, x));
    state.raise_max(highest);
    for (int slice = 1; slice < slices; ++slice) {
      const float factor = state.factor_for(at(slice, 0, x));
      state.sum = fmaf(factor, at(slice, 1, x), state.sum);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        state.acc[i] = fmaf(factor, at(slice, 2 + i, x), state.acc[i]);
      }
    }
  }
};

// Sink, normalisation, rounding, store: the end of both kernels.
template <class Memory, int kOutDtype, int kElements, class Params>
__host__ __device__ __forceinline__ void finish_vector(const Params& p,
                                                       const VectorPosition& position,
                                                       OnlineState<kElements>& state) {
  if (p.attn_sink != nullptr) {
    state.add_sink(Memory::load_lse(p.attn_sink + head_of_row(position.row, p.num_heads)));
  }
  float values[kElements];
  state.normalise(values);
  uint32_t words[kWords<kOutDtype, kElements>];
  encode<kOutDtype, kElements>(values, words);
  char* target = static_cast<char*>(p.out) +
                 (position.row * p.out_row_stride + position.column) * dtype_bytes(kOutDtype);
  Memory::template store<kElements * dtype_bytes(kOutDtype)>(target, words);
  if (p.lse != nullptr && position.column == 0) p.lse[position.row] = state.lse();
}

// (out_a, lse_a) + (out_b, lse_b), for one vector.
template <class Memory, int kPartsDtype, int kElements>
__host__ __device__ __forceinline__ void accumulate_pair(
    const StreamAttentionStatePairParams& p, const VectorPosition& position,
    OnlineState<kElements>& state) {
  constexpr int kBytes = kElements * dtype_bytes(kPartsDtype);
  const float lse_a = Memory::load_lse(p.lse_a + position.row * p.lse_a_row_stride);
  const float lse_b = Memory::load_lse(p.lse_b + position.row * p.lse_b_row_stride);
  uint32_t words_a[kWords<kPartsDtype, kElements>] = {};
  uint32_t words_b[kWords<kPartsDtype, kElements>] = {};
  const char* row_a = static_cast<const char*>(p.out_a) +
                      (position.row * p.out_a_row_stride + position.column) *
                          dtype_bytes(kPartsDtype);
  const char* row_b = static_cast<const char*>(p.out_b) +
                      (position.row * p.out_b_row_stride + position.column) *
                          dtype_bytes(kPartsDtype);
  if (!is_empty(lse_a)) Memory::template load<kBytes>(row_a, words_a);
  if (!is_empty(lse_b)) Memory::template load<kBytes>(row_b, words_b);
  state.raise_max(fmaxf(lse_a, lse_b));
  float value[kElements];
  if (!is_empty(lse_a)) {
    decode<kPartsDtype, kElements>(words_a, value);
    state.add(lse_a, value);
  }
  if (!is_empty(lse_b)) {
    decode<kPartsDtype, kElements>(words_b, value);
    state.add(lse_b, value);
  }
}

template <class Arch, int kPartsDtype, int kOutDtype, int kElements>
__global__ void __launch_bounds__(kMaxBlockThreads)
    state_merge_kernel(const __grid_constant__ StreamAttentionStateMergeParams p,
                       const __grid_constant__ StreamAttentionStateGeometry geometry) {
  extern __shared__ float shared[];
  const int x = threadIdx.x;
  const int slice = threadIdx.y;
  const int slices = geometry.state_slices;
  const VectorPosition position = locate_vector(geometry, blockIdx.x, x);
  OnlineState<kElements> state;
  Arch::wait_for_producer();
  if (position.valid) {
    accumulate_slice<Arch, kPartsDtype, kElements>(p, position, slice, slices, state);
  }
  Arch::release_consumer();
  if (slices > 1) {
    const SliceExchange<kElements> exchange{shared, geometry.block_vectors};
    if (slice > 0) exchange.put(slice, x, state);
    __syncthreads();
    if (slice > 0) return;
    exchange.gather(slices, x, state);
  }
  if (position.valid) finish_vector<Arch, kOutDtype, kElements>(p, position, state);
}

template <class Arch, int kPartsDtype, int kOutDtype, int kElements>
__global__ void __launch_bounds__(kMaxBlockThreads)
    state_pair_kernel(const __grid_constant__ StreamAttentionStatePairParams p,
                      const __grid_constant__ StreamAttentionStateGeometry geometry) {
  const VectorPosition position = locate_vector(geometry, blockIdx.x, threadIdx.x);
  Arch::wait_for_producer();
  if (position.valid) {
    OnlineState<kElements> state;
    accumulate_pair<Arch, kPartsDtype, kElements>(p, position, state);
    finish_vector<Arch, kOutDtype, kElements>(p, position, state);
  }
  Arch::release_consumer();
}

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_STATE_KERNELS_CUH_
