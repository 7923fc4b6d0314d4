#include "decode_instances.cuh"

namespace stream_attention {

int decode_float16_invariant(const DecodeCall& call) { return decode_call<__half, true>(call); }

}  // namespace stream_attention
