// torch.ops.attn_ext.* for CUDA tensors, and the ops that only plan (attn_ext/plan.py). No CUDA is called here:
// plans come from cuda/launch_plan.cpp, and _C_cuda carries them out when it is loaded.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/backend.h"
#include "torch_problem.h"

namespace attn_ext {

namespace cuda {
const Backend*& backend() {
  static const Backend* loaded = nullptr;
  return loaded;
}
}  // namespace cuda

namespace {

const cuda::Backend& require_backend() {
  STD_TORCH_CHECK(
      cuda::backend() != nullptr,
      "attn_ext has no CUDA kernels here; `python -m attn_ext` says why. Tensors must be on the CPU");
  return *cuda::backend();
}

// Which kernels the environment asks for.
cuda::Target as_wished(cuda::Target target) {
  const char* const set = std::getenv("ATTN_EXT_KERNELS");
  const std::string wish = set == nullptr ? "" : set;
  STD_TORCH_CHECK(wish.empty() || wish == "sm80" || wish == "sm90", "attn_ext: ATTN_EXT_KERNELS is '", wish,
                  "', must be sm80, sm90 or not set");
  target.sm90_kernels = wish == "sm90";
  return target;
}

struct Forward {
  Memory memory;
  AttentionParams problem;
  ForwardResult result;
  Tensor workspace;
  cuda::Plan plan;

  Forward(const Tensor& q, const Tensor& k, const Tensor& v, ATTN_OPTION_PARAMETERS,
          const cuda::Target& target)
      : memory(q), problem(make_params(memory, q, k, v, ATTN_OPTIONS, &cuda::needs_aligned_rows)),
        result(allocate_forward(memory, problem, q)),
        workspace(memory.empty({cuda::forward_workspace_bytes(problem, target)}, ScalarType::Byte)),
        plan(cuda::plan_forward(problem, result.views, workspace.data_ptr(), target)) {}
};

struct Backward {
  Memory memory;
  AttentionParams problem;
  BackwardResult result;
  Tensor workspace;
  cuda::Plan plan;

  Backward(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& q, const Tensor& k,
           const Tensor& v, const Tensor& out, const Tensor& lse_parts, ATTN_OPTION_PARAMETERS,
           int64_t output_mask, const cuda::Target& target)
      : memory(q), problem(make_params(memory, q, k, v, ATTN_OPTIONS, &cuda::needs_aligned_rows)),
        result(allocate_backward(memory, problem, grad_out, grad_lse, q, out, lse_parts, bias, float_mask,
                                 alibi_slopes, sinks, output_mask,
                                 {cuda::needs_aligned_rows(problem), /* single_bias */ true})),
        workspace(
            memory.empty({cuda::backward_workspace_bytes(problem, result.views, target)}, ScalarType::Byte)),
        plan(cuda::plan_backward(problem, result.views, workspace.data_ptr(), target)) {}
};

struct Jvp {
  Memory memory;
  AttentionParams problem;
  JvpResult result;
  cuda::Plan plan;

