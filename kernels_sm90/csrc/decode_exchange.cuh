// How blocks that share a request hand their partial states to each other inside the launch.
//
// Every block of the request merges one slice of the answer. A writer stores each vector of its
// state straight into the region of the block that merges it; the reader polls. There is no flag,
// counter or fence: memory that holds nothing is filled with a word that no published value has,
// every word is polled for itself, and the reader puts the filling back. So what a block may wait
// for is exactly what it reads, and a launch leaves the memory as it found it. Blocks wait for one
// another, hence all of a launch must be resident together: it is launched as cooperative.
#ifndef STREAM_ATTENTION_DECODE_EXCHANGE_CUH_
#define STREAM_ATTENTION_DECODE_EXCHANGE_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include "decode_ops.cuh"

namespace stream_attention {

constexpr uint32_t kAbsent = 0xffffffffu;  // a NaN that no instruction makes

// Four columns of one row's state: out is not divided by sum; all relative to 2^top.
struct State {
  float4 out;
  float top;
  float sum;
};

__device__ __forceinline__ State empty_state() {
  return State{make_float4(0.f, 0.f, 0.f, 0.f), -INFINITY, 0.f};
}

// The weight of a state whose maximum is `top` in one whose maximum is `of`.
__device__ __forceinline__ float weight_in(float top, float of) {
  return exp2_fast(top - (of == -INFINITY ? 0.f : of));
}

__device__ __forceinline__ void scale(State& state, float weight) {
  state.out.x *= weight;
  state.out.y *= weight;
  state.out.z *= weight;
  state.out.w *= weight;
  state.sum *= weight;
}

// Adds a state with the given weight, both relative to the same power of two.
__device__ __forceinline__ void add_weighted(State& state, const State& other, float weight) {
  state.out.x += other.out.x * weight;
  state.out.y += other.out.y * weight;
  state.out.z += other.out.z * weight;
  state.out.w += other.out.w * weight;
  state.sum += other.sum * weight;
}

__device__ __forceinline__ void add(State& state, const State& other) {
  const float top = fmaxf(state.top, other.top);
  const float mine = weight_in(state.top, top), theirs = weight_in(other.top, top);
  state.out.x = state.out.x * mine + other.out.x * theirs;
  state.out.y = state.out.y * mine + other.out.y * theirs;
  state.out.z = state.out.z * mine + other.out.z * theirs;
  state.out.w = state.out.w * mine + other.out.w * theirs;
  state.sum = state.sum * mine + other.sum * theirs;
  state.top = top;
}

// The same, in operations that the compiler may not join with one another or with others: of equal
// bits wherever it is used, and whichever of the two comes first.
__device__ __forceinline__ State add_rounded(const State& left, const State& right) {
  const float top = fmaxf(left.top, right.top);
  const float base = top == -INFINITY ? 0.f : top;
  const float mine = exp2_fast(__fsub_rn(left.top, base));
  const float theirs = exp2_fast(__fsub_rn(right.top, base));
  const auto both = [&](float x, float y) {
    return __fadd_rn(__fmul_rn(x, mine), __fmul_rn(y, theirs));
  };
  return State{make_float4(both(left.out.x, right.out.x), both(left.out.y, right.out.y),
                           both(left.out.z, right.out.z), both(left.out.w, right.out.w)),
               top, both(left.sum, right.sum)};
}

// The largest value, and the sum, of the lanes whose numbers are equal modulo `apart` (a power of
// two).
__device__ __forceinline__ float max_across_lanes(float x, int apart) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    if (step >= apart) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  }
  return x;
}

__device__ __forceinline__ void sum_across_lanes(State& state, int apart) {
  const auto from = [&](float x, int step) { return __shfl_xor_sync(0xffffffffu, x, step); };
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    if (step >= apart) {
      const float x = from(state.out.x, step), y = from(state.out.y, step);
      const float z = from(state.out.z, step), w = from(state.out.w, step);
      const float sum = from(state.sum, step);
      state.out.x += x;
      state.out.y += y;
      state.out.z += z;
      state.out.w += w;
      state.sum += sum;
    }
  }
}

