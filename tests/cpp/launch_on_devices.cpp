// launch.cu on two GPUs that do not exist: the functions of CUDA's runtime that it calls, told one a line on stdout.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <stdexcept>

#include "cuda/device_query.h"
#include "cuda/launch.h"
#include "cuda/registry.h"

namespace {

int current = 0;
bool fails = false;  // whether launches do

void* stream_of(int device) { return reinterpret_cast<void*>(uintptr_t(100 + device)); }

const attn_ext::cuda::KernelEntry entry("some_kernel", &current);

}  // namespace

cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }

cudaError_t cudaSetDevice(int device) {
  std::printf("device %d\n", current = device);
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  std::printf("allow %d bytes on %d\n", bytes, current);
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3, void**, size_t, cudaStream_t stream) {
  std::printf("launch %u on %d, stream %d\n", grid.x, current, int(reinterpret_cast<uintptr_t>(stream)));
  return fails ? cudaErrorInvalidConfiguration : cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  return cudaErrorNotSupported;  // no launch here has tensor maps
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 8, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "invalid configuration"; }
std::vector<int> attn_ext::cuda::built_architectures() { return {80}; }

int main() {
  const attn_ext::cuda::Backend backend = attn_ext::cuda::make_backend(stream_of);
  const attn_ext::cuda::Plan plan{{"some_kernel", 1, 128, 64 << 10, {}}, {"some_kernel", 2, 128, 0, {}}};
  backend.launch(plan, 1);
  backend.launch(plan, 0);
  fails = true;
  try {
    backend.launch(plan, 1);
  } catch (const std::runtime_error& error) {
    std::puts(error.what());
  }
  std::printf("current: %d\n", current);
}
