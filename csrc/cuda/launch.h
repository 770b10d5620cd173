// What launch.cu offers to module.cpp. No CUDA type crosses this header.
#pragma once

#include "backend.h"

namespace attn_ext::cuda {

// The kernels of this library on this machine. `current_stream` gives torch's current cudaStream_t of a device.
Backend make_backend(void* (*current_stream)(int device_index));

// A launch's params with its tensor maps encoded (tensor_map.cu). Throws std::runtime_error where the driver cannot.
std::vector<char> params_with_tensor_maps(const Launch& launch);

}  // namespace attn_ext::cuda
