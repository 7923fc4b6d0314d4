// How decode.cu reaches the translation units that hold the kernels.
#ifndef STREAM_ATTENTION_DECODE_DISPATCH_H_
#define STREAM_ATTENTION_DECODE_DISPATCH_H_

#include "decode_abi.h"

namespace stream_attention {

struct PreparedDecode;

enum class DecodeAction { kGeometry, kPrepare };

struct DecodeCall {
  DecodeAction action;
  const StreamAttentionDecodeParams* params;
  int num_sms;
  StreamAttentionDecodeGeometry* geometry;  // of kGeometry
  PreparedDecode* prepared;                 // of kPrepare
};

// By the dtype of q and batch_invariant. Results as in decode_abi.h.
int decode_bfloat16(const DecodeCall& call);
int decode_float16(const DecodeCall& call);
int decode_bfloat16_invariant(const DecodeCall& call);
int decode_float16_invariant(const DecodeCall& call);

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_DISPATCH_H_
