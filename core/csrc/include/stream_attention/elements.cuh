// Between the 16- and 32-bit words of a load or store and fp32 values; host and device.
#ifndef STREAM_ATTENTION_ELEMENTS_CUH_
#define STREAM_ATTENTION_ELEMENTS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "stream_attention/state_abi.h"

namespace stream_attention {

// The number of 32-bit words that hold kElements of a dtype; a lone 16-bit value takes one.
template <int kDtype, int kElements>
constexpr int kWords = kDtype == STREAM_ATTENTION_FLOAT32 ? kElements : (kElements + 1) / 2;

__host__ __device__ __forceinline__ float float_from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

__host__ __device__ __forceinline__ uint32_t bits_from_float(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

template <int kDtype>
__host__ __device__ __forceinline__ float decode16(uint32_t bits) {
  if constexpr (kDtype == STREAM_ATTENTION_BFLOAT16) {
    return float_from_bits(bits << 16);
  } else {
    __half_raw raw;
    raw.x = static_cast<unsigned short>(bits);
    return __half2float(__half(raw));
  }
}

template <int kDtype>
__host__ __device__ __forceinline__ uint32_t encode16(float value) {
  if constexpr (kDtype == STREAM_ATTENTION_BFLOAT16) {
    return static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(value)).x;
  } else {
    return static_cast<__half_raw>(__float2half_rn(value)).x;
  }
}

template <int kDtype, int kElements>
__host__ __device__ __forceinline__ void decode(
    const uint32_t (&words)[kWords<kDtype, kElements>], float (&values)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if constexpr (kDtype == STREAM_ATTENTION_FLOAT32) {
      values[i] = float_from_bits(words[i]);
    } else {
      values[i] = decode16<kDtype>((words[i / 2] >> (16 * (i % 2))) & 0xffffu);
    }
  }
}

// Round to nearest even, the one rounding of the contract.
template <int kDtype, int kElements>
__host__ __device__ __forceinline__ void encode(
    const float (&values)[kElements], uint32_t (&words)[kWords<kDtype, kElements>]) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if constexpr (kDtype == STREAM_ATTENTION_FLOAT32) {
      words[i] = bits_from_float(values[i]);
    } else {
      const uint32_t half = encode16<kDtype>(values[i]);
      words[i / 2] = i % 2 == 0 ? half : words[i / 2] | (half << 16);
    }
  }
}

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_ELEMENTS_CUH_
