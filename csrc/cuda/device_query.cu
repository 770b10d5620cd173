#include <cuda_runtime_api.h>

#include "device_query.h"

namespace attn_ext::cuda {

namespace {

// Never launched: the runtime is asked which of its compiled forms a device would run.
__global__ void probe() {}

// The architecture whose code the current device runs, or 0 when the library has nothing that fits.
int loaded_architecture() {
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, probe) != cudaSuccess) {
    cudaGetLastError();  // an error that stays would be reported by the next call of someone else
    return 0;
  }
  return attributes.ptxVersion;  // of the PTX it was made from, whether ahead of time or by the driver
}

}  // namespace

DeviceList list_devices() {
  DeviceList list;
  int count = 0;
  if (cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    int driver = 0;  // stays 0 where no driver is installed
    const bool no_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    list.problem = no_driver ? "no NVIDIA driver" : cudaGetErrorString(error);
    return list;
  }
  int previous = 0;
  cudaGetDevice(&previous);
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    cudaError_t error = cudaGetDeviceProperties(&properties, i);
    if (error == cudaSuccess) error = cudaSetDevice(i);
    if (error != cudaSuccess) {
      cudaGetLastError();
      list.problem = "device " + std::to_string(i) + ": " + cudaGetErrorString(error);
      break;
    }
    list.devices.push_back({properties.name, 10 * properties.major + properties.minor,
                            properties.totalGlobalMem, loaded_architecture()});
  }
  cudaSetDevice(previous);
  return list;
}

std::vector<int> built_architectures() {
  // nvcc defines the list in its host pass, as 800,900.
  std::vector<int> architectures{__CUDA_ARCH_LIST__};
  for (int& architecture : architectures) architecture /= 10;
  return architectures;
}

int runtime_version() { return CUDART_VERSION; }

}  // namespace attn_ext::cuda
