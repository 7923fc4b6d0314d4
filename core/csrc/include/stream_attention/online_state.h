// The algebra of attention states: a running maximum, a denominator and a weighted sum.
//
//   state of a set S of logits:  max = m,  sum = sum_S exp(logit - m),  acc = sum_S exp(.. - m) v
//
// fp32 throughout; the output is rounded once, by the caller. Host and device code are the same
// text, so the CPU test of this header is a test of what the kernels compute.
// Source of the rescaling: Milakov and Gimelshein, "Online normalizer calculation for softmax".
#ifndef STREAM_ATTENTION_ONLINE_STATE_H_
#define STREAM_ATTENTION_ONLINE_STATE_H_

#include <math.h>

#ifdef __CUDACC__
#define STREAM_ATTENTION_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define STREAM_ATTENTION_HOST_DEVICE inline
#endif

namespace stream_attention {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNegativeInfinity = -__builtin_huge_valf();

// Exactly -inf is empty. NaN is not: a broken producer must show, not vanish.
STREAM_ATTENTION_HOST_DEVICE bool is_empty(float lse) { return lse == kNegativeInfinity; }

// exp(x - maximum) for a logit x that is not empty.
STREAM_ATTENTION_HOST_DEVICE float weight_of(float x, float maximum) {
  return exp2f((x - maximum) * kLog2E);
}

template <int kElements>
struct OnlineState {
  float max = kNegativeInfinity;
  float sum = 0.0f;
  float acc[kElements] = {};

  // Nothing was added. A NaN logit leaves max at -inf but makes sum NaN, hence both tests.
  STREAM_ATTENTION_HOST_DEVICE bool empty() const { return is_empty(max) && sum == 0.0f; }

  // Moves the reference point up to at least `candidate`. Equal maxima keep factor 1, which
  // covers (-inf) - (-inf).
  STREAM_ATTENTION_HOST_DEVICE void raise_max(float candidate) {
    const float raised = fmaxf(max, candidate);
    if (raised != max) {
      const float factor = weight_of(max, raised);
      sum *= factor;
      for (int i = 0; i < kElements; ++i) acc[i] *= factor;
      max = raised;
    }
  }

  // Adds one non-empty state (value, lse); raise_max(lse) was called before.
  STREAM_ATTENTION_HOST_DEVICE void add(float lse, const float (&value)[kElements]) {
    const float weight = weight_of(lse, max);
    sum += weight;
    for (int i = 0; i < kElements; ++i) acc[i] = fmaf(weight, value[i], acc[i]);
  }

  // What moves the sums of another thread, taken at other_max, to this reference point;
  // raise_max(other_max) was called before.
  STREAM_ATTENTION_HOST_DEVICE float factor_for(float other_max) const {
    return other_max == max ? 1.0f : weight_of(other_max, max);
  }

  // The sink is one more logit without a value. An empty row stays empty.
  STREAM_ATTENTION_HOST_DEVICE void add_sink(float sink) {
    if (empty() || is_empty(sink)) return;
    raise_max(sink);
    sum += weight_of(sink, max);
  }

  STREAM_ATTENTION_HOST_DEVICE float lse() const {
    return empty() ? kNegativeInfinity : max + logf(sum);
  }

  STREAM_ATTENTION_HOST_DEVICE void normalise(float (&out)[kElements]) const {
    const float inverse = empty() ? 0.0f : 1.0f / sum;
    for (int i = 0; i < kElements; ++i) out[i] = acc[i] * inverse;
  }
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_ONLINE_STATE_H_
