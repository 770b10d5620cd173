// Tensor maps for a launch, encoded by the driver. Its function is asked for at run time: nothing links libcuda, which a
// machine without a GPU does not have.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "launch.h"

namespace attn_ext::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);
constexpr int kSince = 12000;  // the version of CUDA that brought it

Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince,
                                                             cudaEnableDefault, &found);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess) cudaGetLastError();  // CUDA's sticky copy
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw std::runtime_error(
        "attn_ext: this NVIDIA driver has no cuTensorMapEncodeTiled, which the kernels for Hopper need: "
        "update it "
        "to one for CUDA 12.0 or newer, or unset ATTN_EXT_KERNELS");
  }
  return reinterpret_cast<Encode>(function);
}

CUtensorMap encoded(const TensorMap& map) {
  static const Encode encode = find_encode();  // after an error the next call asks again
  CUtensorMap result;
  cuuint64_t size[4], stride[3];
  std::copy(map.size, map.size + 4, size);
  std::copy(map.stride_bytes, map.stride_bytes + 3, stride);
  const cuuint32_t box[4] = {64, cuuint32_t(map.box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult error = encode(
      &result,
      map.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
      const_cast<void*>(map.data), size, stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B,
      // A miss fetches 256 bytes: neighbouring panels and rows are asked for next.
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    throw std::runtime_error("attn_ext: cuTensorMapEncodeTiled refuses a tensor (CUresult " +
                             std::to_string(int(error)) + ")");
  }
  return result;
}

}  // namespace

std::vector<char> params_with_tensor_maps(const Launch& launch) {
  std::vector<char> params = launch.params;
  for (const TensorMap& map : launch.tensor_maps) {
    const CUtensorMap bytes = encoded(map);
    std::memcpy(params.data() + map.params_offset, &bytes, sizeof(bytes));
  }
  return params;
}

}  // namespace attn_ext::cuda
