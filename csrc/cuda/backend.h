// How the ops (attn_ext._C) reach the GPU without being linked to CUDA: attn_ext._C_cuda fills this table and hands it
// over when it is loaded.
#pragma once

#include "launch_plan.h"

namespace attn_ext::cuda {

struct Backend {
  // Throw std::runtime_error with what CUDA said.
  Target (*target)(int device_index);
  void (*launch)(const Plan& plan, int device_index);  // on torch's current stream of that device
};

// Null until _C_cuda is loaded.
const Backend*& backend();

}  // namespace attn_ext::cuda
