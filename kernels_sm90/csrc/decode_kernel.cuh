// Exact decode on sm_90 for one KV head and up to N packed query rows (query tokens x group): the
// kernel, in one of two forms.
#ifndef STREAM_ATTENTION_DECODE_KERNEL_CUH_
#define STREAM_ATTENTION_DECODE_KERNEL_CUH_

#include <type_traits>

#include "decode_block.cuh"
#include "decode_wide.cuh"

namespace stream_attention {

template <class T, class E, class Shape, bool kWholePages>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    decode_kernel(const __grid_constant__ DecodeLaunch launch) {
  using Block = std::conditional_t<Shape::kAllTogether, DecodeWide<T, E, Shape, kWholePages>,
                                   DecodeBlock<T, E, Shape, kWholePages>>;
  extern __shared__ __align__(1024) char shared[];
  // Left to itself the compiler makes the address anew wherever it is used, which takes long.
  // Instances with fp8 have no register for it.
  char* const memory = sizeof(E) > 1 ? kept_in_register(shared) : shared;
  Block work(launch, memory);
  work.run();
}

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_KERNEL_CUH_
