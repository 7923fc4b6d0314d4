#include "decode_instances.cuh"

namespace stream_attention {

int decode_bfloat16(const DecodeCall& call) { return decode_call<__nv_bfloat16, false>(call); }

}  // namespace stream_attention
