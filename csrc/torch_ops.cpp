// torch.ops.attn_ext.*: schemas, and the CPU implementations that turn tensors into AttentionParams.
//
// Written against libtorch's stable ABI: nothing here but torch/csrc/stable and torch/headeronly, so that one build
// runs under every torch from 2.10 on. attn_ext/functional.py says what a user did wrong, in Python exceptions; the
// checks here only keep memory safe for whoever calls the raw ops.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <vector>

#include "attention_params.h"
#include "cpu/kernels.h"

namespace attn_ext {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// What both ops take after q, k, v: the optional tensors and the score options, in schema order.
#define ATTN_OPTION_PARAMETERS                                                                           \
  OptionalTensor bias, OptionalTensor float_mask, OptionalTensor bool_mask, OptionalTensor alibi_slopes, \
      OptionalTensor sinks, OptionalTensor key_lengths, OptionalTensor query_lengths,                    \
      OptionalTensor rng_state, double scale, double softcap, int64_t causal, int64_t window_left,       \
      int64_t window_right, double dropout_p
#define ATTN_OPTIONS                                                                                       \
  bias, float_mask, bool_mask, alibi_slopes, sinks, key_lengths, query_lengths, rng_state, scale, softcap, \
      causal, window_left, window_right, dropout_p

DType dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Double: return DType::kFloat64;
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Bool: return DType::kBool;
    default:
      STD_TORCH_CHECK(false, "attn_ext: ", name,
                      " has a dtype that is not float64, float32, float16, bfloat16 or bool");
  }
  return DType::kFloat32;
}

bool shape_is(const Tensor& t, std::initializer_list<int64_t> sizes) {
  if (t.dim() != int64_t(sizes.size())) return false;
  int64_t axis = 0;
  for (const int64_t size : sizes) {
    if (t.size(axis++) != size) return false;
  }
  return true;
}

// Tensors that a view points into. Copies made here (last stride not 1) must live as long as the call.
class Views {
 public:
  // (B, H, N, D) with last stride 1, copied if need be.
  StridedView rows(Tensor t, const char* name) {
    STD_TORCH_CHECK(t.is_cpu() && t.dim() == 4, "attn_ext: ", name, " must be a 4-D CPU tensor");
    if (t.size(3) > 1 && t.stride(3) != 1) t = torch::stable::contiguous(t);
    StridedView view = strided(t, name);
    view.stride[3] = 1;
    return view;
  }

  // A 4-D tensor that broadcasts to (B, Hq, Nq, Nk).
  StridedView score_term(const OptionalTensor& t, const AttentionParams& p, bool is_bool, const char* name) {
    if (!t.has_value()) return {};
    const int64_t full[4] = {p.batch, p.heads_q, p.len_q, p.len_k};
    STD_TORCH_CHECK(t->is_cpu() && t->dim() == 4, "attn_ext: ", name, " must be a 4-D CPU tensor");
    for (int64_t axis = 0; axis < 4; axis++) {
      STD_TORCH_CHECK(t->size(axis) == full[axis] || t->size(axis) == 1, "attn_ext: axis ", axis, " of ",
                      name, " has size ", t->size(axis), ", must be 1 or ", full[axis]);
    }
    const StridedView view = strided(*t, name);
    STD_TORCH_CHECK(is_bool ? view.dtype == DType::kBool : additive_dtype(view.dtype, p.q.dtype),
                    "attn_ext: dtype of ", name, " does not fit q");
    return view;
  }

  // (Hq,), or (B, Hq) where `batched` allows it, as a view with batch and head strides.
  StridedView per_head(const OptionalTensor& t, const AttentionParams& p, bool batched, const char* name) {
    if (!t.has_value()) return {};
    const bool per_batch = batched && shape_is(*t, {p.batch, p.heads_q});
    STD_TORCH_CHECK(t->is_cpu() && (per_batch || shape_is(*t, {p.heads_q})), "attn_ext: shape of ", name,
                    " does not fit q");
    StridedView view;
    view.data = t->data_ptr();
    view.dtype = dtype_of(*t, name);
    view.present = true;
    view.stride[0] = per_batch ? t->stride(0) : 0;
    view.stride[1] = t->stride(per_batch ? 1 : 0);
    STD_TORCH_CHECK(additive_dtype(view.dtype, p.q.dtype), "attn_ext: dtype of ", name, " does not fit q");
    return view;
  }

