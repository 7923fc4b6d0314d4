// sm_100a (B200, GB200).
#ifndef STREAM_ATTENTION_ARCH_CUH_
#define STREAM_ATTENTION_ARCH_CUH_

#include <stdint.h>

#include "stream_attention/global_memory.cuh"

namespace stream_attention {

struct Arch : DependentMemory {
  static constexpr int kComputeCapability = 100;
  // ld.global moves 32 bytes a thread, a whole sector: half the load instructions of sm_90.
  static constexpr int kMaxVectorBytes = 32;

  // A 32-byte load names its priority itself; narrower ones take a policy as on sm_90.
  template <int kBytes, int kWordCount>
  static __device__ __forceinline__ void load(const void* source, uint32_t (&words)[kWordCount]) {
    if constexpr (kBytes == 32) {
      asm volatile(
          "ld.global.L1::no_allocate.L2::evict_first.v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
          : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]), "=r"(words[4]),
            "=r"(words[5]), "=r"(words[6]), "=r"(words[7])
          : "l"(source));
    } else {
      DependentMemory::load<kBytes>(source, words);
    }
  }
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_ARCH_CUH_
