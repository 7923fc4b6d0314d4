// Launchers, host twins and the exported functions of a state library. A kernels package includes
// this once, after its arch.cuh, and defines the C ABI with STREAM_ATTENTION_STATE_LIBRARY(Arch).
#ifndef STREAM_ATTENTION_STATE_LIBRARY_CUH_
#define STREAM_ATTENTION_STATE_LIBRARY_CUH_

#include <cuda_runtime.h>

#include <type_traits>

#include "stream_attention/state_kernels.cuh"

namespace stream_attention {

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

template <class Call>
int with_dtype(int dtype, Call&& call) {
  switch (dtype) {
    case STREAM_ATTENTION_FLOAT32: return call(Constant<STREAM_ATTENTION_FLOAT32>{});
    case STREAM_ATTENTION_FLOAT16: return call(Constant<STREAM_ATTENTION_FLOAT16>{});
    case STREAM_ATTENTION_BFLOAT16: return call(Constant<STREAM_ATTENTION_BFLOAT16>{});
    default: return STREAM_ATTENTION_BAD_DTYPE;
  }
}

// Calls call(parts dtype, output dtype, vector elements) with compile-time values. The geometry
// chose the width from the same three candidates.
template <class Arch, class Params, class Call>
int dispatch(const Params& p, int elements, Call&& call) {
  return with_dtype(p.parts_dtype, [&](auto parts) {
    return with_dtype(p.out_dtype, [&](auto out) {
      constexpr int kNarrow = 16 / dtype_bytes(decltype(parts)::value);
      constexpr int kWide = Arch::kMaxVectorBytes / dtype_bytes(decltype(parts)::value);
      if (elements == 1) return call(parts, out, Constant<1>{});
      if (elements == kWide) return call(parts, out, Constant<kWide>{});
      return call(parts, out, Constant<kNarrow>{});
    });
  });
}

template <class Arch, class Params>
int enqueue(void (*kernel)(Params, StreamAttentionStateGeometry), const Params& p,
            const StreamAttentionStateGeometry& geometry, void* stream) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(geometry.grid);
  config.blockDim = dim3(geometry.block_vectors, geometry.state_slices);
  config.dynamicSmemBytes = geometry.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &overlap;
  config.numAttrs =
      Arch::kDependentLaunch && (p.flags & STREAM_ATTENTION_DEPENDENT_LAUNCH) != 0 ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, p, geometry);
  // A refused launch must not show up again as the error of some later call.
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return static_cast<int>(error);
}

template <class Params>
int load(void (*kernel)(Params, StreamAttentionStateGeometry)) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return static_cast<int>(error);
}

// Calls use(kernel, geometry) with the kernel that the parameters take, unless there are no rows.
template <class Arch, class Use>
int with_merge_kernel(const StreamAttentionStateMergeParams& p, int num_sms, Use&& use) {
  StreamAttentionStateGeometry geometry;
  const int status = state_merge_geometry(p, num_sms, Arch::kMaxVectorBytes, &geometry);
  if (status != STREAM_ATTENTION_OK || geometry.grid == 0) return status;
  return dispatch<Arch>(p, geometry.vector_elements, [&](auto parts, auto out, auto elements) {
    return use(state_merge_kernel<Arch, parts.value, out.value, elements.value>, geometry);
  });
}

template <class Arch, class Use>
int with_pair_kernel(const StreamAttentionStatePairParams& p, int num_sms, Use&& use) {
  StreamAttentionStateGeometry geometry;
  const int status = state_pair_geometry(p, num_sms, Arch::kMaxVectorBytes, &geometry);
  if (status != STREAM_ATTENTION_OK || geometry.grid == 0) return status;
  return dispatch<Arch>(p, geometry.vector_elements, [&](auto parts, auto out, auto elements) {
    return use(state_pair_kernel<Arch, parts.value, out.value, elements.value>, geometry);
  });
}

template <class Arch>
int prepare_merge(const StreamAttentionStateMergeParams& p, int num_sms) {
  return with_merge_kernel<Arch>(p, num_sms, [](auto kernel, auto&) { return load(kernel); });
}

template <class Arch>
int prepare_pair(const StreamAttentionStatePairParams& p, int num_sms) {
  return with_pair_kernel<Arch>(p, num_sms, [](auto kernel, auto&) { return load(kernel); });
}

template <class Arch>
int launch_merge(const StreamAttentionStateMergeParams& p, int num_sms, void* stream) {
  return with_merge_kernel<Arch>(p, num_sms, [&](auto kernel, auto& geometry) {
    return enqueue<Arch>(kernel, p, geometry, stream);
  });
}

template <class Arch>
int launch_pair(const StreamAttentionStatePairParams& p, int num_sms, void* stream) {
  return with_pair_kernel<Arch>(p, num_sms, [&](auto kernel, auto& geometry) {
    return enqueue<Arch>(kernel, p, geometry, stream);
  });
}