  // int64 of `sizes`, contiguous.
  const int64_t* integers(const OptionalTensor& t, int64_t count, const char* name) {
    if (!t.has_value()) return nullptr;
    STD_TORCH_CHECK(t->is_cpu() && t->scalar_type() == ScalarType::Long && shape_is(*t, {count}),
                    "attn_ext: ", name, " must be an int64 CPU tensor of ", count, " elements");
    kept_.push_back(torch::stable::contiguous(*t));
    return static_cast<const int64_t*>(kept_.back().data_ptr());
  }

  // Any tensor of up to four axes, broadcast axes (size 1) with stride 0.
  StridedView strided(const Tensor& t, const char* name) {
    kept_.push_back(t);
    StridedView view;
    view.data = t.data_ptr();
    view.dtype = dtype_of(t, name);
    view.present = true;
    for (int64_t axis = 0; axis < t.dim(); axis++) view.stride[axis] = t.size(axis) == 1 ? 0 : t.stride(axis);
    return view;
  }

 private:
  static bool additive_dtype(DType term, DType q) {
    const bool half = q == DType::kFloat16 || q == DType::kBFloat16;
    return term == q || (half && term == DType::kFloat32);
  }

  std::vector<Tensor> kept_;
};

AttentionParams make_params(Views& views, const Tensor& q, const Tensor& k, const Tensor& v,
                            ATTN_OPTION_PARAMETERS) {
  AttentionParams p;
  p.q = views.rows(q, "q");
  p.k = views.rows(k, "k");
  p.v = views.rows(v, "v");
  p.batch = q.size(0);
  p.heads_q = q.size(1);
  p.len_q = q.size(2);
  p.dim_qk = q.size(3);
  p.heads_kv = k.size(1);
  p.len_k = k.size(2);
  p.dim_v = v.size(3);
  STD_TORCH_CHECK(p.q.dtype != DType::kBool && p.k.dtype == p.q.dtype && p.v.dtype == p.q.dtype,
                  "attn_ext: q, k and v must have one floating dtype");
  STD_TORCH_CHECK(shape_is(k, {p.batch, p.heads_kv, p.len_k, p.dim_qk}),
                  "attn_ext: batch or head_dim of k does not fit q");
  STD_TORCH_CHECK(shape_is(v, {p.batch, p.heads_kv, p.len_k, p.dim_v}),
                  "attn_ext: batch, heads or length of v does not fit k");
  STD_TORCH_CHECK(p.heads_q == 0 || (p.heads_kv > 0 && p.heads_q % p.heads_kv == 0), "attn_ext: ", p.heads_q,
                  " query heads are no multiple of ", p.heads_kv, " key heads");
  p.bias = views.score_term(bias, p, false, "bias");
  p.float_mask = views.score_term(float_mask, p, false, "float_mask");
  p.bool_mask = views.score_term(bool_mask, p, true, "bool_mask");
  p.alibi_slopes = views.per_head(alibi_slopes, p, true, "alibi_slopes");
  p.sinks = views.per_head(sinks, p, false, "sinks");
  p.key_lengths = views.integers(key_lengths, p.batch, "key_lengths");
  p.query_lengths = views.integers(query_lengths, p.batch, "query_lengths");
  STD_TORCH_CHECK(causal >= 0 && causal <= 2, "attn_ext: causal must be 0, 1 or 2");
  p.scale = scale;
  p.softcap = softcap;
  p.causal = static_cast<Causal>(causal);
  p.window_left = window_left;
  p.window_right = window_right;
  STD_TORCH_CHECK(dropout_p >= 0 && dropout_p <= 1, "attn_ext: dropout_p must lie in [0, 1]");
  p.dropout.threshold = uint32_t(std::nearbyint(dropout_p * 65536.0));
  if (p.dropout.threshold != 0) {
    STD_TORCH_CHECK(rng_state.has_value(), "attn_ext: dropout needs rng_state");
    const int64_t* state = views.integers(rng_state, 2, "rng_state");
    // The offset is spread over all bits (2^64 / golden ratio), so that neighbouring offsets give unrelated keys.
    p.dropout.key = uint64_t(state[0]) + uint64_t(state[1]) * 0x9E3779B97F4A7C15ull;
  }
  return p;
}

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

