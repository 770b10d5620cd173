// torch.ops.attn_ext.*: schemas, and the implementations for CPU tensors.
//
// Written against libtorch's stable ABI: nothing here but torch/csrc/stable and torch/headeronly, so that one build
// runs under every torch from 2.10 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
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

void run_backward(const Memory& memory, const AttentionParams& p, BackwardIO& io) {
  const Tensor workspace = memory.empty({backward_workspace_bytes(p)}, ScalarType::Byte);
  io.workspace = workspace.data_ptr();
  cpu_kernels().backward(p, io, torch_threads());
}

BackwardResult::Tensors attention_backward(const Tensor& grad_out, const OptionalTensor& grad_lse,
                                           const Tensor& q, const Tensor& k, const Tensor& v,
                                           const Tensor& out, const Tensor& lse_parts, int64_t output_mask,
                                           ATTN_OPTION_PARAMETERS) {
  Memory memory(q);
  const AttentionParams p = make_params(memory, q, k, v, ATTN_OPTIONS);
  BackwardResult result = allocate_backward(memory, p, grad_out, grad_lse, q, out, lse_parts, bias,
                                            float_mask, alibi_slopes, sinks, output_mask, {});
  run_backward(memory, p, result.views);
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
  run_backward(memory, p, result.views);
  return {std::move(result.grad_q), std::move(result.grad_k), std::move(result.grad_v)};
}

// The probabilities, or their mean over heads: dlse[i] / dbias[i][j] = P[i][j], so they are the gradient of a bias of
// zeros. It, the values and what comes of them take one 0 of memory, through strides of 0.
Tensor attention_weights(const Tensor& q, const Tensor& k, const Tensor& lse_parts, double scale,
                         int64_t causal, bool mean_heads) {
  Memory memory(q);
  AttentionParams p = make_params(memory, q, k, k, ATTN_PLAIN_OPTIONS);
  double zero = 0;
  StridedView zeros;
  zeros.data = &zero;
  zeros.dtype = p.q.dtype;
  zeros.present = true;
  p.v = p.bias = zeros;
  p.dim_v = 1;

  BackwardIO io;
  io.out = io.grad_out = zeros;
  io.lse_parts = memory.saved_lse_parts(lse_parts, p);
  const bool is_double = p.q.dtype == DType::kFloat64;
  const double share = mean_heads ? 1.0 / double(std::max<int64_t>(p.heads_q, 1)) : 1.0;
  float share_in_float = float(share);
  io.grad_lse = zeros;
  io.grad_lse.dtype = is_double ? DType::kFloat64 : DType::kFloat32;
  io.grad_lse.data = is_double ? static_cast<void*>(const_cast<double*>(&share)) : &share_in_float;

  const int64_t heads = mean_heads ? 1 : p.heads_q;
  Tensor weights = memory.empty({p.batch, heads, p.len_q, p.len_k},
                                mean_heads && !is_double ? ScalarType::Float : q.scalar_type());
  io.grad_bias = memory.strided(weights, "weights");
  const int64_t size[4] = {p.batch, heads, p.len_q, p.len_k};
  std::copy_n(size, 4, io.bias_size);
  run_backward(memory, p, io);
  return torch::stable::to(weights, q.scalar_type());
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
      "attention_forward_plain(Tensor q, Tensor k, Tensor v, float scale, int causal) "
      "-> (Tensor out, Tensor lse_parts)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse_parts, int output_mask, " ATTN_OPTION_SCHEMA
      ") -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias, Tensor "
      "grad_float_mask, Tensor grad_alibi_slopes, Tensor grad_sinks)");
  m.def(
      "attention_backward_plain(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse_parts, "
      "int output_mask, float scale, int causal) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)");
  m.def(
      "attention_jvp(Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
      "lse_parts, " ATTN_TANGENT_SCHEMA ATTN_OPTION_SCHEMA ") -> (Tensor tangent_out, Tensor tangent_lse)");
  m.def(
      "attention_weights(Tensor q, Tensor k, Tensor lse_parts, float scale, int causal, bool mean_heads) "
      "-> Tensor");
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
  m.impl("attention_forward_plain", TORCH_BOX(&plain_forward));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("attention_backward_plain", TORCH_BOX(&plain_backward));
  m.impl("attention_jvp", TORCH_BOX(&attention_jvp));
  m.impl("attention_weights", TORCH_BOX(&attention_weights));
}

}  // namespace
}  // namespace attn_ext