  Jvp(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse_parts,
      const Tangents& tangents, ATTN_OPTION_PARAMETERS, const cuda::Target& target)
      : memory(q), problem(make_params(memory, q, k, v, ATTN_OPTIONS, &cuda::needs_aligned_rows)),
        result(allocate_jvp(memory, problem, q, out, lse_parts, tangents, cuda::needs_aligned_rows(problem))),
        plan(cuda::plan_jvp(problem, result.views, target)) {}
};

std::tuple<Tensor, Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                     ATTN_OPTION_PARAMETERS) {
  const cuda::Backend& backend = require_backend();
  const int32_t device = q.get_device_index();
  Forward call(q, k, v, ATTN_OPTIONS, as_wished(backend.target(device)));
  backend.launch(call.plan, device);
  return {std::move(call.result.out), std::move(call.result.lse), std::move(call.result.lse_parts)};
}

std::tuple<Tensor, Tensor> plain_forward(const Tensor& q, const Tensor& k, const Tensor& v, double scale,
                                         int64_t causal) {
  auto [out, lse, lse_parts] = attention_forward(q, k, v, ATTN_PLAIN_OPTIONS);
  return {std::move(out), std::move(lse_parts)};
}

BackwardResult::Tensors attention_backward(const Tensor& grad_out, const OptionalTensor& grad_lse,
                                           const Tensor& q, const Tensor& k, const Tensor& v,
                                           const Tensor& out, const Tensor& lse_parts, int64_t output_mask,
                                           ATTN_OPTION_PARAMETERS) {
  const cuda::Backend& backend = require_backend();
  const int32_t device = q.get_device_index();
  Backward call(grad_out, grad_lse, q, k, v, out, lse_parts, ATTN_OPTIONS, output_mask,
                as_wished(backend.target(device)));
  backend.launch(call.plan, device);
  return std::move(call.result).rounded(bias, float_mask);
}

std::tuple<Tensor, Tensor, Tensor> plain_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                  const Tensor& v, const Tensor& out, const Tensor& lse_parts,
                                                  int64_t output_mask, double scale, int64_t causal) {
  auto grads = attention_backward(grad_out, {}, q, k, v, out, lse_parts, output_mask & (kQ | kK | kV),
                                  ATTN_PLAIN_OPTIONS);
  return {std::move(std::get<0>(grads)), std::move(std::get<1>(grads)), std::move(std::get<2>(grads))};
}

std::tuple<Tensor, Tensor> attention_jvp(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                                         const Tensor& lse_parts, ATTN_TANGENT_PARAMETERS,
                                         ATTN_OPTION_PARAMETERS) {
  const cuda::Backend& backend = require_backend();
  const int32_t device = q.get_device_index();
  Jvp call(q, k, v, out, lse_parts, ATTN_TANGENTS, ATTN_OPTIONS, as_wished(backend.target(device)));
  backend.launch(call.plan, device);
  return {std::move(call.result.tangent_out), std::move(call.result.tangent_lse)};
}

template <size_t N>
std::string to_json(const int64_t (&numbers)[N]) {
  std::string text = "[";
  for (const int64_t number : numbers) text += (text.back() == '[' ? "" : ", ") + std::to_string(number);
  return text + "]";
}

// A plan and the memory that its kernels may touch, as JSON: {"launches": [...], "buffers": [...]}.
std::string to_json(const cuda::Plan& plan, const std::vector<cuda::Buffer>& buffers) {
  static const char* const kHex = "0123456789abcdef";
  std::string text = "{\"launches\": [";
  for (const cuda::Launch& launch : plan) {
    std::string params;
    for (const char c : launch.params) params += {kHex[uint8_t(c) >> 4], kHex[uint8_t(c) & 15]};
    text += (text.back() == '[' ? "" : ", ") + std::string("{\"kernel\": \"") + launch.kernel +
            "\", \"grid\": " + std::to_string(launch.grid) + ", \"block\": " + std::to_string(launch.block) +
            ", \"shared_bytes\": " + std::to_string(launch.shared_bytes) + ", \"params\": \"" + params +
            "\", \"tensor_maps\": [";
    for (const cuda::TensorMap& map : launch.tensor_maps) {
      text += (text.back() == '[' ? "" : ", ") + std::string("{\"params_offset\": ") +
              std::to_string(map.params_offset) + ", \"dtype\": \"" +
              (map.dtype == DType::kFloat16 ? "f16" : "bf16") +
              "\", \"data_ptr\": " + std::to_string(reinterpret_cast<uintptr_t>(map.data)) +
              ", \"sizes\": " + to_json(map.size) + ", \"strides\": " + to_json(map.stride_bytes) +
              ", \"box_rows\": " + std::to_string(map.box_rows) + "}";
    }
    text += "]}";
  }
  text += "], \"buffers\": [";
  for (const cuda::Buffer& buffer : buffers) {
    text += (text.back() == '[' ? "" : ", ") + std::string("{\"name\": \"") + buffer.name +
            "\", \"data_ptr\": " + std::to_string(reinterpret_cast<uintptr_t>(buffer.data)) +
            ", \"nbytes\": " + std::to_string(buffer.bytes) + "}";
  }
  return text + "]}";
}

