// launch.cu and tensor_map.cu on a Hopper that does not exist: what becomes of a plan's tensor maps.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "../ptxrun/tensormap_stub.h"
#include "cuda/device_query.h"
#include "cuda/launch.h"
#include "cuda/registry.h"

namespace {

int function = 0;
cudaDriverEntryPointQueryResult driver = cudaDriverEntryPointVersionNotSufficent;
std::vector<unsigned char> params(8 + 128 + 8);

void* stream_of(int) { return nullptr; }
const attn_ext::cuda::KernelEntry entry("some_kernel", &function);

int encode(void* map, int dtype, uint32_t rank, void* data, const uint64_t* sizes, const uint64_t* strides,
           const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int, int fill) {
  if (strides[0] % 16 != 0) return 1;
  return ptxrun_tensormap_encode(map, dtype, rank, data, sizes, strides, box, steps, interleave, swizzle,
                                 fill);
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *result = driver;
  *found = driver == cudaDriverEntryPointSuccess ? reinterpret_cast<void*>(&encode) : nullptr;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void** arguments, size_t, cudaStream_t) {
  std::memcpy(params.data(), arguments[0], params.size());
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 9, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "no error"; }
std::vector<int> attn_ext::cuda::built_architectures() { return {80}; }

int main() {
  using namespace attn_ext;
  const cuda::Backend backend = cuda::make_backend(stream_of);
  StridedView view{reinterpret_cast<void*>(0x1000), DType::kBFloat16, {6144, 64, 128, 1}, true};
  cuda::Plan plan{{"some_kernel", 1, 128, 0, std::vector<char>(params.size(), 'p')}};
  plan[0].tensor_maps = {cuda::tensor_map(8, view, 3, 2, 48, 59, 176)};
  const auto launch = [&] {
    try {
      backend.launch(plan, 0);
    } catch (const std::runtime_error& error) {
      std::puts(error.what());
    }
  };
  launch();
  driver = cudaDriverEntryPointSuccess;
  launch();
  for (const unsigned char byte : params) std::printf("%02x", byte);
  std::puts("");
  plan[0].tensor_maps[0].stride_bytes[0] = 8;
  launch();
  plan[0].kernel = "attn_fwd_sm90_f16_d64";
  launch();
}