__device__ __forceinline__ uint32_t published(float x) {
  return __float_as_uint(x) == kAbsent ? 0x7fffffffu : __float_as_uint(x);
}

// What is exchanged stays in L2 from launch to launch while K and V stream through it: a miss would
// queue behind them. Stores say so, of which the reader's is the last, and prefetches.
__device__ __forceinline__ uint64_t keep_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

constexpr int kItemFloats = 6;  // four outputs, a maximum and a sum

// What one block merges of one request: four outputs of each item, and behind them, of each item,
// its maximum and sum. Neighbouring items are neighbours, so that a warp writes whole sectors.
struct Region {
  float4* outs;
  float2* sums;

  __device__ __forceinline__ Region(float* memory, int64_t items)
      : outs(reinterpret_cast<float4*>(memory)), sums(reinterpret_cast<float2*>(outs + items)) {}

  __device__ __forceinline__ void store(int item, const uint32_t (&w)[6]) const {
    asm volatile("st.relaxed.gpu.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
                 :
                 : "l"(outs + item), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(keep_policy())
                 : "memory");
    asm volatile("st.relaxed.gpu.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;"
                 :
                 : "l"(sums + item), "r"(w[4]), "r"(w[5]), "l"(keep_policy())
                 : "memory");
  }

  __device__ __forceinline__ void load(int item, uint32_t (&w)[6]) const {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "l"(outs + item)
                 : "memory");
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(w[4]), "=r"(w[5])
                 : "l"(sums + item)
                 : "memory");
  }

  // From one item on.
  __device__ __forceinline__ Region from(int item) const {
    Region rest = *this;
    rest.outs += item;
    rest.sums += item;
    return rest;
  }

  __device__ __forceinline__ void publish(int item, const State& state) const {
    store(item, {published(state.out.x), published(state.out.y), published(state.out.z),
                 published(state.out.w), published(state.top), published(state.sum)});
  }

  // Waits for the first `count` of a lane's items, empties their places, and gives their states;
  // the others are empty. All lanes wait together: lanes that leave the loop one by one would take
  // the code that follows, which is full of shuffles, through its slow form for warps that have
  // come apart (1.2 us, far away in the kernel and thus not in a cache).
  template <int kMost>
  __device__ __forceinline__ void take(int count, const int (&items)[kMost],
                                       State (&states)[kMost]) const {
    uint32_t words[kMost][6];
    bool ready;
    do {
      ready = true;
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (i < count) load(items[i], words[i]);
      }
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (i < count) ready = ready && is_present(words[i]);
      }
    } while (!__all_sync(0xffffffffu, ready));
    const uint32_t absent[6] = {kAbsent, kAbsent, kAbsent, kAbsent, kAbsent, kAbsent};
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      states[i] = empty_state();
      if (i < count) {
        store(items[i], absent);
        states[i] = state_of(words[i]);
      }
    }
  }

  static __device__ __forceinline__ bool is_present(const uint32_t (&w)[6]) {
    return w[0] != kAbsent && w[1] != kAbsent && w[2] != kAbsent && w[3] != kAbsent &&
           w[4] != kAbsent && w[5] != kAbsent;
  }

  static __device__ __forceinline__ State state_of(const uint32_t (&w)[6]) {
    return State{make_float4(__uint_as_float(w[0]), __uint_as_float(w[1]), __uint_as_float(w[2]),
                             __uint_as_float(w[3])),
                 __uint_as_float(w[4]), __uint_as_float(w[5])};
  }
};

// Items that a block's region must hold for `vectors` vectors and at most `blocks` parts: a slice
// is less than twice its fair share. A multiple of four, so that regions begin at whole sectors.
__host__ __device__ constexpr uint32_t region_items(int vectors, int blocks) {
  return (2u * (vectors + blocks) + 3) / 4 * 4;
}

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_EXCHANGE_CUH_
