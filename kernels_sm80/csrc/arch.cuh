// sm_80 (A100) and, through the library's PTX, every later GPU.
#ifndef STREAM_ATTENTION_ARCH_CUH_
#define STREAM_ATTENTION_ARCH_CUH_

#include <stdint.h>

#include "stream_attention/global_memory.cuh"

namespace stream_attention {

struct Arch : GlobalStores {
  static constexpr int kComputeCapability = 80;
  // ld.global moves 16 bytes a thread at most.
  static constexpr int kMaxVectorBytes = 16;
  // No programmatic dependent launch before sm_90: a kernel starts when its predecessor is done.
  static constexpr bool kDependentLaunch = false;

  static __device__ __forceinline__ void wait_for_producer() {}
  static __device__ __forceinline__ void release_consumer() {}

  // Partial states are read once: they pass L1 by. Since nothing writes them while this kernel
  // runs, the read-only path (.nc) is legal, which it is not under dependent launch. Neighbouring
  // threads take whole rows, so fetching 128-byte lines into L2 wastes nothing.
  template <int kBytes, int kWordCount>
  static __device__ __forceinline__ void load(const void* source, uint32_t (&words)[kWordCount]) {
    static_assert(kBytes == 2 || kBytes == 4 || kBytes == 16, "no such load");
    if constexpr (kBytes == 16) {
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "l"(source));
    } else if constexpr (kBytes == 4) {
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];"
                   : "=r"(words[0])
                   : "l"(source));
    } else {
      uint16_t half;
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u16 %0, [%1];"
                   : "=h"(half)
                   : "l"(source));
      words[0] = half;
    }
  }

  // Every vector of a row reads the same few values: these do want L1.
  static __device__ __forceinline__ float load_lse(const float* source) {
    float value;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(source));
    return value;
  }
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_ARCH_CUH_