// What the plan ops return: the JSON as bytes on the CPU, the results, the workspace if any, and the copies that were
// made.
std::vector<Tensor> described(const std::string& json, std::vector<Tensor> results,
                              const OptionalTensor& workspace, const Memory& memory) {
  AtenTensorHandle handle = nullptr;
  const int64_t size = int64_t(json.size()), stride = 1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(),
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  Tensor encoded(handle);
  std::copy(json.begin(), json.end(), static_cast<char*>(encoded.data_ptr()));
  results.insert(results.begin(), encoded);
  if (workspace) results.push_back(*workspace);
  results.insert(results.end(), memory.copies().begin(), memory.copies().end());
  return results;
}

std::vector<Tensor> attention_forward_plan(const Tensor& q, const Tensor& k, const Tensor& v,
                                           int64_t architecture, int64_t multiprocessors,
                                           ATTN_OPTION_PARAMETERS) {
  const cuda::Target target = as_wished({int(architecture), int(multiprocessors)});
  const Forward call(q, k, v, ATTN_OPTIONS, target);
  const auto buffers =
      cuda::forward_buffers(call.problem, call.result.views, call.workspace.data_ptr(), target);
  return described(to_json(call.plan, buffers), {call.result.out, call.result.lse, call.result.lse_parts},
                   call.workspace, call.memory);
}

std::vector<Tensor> attention_backward_plan(const Tensor& grad_out, const OptionalTensor& grad_lse,
                                            const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& out, const Tensor& lse_parts, int64_t output_mask,
                                            int64_t architecture, int64_t multiprocessors,
                                            ATTN_OPTION_PARAMETERS) {
  const cuda::Target target = as_wished({int(architecture), int(multiprocessors)});
  const Backward call(grad_out, grad_lse, q, k, v, out, lse_parts, ATTN_OPTIONS, output_mask, target);
  const auto buffers =
      cuda::backward_buffers(call.problem, call.result.views, call.workspace.data_ptr(), target);
  const BackwardResult& r = call.result;
  return described(
      to_json(call.plan, buffers),
      {r.grad_q, r.grad_k, r.grad_v, r.grad_bias, r.grad_float_mask, r.grad_alibi_slopes, r.grad_sinks},
      call.workspace, call.memory);
}

std::vector<Tensor> attention_jvp_plan(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                                       const Tensor& lse_parts, ATTN_TANGENT_PARAMETERS, int64_t architecture,
                                       int64_t multiprocessors, ATTN_OPTION_PARAMETERS) {
  const Jvp call(q, k, v, out, lse_parts, ATTN_TANGENTS, ATTN_OPTIONS,
                 as_wished({int(architecture), int(multiprocessors)}));
  return described(to_json(call.plan, cuda::jvp_buffers(call.problem, call.result.views)),
                   {call.result.tangent_out, call.result.tangent_lse}, std::nullopt, call.memory);
}

STABLE_TORCH_LIBRARY_IMPL(attn_ext, CUDA, m) {
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_forward_plain", TORCH_BOX(&plain_forward));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("attention_backward_plain", TORCH_BOX(&plain_backward));
  m.impl("attention_jvp", TORCH_BOX(&attention_jvp));
  m.impl("attention_forward_plan", TORCH_BOX(&attention_forward_plan));
  m.impl("attention_backward_plan", TORCH_BOX(&attention_backward_plan));
  m.impl("attention_jvp_plan", TORCH_BOX(&attention_jvp_plan));
}

STABLE_TORCH_LIBRARY_IMPL(attn_ext, CPU, m) {
  m.impl("attention_forward_plan", TORCH_BOX(&attention_forward_plan));
  m.impl("attention_backward_plan", TORCH_BOX(&attention_backward_plan));
  m.impl("attention_jvp_plan", TORCH_BOX(&attention_jvp_plan));
}

}  // namespace
}  // namespace attn_ext
