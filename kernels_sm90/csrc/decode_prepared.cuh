// A launch made once and enqueued many times: what `prepare` leaves in the caller's memory.
#ifndef STREAM_ATTENTION_DECODE_PREPARED_CUH_
#define STREAM_ATTENTION_DECODE_PREPARED_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include "decode_cursor.cuh"

namespace stream_attention {

// Holds no address of its own, so that a copy of it is as good.
struct PreparedDecode {
  // Memory that is zero or was filled by chance is no launch.
  static constexpr uint64_t kPrepared = 0x53412d6465636f64;

  uint64_t prepared;                      // kPrepared, or the rest means nothing
  decltype(&cuLaunchKernelEx) enqueue;
  CUfunction function;                    // of the device that was current
  CUlaunchConfig config;                  // without stream and attributes
  CUlaunchAttribute attributes[2];
  DecodeLaunch launch;
};

// The runtime's cudaLaunchKernelEx looks the kernel up by its symbol and asks for the device, every
// time. The driver's takes what was found once; without linking to it, since the libraries must
// load where there is no driver.
inline cudaError_t find_enqueue(PreparedDecode& call) {
  constexpr unsigned kSince = 11060;
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuLaunchKernelEx", &entry, kSince,
                                                             cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorInsufficientDriver;
  call.enqueue = reinterpret_cast<decltype(call.enqueue)>(entry);
  return cudaSuccess;
}

inline int finish_call(cudaError_t error) {
  // A refused call must not show up again as the error of some later one.
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return static_cast<int>(error);
}

// The driver keeps no last error. Its results have the numbers of cudaError_t.
inline int enqueue(const PreparedDecode& call, void* stream) {
  void* arguments[] = {const_cast<DecodeLaunch*>(&call.launch)};
  CUlaunchConfig config = call.config;
  config.hStream = static_cast<CUstream>(stream);
  config.attrs = const_cast<CUlaunchAttribute*>(call.attributes);
  return static_cast<int>(call.enqueue(&config, call.function, arguments, nullptr));
}

// A thread that never used CUDA has no context, which the driver refuses and the runtime would not:
// setting its device gives it one.
inline int enqueue_in_new_thread(const PreparedDecode& call, void* stream) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  return error == cudaSuccess ? enqueue(call, stream) : finish_call(error);
}

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_PREPARED_CUH_
