// libstream_attention_sm100: merges of attention states (out, lse).
// state_abi.h has the ABI, state_kernels.cuh the kernels, arch.cuh what sm_100 does in its own way.
#include "arch.cuh"
#include "stream_attention/state_library.cuh"

STREAM_ATTENTION_STATE_LIBRARY(stream_attention::Arch)