// An uninitialised CPU tensor. The C function behind it allocates directly; torch::stable::empty looks aten::empty up
// by name, which a small call feels.
Tensor empty(const std::vector<int64_t>& size, const std::vector<int64_t>& stride, ScalarType dtype) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(int64_t(size.size()), size.data(), stride.data(),
                               torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                               aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor empty(const std::vector<int64_t>& size, ScalarType dtype) {
  std::vector<int64_t> stride(size.size(), 1);
  for (size_t axis = size.size(); axis-- > 1;) {
    stride[axis - 1] = stride[axis] * std::max<int64_t>(size[axis], 1);
  }
  return empty(size, stride, dtype);
}

// (B, H, N, D) laid out as (B, N, H, D): what the projection before and after attention wants.
Tensor empty_heads(int64_t b, int64_t h, int64_t n, int64_t d, ScalarType dtype) {
  const int64_t row = std::max<int64_t>(d, 1), position = row * std::max<int64_t>(h, 1);
  return empty({b, h, n, d}, {position * std::max<int64_t>(n, 1), row, position, 1}, dtype);
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(Tensor q, Tensor k, Tensor v, ATTN_OPTION_PARAMETERS) {
  Views views;
  const AttentionParams p = make_params(views, q, k, v, ATTN_OPTIONS);
  Tensor out = empty_heads(p.batch, p.heads_q, p.len_q, p.dim_v, q.scalar_type());
  Tensor lse = empty({p.batch, p.heads_q, p.len_q},
                     p.q.dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float);
  ForwardOutput o;
  o.out = views.rows(out, "out");
  o.lse = views.strided(lse, "lse");
  Tensor lse_parts = empty({p.batch, p.heads_q, p.len_q, 2}, lse.scalar_type());
  o.lse_parts = views.rows(lse_parts, "lse_parts");
  cpu_kernels().forward(p, o, torch_threads());
  return {out, lse, lse_parts};
}

// Bits of output_mask, in the order of the results.
enum Gradient { kQ = 1, kK = 2, kV = 4, kBias = 8, kFloatMask = 16, kAlibiSlopes = 32, kSinks = 64 };

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor grad_out, OptionalTensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse_parts,
    ATTN_OPTION_PARAMETERS, int64_t output_mask) {
  Views views;
  const AttentionParams p = make_params(views, q, k, v, ATTN_OPTIONS);
  BackwardIO io;
  STD_TORCH_CHECK(shape_is(grad_out, {p.batch, p.heads_q, p.len_q, p.dim_v}) &&
                      shape_is(out, {p.batch, p.heads_q, p.len_q, p.dim_v}),
                  "attn_ext: grad_out and out must have the shape that forward returned");
  STD_TORCH_CHECK(shape_is(lse_parts, {p.batch, p.heads_q, p.len_q, 2}) &&
                      (!grad_lse || shape_is(*grad_lse, {p.batch, p.heads_q, p.len_q})),
                  "attn_ext: lse_parts and grad_lse must have the shape that forward returned");
  io.grad_out = views.rows(grad_out, "grad_out");
  io.out = views.rows(out, "out");
  io.lse_parts = views.rows(lse_parts, "lse_parts");
  if (grad_lse) io.grad_lse = views.strided(*grad_lse, "grad_lse");
  const DType lse_dtype = p.q.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  STD_TORCH_CHECK(io.grad_out.dtype == p.q.dtype && io.out.dtype == p.q.dtype &&
                      io.lse_parts.dtype == lse_dtype && (!grad_lse || io.grad_lse.dtype == lse_dtype),
                  "attn_ext: grad_out and out must have q's dtype, lse_parts and grad_lse have lse's");

  std::vector<Tensor> grads;  // those that are not wanted have no elements; an op's results may not alias
  for (int n = 0; n < 7; n++) grads.push_back(empty({0}, q.scalar_type()));
  if (output_mask & kQ) {
    grads[0] = empty_heads(p.batch, p.heads_q, p.len_q, p.dim_qk, q.scalar_type());
    io.grad_q = views.rows(grads[0], "grad_q");
  }
  if (output_mask & kK) {
    grads[1] = empty_heads(p.batch, p.heads_kv, p.len_k, p.dim_qk, q.scalar_type());
    io.grad_k = views.rows(grads[1], "grad_k");
  }
  if (output_mask & kV) {
    grads[2] = empty_heads(p.batch, p.heads_kv, p.len_k, p.dim_v, q.scalar_type());
    io.grad_v = views.rows(grads[2], "grad_v");
  }
  // The gradient of an optional tensor: contiguous, in its shape, in the dtype given.
  const auto gradient_of = [&](const OptionalTensor& t, int bit, ScalarType dtype, Tensor& grad,
                               StridedView& view) {
    if (!(output_mask & bit)) return;
    STD_TORCH_CHECK(t.has_value(),
                    "attn_ext: output_mask asks for the gradient of a tensor that was not given");
    std::vector<int64_t> size;
    for (int64_t axis = 0; axis < t->dim(); axis++) size.push_back(t->size(axis));
    grad = empty(size, dtype);
    view = views.strided(grad, "gradient");
  };
  // Where many scores add up to one element, in float32; the caller's dtype comes at the end.
  const ScalarType sum_dtype = p.q.dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float;
  gradient_of(bias, kBias, sum_dtype, grads[3], io.grad_bias);
  gradient_of(float_mask, kFloatMask, sum_dtype, grads[4], io.grad_float_mask);
  for (int64_t axis = 0; axis < 4; axis++) {
    if (bias) io.bias_size[axis] = bias->size(axis);
    if (float_mask) io.float_mask_size[axis] = float_mask->size(axis);
  }
  gradient_of(alibi_slopes, kAlibiSlopes, alibi_slopes ? alibi_slopes->scalar_type() : sum_dtype, grads[5],
              io.grad_alibi_slopes);
  gradient_of(sinks, kSinks, sinks ? sinks->scalar_type() : sum_dtype, grads[6], io.grad_sinks);
  if (alibi_slopes && (output_mask & kAlibiSlopes)) {
    io.alibi_batch = alibi_slopes->dim() == 2 ? p.batch : 1;
    io.grad_alibi_slopes.stride[0] = alibi_slopes->dim() == 2 ? p.heads_q : 0;
    io.grad_alibi_slopes.stride[1] = 1;
  }
  if (sinks) io.grad_sinks.stride[1] = 1;

  const Tensor workspace = empty({backward_workspace_bytes(p)}, ScalarType::Byte);
  io.workspace = workspace.data_ptr();
  cpu_kernels().backward(p, io, torch_threads());
  if (output_mask & kBias) grads[3] = torch::stable::to(grads[3], bias->scalar_type());
  if (output_mask & kFloatMask) grads[4] = torch::stable::to(grads[4], float_mask->scalar_type());
  return {grads[0], grads[1], grads[2], grads[3], grads[4], grads[5], grads[6]};
}

#define ATTN_OPTION_SCHEMA                                                                                  \
  "Tensor? bias, Tensor? float_mask, Tensor? bool_mask, Tensor? alibi_slopes, Tensor? sinks, "              \
  "Tensor? key_lengths, Tensor? query_lengths, Tensor? rng_state, float scale, float softcap, int causal, " \
  "int window_left, int window_right, float dropout_p"

STABLE_TORCH_LIBRARY(attn_ext, m) {
  m.def("attention_forward(Tensor q, Tensor k, Tensor v, " ATTN_OPTION_SCHEMA
        ") -> (Tensor out, Tensor lse, Tensor lse_parts)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse_parts, " ATTN_OPTION_SCHEMA
      ", int output_mask) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias, Tensor "
      "grad_float_mask, "
      "Tensor grad_alibi_slopes, Tensor grad_sinks)");
}

STABLE_TORCH_LIBRARY_IMPL(attn_ext, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace
}  // namespace attn_ext
