#include "decode_instances.cuh"

namespace stream_attention {

int decode_float16(const DecodeCall& call) { return decode_call<__half, false>(call); }

}  // namespace stream_attention
