// Which kernels solve a problem, and how they are launched. Pure host logic: pointers are numbers here, no CUDA is
// called, so the plan of any GPU can be made, read and tested on a machine without one. launch.cu carries it out.
#pragma once

#include <string>
#include <vector>

#include "kernel_params.h"
#include "tensor_map.h"

namespace attn_ext::cuda {

struct Target {
  int architecture = 80;      // 10 * major + minor of the compute capability
  int multiprocessors = 108;  // of an A100
  bool sm90_kernels = false;  // on Hopper, those of sm90/ for what they can do
};

struct Launch {
  std::string kernel;                       // as exported: attn_fwd_sm80_f16_d64
  int64_t grid = 1;                         // blocks along x; there is no y and z
  int block = 128;                          // threads
  int shared_bytes = 0;                     // dynamic shared memory of a block
  std::vector<char> params;                 // the kernel's one argument
  std::vector<TensorMap> tensor_maps = {};  // to be encoded into copies of params
};

// Memory that the kernels of a plan may touch.
struct Buffer {
  std::string name;
  const void* data;
  int64_t bytes;
};

using Plan = std::vector<Launch>;  // one after another on one stream

// Bytes of scratch memory that a plan needs, 256-byte aligned. All of these throw std::invalid_argument where no
// kernel takes the problem.
int64_t forward_workspace_bytes(const AttentionParams&, const Target&);
int64_t backward_workspace_bytes(const AttentionParams&, const BackwardIO&, const Target&);

Plan plan_forward(const AttentionParams&, const ForwardOutput&, void* workspace, const Target&);
Plan plan_backward(const AttentionParams&, const BackwardIO&, void* workspace, const Target&);
Plan plan_jvp(const AttentionParams&, const JvpIO&, const Target&);

// For whoever runs or checks a plan without a GPU. Tensors without elements are left out.
std::vector<Buffer> forward_buffers(const AttentionParams&, const ForwardOutput&, void* workspace,
                                    const Target&);
std::vector<Buffer> backward_buffers(const AttentionParams&, const BackwardIO&, void* workspace,
                                     const Target&);
std::vector<Buffer> jvp_buffers(const AttentionParams&, const JvpIO&);

// Whether the kernels for this problem read q, k, v, their tangents and grad_out in 16-byte pieces: then these need
// addresses that are multiples of 16 bytes, and strides too.
bool needs_aligned_rows(const AttentionParams&);

}  // namespace attn_ext::cuda