// Every thread of the geometry in turn; the exchange holds one block at a time.
template <class Arch>
int host_merge(const StreamAttentionStateMergeParams& p, int num_sms) {
  StreamAttentionStateGeometry geometry;
  const int status = state_merge_geometry(p, num_sms, Arch::kMaxVectorBytes, &geometry);
  if (status != STREAM_ATTENTION_OK || geometry.grid == 0) return status;
  return dispatch<Arch>(p, geometry.vector_elements, [&](auto parts, auto out, auto elements) {
    constexpr int kElements = elements.value;
    float shared[kMaxStateSlices * (kElements + 2)];
    const SliceExchange<kElements> exchange{shared, 1};
    for (int64_t block = 0; block < geometry.grid; ++block) {
      for (int x = 0; x < geometry.block_vectors; ++x) {
        const VectorPosition position = locate_vector(geometry, block, x);
        if (!position.valid) continue;
        OnlineState<kElements> first;
        for (int slice = 0; slice < geometry.state_slices; ++slice) {
          OnlineState<kElements> state;
          accumulate_slice<HostMemory, parts.value, kElements>(p, position, slice,
                                                               geometry.state_slices, state);
          if (slice == 0) first = state;
          exchange.put(slice, 0, state);
        }
        if (geometry.state_slices > 1) exchange.gather(geometry.state_slices, 0, first);
        finish_vector<HostMemory, out.value, kElements>(p, position, first);
      }
    }
    return static_cast<int>(STREAM_ATTENTION_OK);
  });
}

template <class Arch>
int host_pair(const StreamAttentionStatePairParams& p, int num_sms) {
  StreamAttentionStateGeometry geometry;
  const int status = state_pair_geometry(p, num_sms, Arch::kMaxVectorBytes, &geometry);
  if (status != STREAM_ATTENTION_OK || geometry.grid == 0) return status;
  return dispatch<Arch>(p, geometry.vector_elements, [&](auto parts, auto out, auto elements) {
    for (int64_t block = 0; block < geometry.grid; ++block) {
      for (int x = 0; x < geometry.block_vectors; ++x) {
        const VectorPosition position = locate_vector(geometry, block, x);
        if (!position.valid) continue;
        OnlineState<elements.value> state;
        accumulate_pair<HostMemory, parts.value, elements.value>(p, position, state);
        finish_vector<HostMemory, out.value, elements.value>(p, position, state);
      }
    }
    return static_cast<int>(STREAM_ATTENTION_OK);
  });
}

inline int64_t params_bytes(int which) {
  switch (which) {
    case STREAM_ATTENTION_STATE_MERGE_PARAMS: return sizeof(StreamAttentionStateMergeParams);
    case STREAM_ATTENTION_STATE_PAIR_PARAMS: return sizeof(StreamAttentionStatePairParams);
    case STREAM_ATTENTION_STATE_GEOMETRY: return sizeof(StreamAttentionStateGeometry);
    default: return -1;
  }
}

}  // namespace stream_attention

#define STREAM_ATTENTION_STATE_LIBRARY(Arch)                                                    \
  extern "C" {                                                                                  \
  int32_t stream_attention_abi_version(void) { return STREAM_ATTENTION_ABI_VERSION; }           \
  int64_t stream_attention_params_bytes(int32_t which) {                                        \
    return stream_attention::params_bytes(which);                                               \
  }                                                                                             \
  int32_t stream_attention_arch(void) { return Arch::kComputeCapability; }                      \
  const char* stream_attention_error_string(int32_t status) {                                   \
    const char* text = stream_attention::status_string(status);                                 \
    return text != nullptr ? text : cudaGetErrorString(static_cast<cudaError_t>(status));       \
  }                                                                                             \
  int32_t stream_attention_state_merge_geometry(const StreamAttentionStateMergeParams* params,  \
                                                int32_t num_sms,                                \
                                                StreamAttentionStateGeometry* geometry) {       \
    return stream_attention::state_merge_geometry(*params, num_sms, Arch::kMaxVectorBytes,      \
                                                  geometry);                                    \
  }                                                                                             \
  int32_t stream_attention_state_pair_geometry(const StreamAttentionStatePairParams* params,    \
                                               int32_t num_sms,                                 \
                                               StreamAttentionStateGeometry* geometry) {        \
    return stream_attention::state_pair_geometry(*params, num_sms, Arch::kMaxVectorBytes,       \
                                                 geometry);                                     \
  }                                                                                             \
  int32_t stream_attention_state_merge_prepare(const StreamAttentionStateMergeParams* params,   \
                                               int32_t num_sms) {                               \
    return stream_attention::prepare_merge<Arch>(*params, num_sms);                             \
  }                                                                                             \
  int32_t stream_attention_state_pair_prepare(const StreamAttentionStatePairParams* params,     \
                                              int32_t num_sms) {                                \
    return stream_attention::prepare_pair<Arch>(*params, num_sms);                              \
  }                                                                                             \
  int32_t stream_attention_state_merge(const StreamAttentionStateMergeParams* params,           \
                                       int32_t num_sms, void* stream) {                         \
    return stream_attention::launch_merge<Arch>(*params, num_sms, stream);                      \
  }                                                                                             \
  int32_t stream_attention_state_pair(const StreamAttentionStatePairParams* params,             \
                                      int32_t num_sms, void* stream) {                          \
    return stream_attention::launch_pair<Arch>(*params, num_sms, stream);                       \
  }                                                                                             \
  int32_t stream_attention_state_merge_host(const StreamAttentionStateMergeParams* params,      \
                                            int32_t num_sms) {                                  \
    return stream_attention::host_merge<Arch>(*params, num_sms);                                \
  }                                                                                             \
  int32_t stream_attention_state_pair_host(const StreamAttentionStatePairParams* params,        \
                                           int32_t num_sms) {                                   \
    return stream_attention::host_pair<Arch>(*params, num_sms);                                 \
  }                                                                                             \
  }  /* extern "C" */

#endif  // STREAM_ATTENTION_STATE_LIBRARY_CUH_
