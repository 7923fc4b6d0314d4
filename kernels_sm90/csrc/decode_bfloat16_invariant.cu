#include "decode_instances.cuh"

namespace stream_attention {

int decode_bfloat16_invariant(const DecodeCall& call) {
  return decode_call<__nv_bfloat16, true>(call);
}

}  // namespace stream_attention
