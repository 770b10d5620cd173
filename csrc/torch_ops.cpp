// torch.ops.attn_ext.*: schemas, and the implementations for CPU tensors.
//
// Written against libtorch's stable ABI: nothing here but torch/csrc/stable and torch/headeronly, so that one build
// runs under every torch from 2.10 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <utility>

#include "cpu/kernels.h"
#include "torch_problem.h"

namespace attn_ext {
namespace {

// torch's intra-op threads.
Threads torch_threads() {
  Threads threads;
  threads.count = torch::stable::get_num_threads();
  threads.run = [](int64_t n, void (*body)(void*, int64_t), void* context) {
    torch::stable::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; worker++) body(context, worker);
    });
  };
  return threads;
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                     ATTN_OPTION_PARAMETERS) {
  Memory memory(q);
  const AttentionParams p = make_params(memory, q, k, v, ATTN_OPTIONS);
  ForwardResult result = allocate_forward(memory, p, q);
  cpu_kernels().forward(p, result.views, torch_threads());
  return {std::move(result.out), std::move(result.lse), std::move(result.lse_parts)};
}

std::tuple<Tensor, Tensor> plain_forward(const Tensor& q, const Tensor& k, const Tensor& v, double scale,
                                         int64_t causal) {
  Memory memory(q);
  const AttentionParams p = make_params(memory, q, k, v, ATTN_PLAIN_OPTIONS);
  ForwardResult result = allocate_forward(memory, p, q, /* want_lse */ false);
  cpu_kernels().forward(p, result.views, torch_threads());
  return {std::move(result.out), std::move(result.lse_parts)};
}

BackwardResult::Tensors attention_backward(const Tensor& grad_out, const OptionalTensor& grad_lse,
                                           const Tensor& q, const Tensor& k, const Tensor& v,
                                           const Tensor& out, const Tensor& lse_parts, int64_t output_mask,
                                           ATTN_OPTION_PARAMETERS) {
  Memory memory(q);
  const AttentionParams p = make_params(memory, q, k, v, ATTN_OPTIONS);
  BackwardResult result = allocate_backward(memory, p, grad_out, grad_lse, q, out, lse_parts, bias,
                                            float_mask, alibi_slopes, sinks, output_mask, {});
  const Tensor workspace = memory.empty({backward_workspace_bytes(p)}, ScalarType::Byte);
  result.views.workspace = workspace.data_ptr();
  cpu_kernels().backward(p, result.views, torch_threads());
  return std::move(result).rounded(bias, float_mask);
}

std::tuple<Tensor, Tensor, Tensor> plain_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                  const Tensor& v, const Tensor& out, const Tensor& lse_parts,
                                                  int64_t output_mask, double scale, int64_t causal) {
  Memory memory(q);
  const AttentionParams p = make_params(memory, q, k, v, ATTN_PLAIN_OPTIONS);
  BackwardMemory needs;
  needs.terms = false;
  BackwardResult result = allocate_backward(memory, p, grad_out, {}, q, out, lse_parts, {}, {}, {}, {},
                                            output_mask & (kQ | kK | kV), needs);
  const Tensor workspace = memory.empty({backward_workspace_bytes(p)}, ScalarType::Byte);
  result.views.workspace = workspace.data_ptr();
  cpu_kernels().backward(p, result.views, torch_threads());
  return {std::move(result.grad_q), std::move(result.grad_k), std::move(result.grad_v)};
}

std::tuple<Tensor, Tensor> attention_jvp(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                                         const Tensor& lse_parts, ATTN_TANGENT_PARAMETERS,
                                         ATTN_OPTION_PARAMETERS) {
  Memory memory(q);
  const AttentionParams p = make_params(memory, q, k, v, ATTN_OPTIONS);
  JvpResult result = allocate_jvp(memory, p, q, out, lse_parts, ATTN_TANGENTS);
  cpu_kernels().jvp(p, result.views, torch_threads());
  return {std::move(result.tangent_out), std::move(result.tangent_lse)};
}

STABLE_TORCH_LIBRARY(attn_ext, m) {
  m.def("attention_forward(Tensor q, Tensor k, Tensor v, " ATTN_OPTION_SCHEMA
        ") -> (Tensor out, Tensor lse, Tensor lse_parts)");
  // This and the next "plain" one: the same for small calls, which feel each argument and each result.
  m.def(
      "attention_forward.plain(Tensor q, Tensor k, Tensor v, float scale, int causal) "
      "-> (Tensor out, Tensor lse_parts)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse_parts, int output_mask, " ATTN_OPTION_SCHEMA
      ") -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias, Tensor "
      "grad_float_mask, Tensor grad_alibi_slopes, Tensor grad_sinks)");
  m.def(
      "attention_backward.plain(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse_parts, "
      "int output_mask, float scale, int causal) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)");
  m.def(
      "attention_jvp(Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
      "lse_parts, " ATTN_TANGENT_SCHEMA ATTN_OPTION_SCHEMA ") -> (Tensor tangent_out, Tensor tangent_lse)");
  // What the three would launch on a GPU (torch_cuda.cpp): the plan as JSON bytes, the results, the
  // workspace, and copies that had to be made.
  m.def(
      "attention_forward_plan(Tensor q, Tensor k, Tensor v, int architecture, int "
      "multiprocessors, " ATTN_OPTION_SCHEMA ") -> Tensor[]");
  m.def(
      "attention_backward_plan(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse_parts, int output_mask, int architecture, int multiprocessors, " ATTN_OPTION_SCHEMA
      ") -> Tensor[]");
  m.def("attention_jvp_plan(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse_parts, " ATTN_TANGENT_SCHEMA
        "int architecture, int multiprocessors, " ATTN_OPTION_SCHEMA ") -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(attn_ext, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_forward.plain", TORCH_BOX(&plain_forward));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("attention_backward.plain", TORCH_BOX(&plain_backward));
  m.impl("attention_jvp", TORCH_BOX(&attention_jvp));
}

}  // namespace
}  // namespace attn_ext
