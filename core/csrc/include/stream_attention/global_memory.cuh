// Global-memory access that several architectures do in the same way; each arch.cuh builds on it
// and holds only what is its own.
#ifndef STREAM_ATTENTION_GLOBAL_MEMORY_CUH_
#define STREAM_ATTENTION_GLOBAL_MEMORY_CUH_

#include <stdint.h>

namespace stream_attention {

struct GlobalStores {
  // The next kernel reads the output from L2.
  template <int kBytes, int kWordCount>
  static __device__ __forceinline__ void store(void* target, const uint32_t (&words)[kWordCount]) {
    if constexpr (kBytes >= 16) {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     :
                     : "l"(static_cast<char*>(target) + 16 * i), "r"(words[4 * i]),
                       "r"(words[4 * i + 1]), "r"(words[4 * i + 2]), "r"(words[4 * i + 3])
                     : "memory");
      }
    } else if constexpr (kBytes == 8) {
      asm volatile("st.global.v2.u32 [%0], {%1, %2};"
                   :
                   : "l"(target), "r"(words[0]), "r"(words[1])
                   : "memory");
    } else if constexpr (kBytes == 4) {
      asm volatile("st.global.u32 [%0], %1;" : : "l"(target), "r"(words[0]) : "memory");
    } else {
      asm volatile("st.global.u16 [%0], %1;"
                   :
                   : "l"(target), "h"(static_cast<uint16_t>(words[0]))
                   : "memory");
    }
  }
};

// From sm_90 on: launches may depend on their predecessor, and loads take a cache policy.
struct DependentMemory : GlobalStores {
  // Under dependent launch the blocks of this grid become resident while the producer of the
  // partial states drains, which hides the launch latency.
  static constexpr bool kDependentLaunch = true;

  // Returns when the preceding grid is complete and its writes are visible; at once in a plain
  // launch. Nothing may be read or written before it.
  static __device__ __forceinline__ void wait_for_producer() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
  }

  // The next grid, if it was launched as dependent on this one, may take the SM's free slots.
  static __device__ __forceinline__ void release_consumer() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
  }

  // Partial states are read once: they pass L1 by and leave L2 first, so that they do not push
  // out the KV cache of the next step. Not the read-only path (.nc): the producer may still write
  // them while this grid is already resident.
  static __device__ __forceinline__ uint64_t read_once_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
  }

  template <int kBytes, int kWordCount>
  static __device__ __forceinline__ void load(const void* source, uint32_t (&words)[kWordCount]) {
    static_assert(kBytes == 2 || kBytes == 4 || kBytes == 16, "no such load");
    if constexpr (kBytes == 16) {
      asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "l"(source), "l"(read_once_policy()));
    } else if constexpr (kBytes == 4) {
      asm volatile("ld.global.L1::no_allocate.L2::cache_hint.u32 %0, [%1], %2;"
                   : "=r"(words[0])
                   : "l"(source), "l"(read_once_policy()));
    } else {
      uint16_t half;
      asm volatile("ld.global.L1::no_allocate.L2::cache_hint.u16 %0, [%1], %2;"
                   : "=h"(half)
                   : "l"(source), "l"(read_once_policy()));
      words[0] = half;
    }
  }

  // Every vector of a row reads the same few values: these do want L1.
  static __device__ __forceinline__ float load_lse(const float* source) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(source));
    return value;
  }
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_GLOBAL_MEMORY_CUH_
