// sm_90a (H100, H200).
#ifndef STREAM_ATTENTION_ARCH_CUH_
#define STREAM_ATTENTION_ARCH_CUH_

#include <stdint.h>

#include "stream_attention/global_memory.cuh"

namespace stream_attention {

struct Arch : DependentMemory {
  static constexpr int kComputeCapability = 90;
  // ld.global moves 16 bytes a thread at most.
  static constexpr int kMaxVectorBytes = 16;
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_ARCH_CUH_
