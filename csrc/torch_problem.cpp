#include "torch_problem.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <utility>

namespace attn_ext {
namespace {

// Tensor::scalar_type() in our terms, without its search through every dtype that torch has.
DType dtype_of(const Tensor& t, const char* name) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  if (dtype == aoti_torch_dtype_float32()) return DType::kFloat32;
  if (dtype == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  if (dtype == aoti_torch_dtype_float16()) return DType::kFloat16;
  if (dtype == aoti_torch_dtype_float64()) return DType::kFloat64;
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_bool(), "attn_ext: ", name,
                  " has a dtype that is not float64, float32, float16, bfloat16 or bool");
  return DType::kBool;
}

bool is_shape(Extents sizes, std::initializer_list<int64_t> expected) {
  return std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end());
}

// The dtype of what is summed over many scores: LSEs, gradients of broadcast terms.
ScalarType sum_dtype(const AttentionParams& p) {
  return p.q.dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float;
}

bool additive_dtype(DType term, DType q) {
  const bool half = q == DType::kFloat16 || q == DType::kBFloat16;
  return term == q || (half && term == DType::kFloat32);
}

constexpr int64_t kAlignment = 16;  // bytes

bool is_aligned(const StridedView& view) {
  if (reinterpret_cast<uintptr_t>(view.data) % kAlignment != 0) return false;
  for (int axis = 0; axis < 3; axis++) {
    if (view.stride[axis] * size_of(view.dtype) % kAlignment != 0) return false;
  }
  return true;
}

}  // namespace

Memory::Memory(const Tensor& q) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(q.get(), &device_type_));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(q.get(), &device_index_));
}

void Memory::check_device(const Tensor& t, const char* name) const {
  int32_t type = 0, index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &index));
  STD_TORCH_CHECK(type == device_type_ && index == device_index_, "attn_ext: ", name,
                  " must be on the device of q");
}

StridedView Memory::rows(const Tensor& t, const char* name, bool aligned) {
  const Extents size = t.sizes();
  STD_TORCH_CHECK(size.size() == 4, "attn_ext: ", name, " must be 4-D");
  StridedView view = strided(t, name);
  const bool packed = size[3] <= 1 || view.stride[3] == 1;
  view.stride[3] = 1;
  if (packed && !(aligned && !is_aligned(view))) return view;
  const int64_t piece = aligned ? kAlignment / size_of(view.dtype) : 1;
  Tensor copy = empty_rows(size, view, t.scalar_type(), (size[3] + piece - 1) / piece * piece);
  torch::stable::copy_(copy, t);
  view = strided(copies_.emplace_back(std::move(copy)), name);
  view.stride[3] = 1;
  return view;
}

StridedView Memory::score_term(const OptionalTensor& t, const AttentionParams& p, bool is_bool,
                               const char* name) {
  if (!t.has_value()) return {};
  const int64_t full[4] = {p.batch, p.heads_q, p.len_q, p.len_k};
  const Extents size = t->sizes();
  STD_TORCH_CHECK(size.size() == 4, "attn_ext: ", name, " must be 4-D");
  for (int64_t axis = 0; axis < 4; axis++) {
    STD_TORCH_CHECK(size[axis] == full[axis] || size[axis] == 1, "attn_ext: axis ", axis, " of ", name,
                    " has size ", size[axis], ", must be 1 or ", full[axis]);
  }
  const StridedView view = strided(*t, name);
  STD_TORCH_CHECK(is_bool ? view.dtype == DType::kBool : additive_dtype(view.dtype, p.q.dtype),
                  "attn_ext: dtype of ", name, " does not fit q");
  return view;
}

StridedView Memory::saved_lse_parts(const Tensor& t, const AttentionParams& p) {
  STD_TORCH_CHECK(is_shape(t.sizes(), {p.batch, p.heads_q, p.len_q, 2}),
                  "attn_ext: lse_parts must have the shape that forward returned");
  const StridedView view = rows(t, "lse_parts");
  STD_TORCH_CHECK(view.dtype == (p.q.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32),
                  "attn_ext: lse_parts must have lse's dtype");
  return view;
}

StridedView Memory::per_head(const OptionalTensor& t, const AttentionParams& p, bool batched,
                             const char* name) {
  if (!t.has_value()) return {};
  const bool per_batch = batched && is_shape(t->sizes(), {p.batch, p.heads_q});
  STD_TORCH_CHECK(per_batch || is_shape(t->sizes(), {p.heads_q}), "attn_ext: shape of ", name,
                  " does not fit q");
  StridedView view = strided(*t, name);
  STD_TORCH_CHECK(additive_dtype(view.dtype, p.q.dtype), "attn_ext: dtype of ", name, " does not fit q");
  if (!per_batch) {
    view.stride[1] = view.stride[0];
    view.stride[0] = 0;
  }
  return view;
}

const int64_t* Memory::integers(const OptionalTensor& t, int64_t count, const char* name) {
  if (!t.has_value()) return nullptr;
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Long && is_shape(t->sizes(), {count}), "attn_ext: ", name,
                  " must be an int64 tensor of ", count, " elements");
  check_device(*t, name);
  return static_cast<const int64_t*>(copies_.emplace_back(torch::stable::contiguous(*t)).data_ptr());
}

BlockMask Memory::block_mask(const OptionalTensor& map, const OptionalTensor& tiles,
                             const AttentionParams& p) {
  STD_TORCH_CHECK(map.has_value() == tiles.has_value(),
                  "attn_ext: block_map and block_tiles must be given together");
  if (!map.has_value()) return {};
  constexpr int64_t kSize = BlockMask::kSize;
  const int64_t full[4] = {p.batch, p.heads_q, (p.len_q + kSize - 1) / kSize, (p.len_k + kSize - 1) / kSize};
  const Extents size = map->sizes();
  STD_TORCH_CHECK(map->scalar_type() == ScalarType::Int && size.size() == 4,
                  "attn_ext: block_map must be a 4-D int32 tensor");
  for (size_t axis = 0; axis < 4; axis++) {
    STD_TORCH_CHECK(size[axis] == full[axis] || (axis < 2 && size[axis] == 1), "attn_ext: axis ", axis,
                    " of block_map has size ", size[axis], ", must be ", full[axis]);
  }
  const Extents tile_size = tiles->sizes();
  STD_TORCH_CHECK(tiles->scalar_type() == ScalarType::Long && tile_size.size() == 2 && tile_size[0] >= 2 &&
                      tile_size[0] <= std::numeric_limits<int32_t>::max() && tile_size[1] == kSize,
                  "attn_ext: block_tiles must be an int64 tensor (at least 2, ", kSize, ")");
  check_device(*map, "block_map");
  check_device(*tiles, "block_tiles");
  BlockMask mask;
  mask.map = static_cast<const int32_t*>(copies_.emplace_back(torch::stable::contiguous(*map)).data_ptr());
  mask.tiles =
      static_cast<const uint64_t*>(copies_.emplace_back(torch::stable::contiguous(*tiles)).data_ptr());
  mask.key_blocks = int32_t(full[3]);
  mask.tile_count = int32_t(tile_size[0]);
  mask.stride[1] = size[1] == 1 ? 0 : full[2] * full[3];
  mask.stride[0] = size[0] == 1 ? 0 : size[1] * full[2] * full[3];
  return mask;
}

StridedView Memory::strided(const Tensor& t, const char* name) {
  check_device(t, name);
  const Extents size = t.sizes(), stride = t.strides();
  StridedView view;
  view.data = t.data_ptr();
  view.dtype = dtype_of(t, name);
  view.present = true;
  for (size_t axis = 0; axis < size.size(); axis++) view.stride[axis] = size[axis] <= 1 ? 0 : stride[axis];
  return view;
}

// The C function behind these allocates directly; torch::stable::empty looks aten::empty up by name, which a small call
// feels.
Tensor Memory::empty(Extents size, Extents stride, ScalarType dtype) const {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(int64_t(size.size()), size.data(), stride.data(),
                               torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                               device_type_, device_index_, &handle));
  return Tensor(handle);
}

Tensor Memory::empty(Extents size, ScalarType dtype) const {
  int64_t stride[4] = {1, 1, 1, 1};
  for (size_t axis = size.size(); axis-- > 1;) {
    stride[axis - 1] = stride[axis] * std::max<int64_t>(size[axis], 1);
  }
  return empty(size, Extents(stride, size.size()), dtype);
}

Tensor Memory::empty_rows(Extents size, const StridedView& like, ScalarType dtype, int64_t pitch) const {
  int64_t key[3], outside = std::numeric_limits<int64_t>::max();
  for (int axis = 0; axis < 3; axis++)
    key[axis] = outside = like.stride[axis] == 0 ? outside : like.stride[axis];
  int order[3] = {0, 1, 2};  // outermost first
  for (const int i : {0, 1, 0}) {
    if (key[order[i]] < key[order[i + 1]]) std::swap(order[i], order[i + 1]);
  }
  int64_t stride[4] = {0, 0, 0, 1}, step = std::max<int64_t>(pitch, 1);
  for (int i = 2; i >= 0; i--) {
    stride[order[i]] = step;
    step *= std::max<int64_t>(size[size_t(order[i])], 1);
  }
  return empty(size, Extents(stride, 4), dtype);
}

AttentionParams make_params(Memory& memory, const Tensor& q, const Tensor& k, const Tensor& v,
                            ATTN_OPTION_PARAMETERS, bool (*aligned_rows)(const AttentionParams&)) {
  AttentionParams p;
  const Extents q_size = q.sizes(), k_size = k.sizes(), v_size = v.sizes();
  STD_TORCH_CHECK(q_size.size() == 4 && k_size.size() == 4 && v_size.size() == 4,
                  "attn_ext: q, k and v must be 4-D");
  p.q.dtype = dtype_of(q, "q");
  p.batch = q_size[0];
  p.heads_q = q_size[1];
  p.len_q = q_size[2];
  p.dim_qk = q_size[3];
  p.heads_kv = k_size[1];
  p.len_k = k_size[2];
  p.dim_v = v_size[3];
  const bool aligned = aligned_rows != nullptr && aligned_rows(p);
  p.q = memory.rows(q, "q", aligned);
  p.k = memory.rows(k, "k", aligned);
  p.v = memory.rows(v, "v", aligned);
  STD_TORCH_CHECK(p.q.dtype != DType::kBool && p.k.dtype == p.q.dtype && p.v.dtype == p.q.dtype,
                  "attn_ext: q, k and v must have one floating dtype");
  STD_TORCH_CHECK(is_shape(k_size, {p.batch, p.heads_kv, p.len_k, p.dim_qk}),
                  "attn_ext: batch or head_dim of k does not fit q");
  STD_TORCH_CHECK(is_shape(v_size, {p.batch, p.heads_kv, p.len_k, p.dim_v}),
                  "attn_ext: batch, heads or length of v does not fit k");
  STD_TORCH_CHECK(p.heads_q == 0 || (p.heads_kv > 0 && p.heads_q % p.heads_kv == 0), "attn_ext: ", p.heads_q,
                  " query heads are no multiple of ", p.heads_kv, " key heads");
  p.bias = memory.score_term(bias, p, false, "bias");
  p.float_mask = memory.score_term(float_mask, p, false, "float_mask");
  p.bool_mask = memory.score_term(bool_mask, p, true, "bool_mask");
  p.block_mask = memory.block_mask(block_map, block_tiles, p);
  p.alibi_slopes = memory.per_head(alibi_slopes, p, true, "alibi_slopes");
  p.sinks = memory.per_head(sinks, p, false, "sinks");
  p.key_lengths = memory.integers(key_lengths, p.batch, "key_lengths");
  p.query_lengths = memory.integers(query_lengths, p.batch, "query_lengths");
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
    p.dropout.rng_state = memory.integers(rng_state, 2, "rng_state");
  }
  p.allow_tf32 = allow_tf32;
  return p;
}

ForwardResult allocate_forward(Memory& memory, const AttentionParams& p, const Tensor& q, bool want_lse) {
  ForwardResult r{memory.empty_rows({p.batch, p.heads_q, p.len_q, p.dim_v}, p.q, q.scalar_type(), p.dim_v),
                  want_lse ? memory.empty({p.batch, p.heads_q, p.len_q}, sum_dtype(p)) : Tensor(),
                  memory.empty({p.batch, p.heads_q, p.len_q, 2}, sum_dtype(p)),
                  {}};
  r.views.out = memory.rows(r.out, "out");
  if (want_lse) r.views.lse = memory.strided(r.lse, "lse");
  r.views.lse_parts = memory.rows(r.lse_parts, "lse_parts");
  return r;
}

// What a forward returned, given back to a derivative.
static void view_saved(Memory& memory, const AttentionParams& p, const Tensor& out, const Tensor& lse_parts,
                       StridedView& out_view, StridedView& lse_parts_view) {
  STD_TORCH_CHECK(is_shape(out.sizes(), {p.batch, p.heads_q, p.len_q, p.dim_v}),
                  "attn_ext: out must have the shape that forward returned");
  out_view = memory.rows(out, "out");
  STD_TORCH_CHECK(out_view.dtype == p.q.dtype, "attn_ext: out must have q's dtype");
  lse_parts_view = memory.saved_lse_parts(lse_parts, p);
}

BackwardResult allocate_backward(Memory& memory, const AttentionParams& p, const Tensor& grad_out,
                                 const OptionalTensor& grad_lse, const Tensor& q, const Tensor& out,
                                 const Tensor& lse_parts, const OptionalTensor& bias,
                                 const OptionalTensor& float_mask, const OptionalTensor& alibi_slopes,
                                 const OptionalTensor& sinks, int64_t output_mask, BackwardMemory needs) {
  BackwardIO io;
  view_saved(memory, p, out, lse_parts, io.out, io.lse_parts);
  STD_TORCH_CHECK(is_shape(grad_out.sizes(), {p.batch, p.heads_q, p.len_q, p.dim_v}) &&
                      (!grad_lse || is_shape(grad_lse->sizes(), {p.batch, p.heads_q, p.len_q})),
                  "attn_ext: grad_out and grad_lse must have the shapes of out and lse");
  io.grad_out = memory.rows(grad_out, "grad_out", needs.aligned_grad_out);
  if (grad_lse) io.grad_lse = memory.strided(*grad_lse, "grad_lse");
  STD_TORCH_CHECK(io.grad_out.dtype == io.out.dtype && (!grad_lse || io.grad_lse.dtype == io.lse_parts.dtype),
                  "attn_ext: grad_out must have q's dtype, grad_lse have lse's");

  const ScalarType dtype = q.scalar_type();
  // A gradient that is not wanted has no elements, and is a tensor of its own: an op's results may not alias.
  const auto of_rows = [&](Gradient bit, const StridedView& like, int64_t heads, int64_t length, int64_t dim,
                           StridedView& view) {
    if (!(output_mask & bit)) return memory.empty({0}, dtype);
    Tensor grad = memory.empty_rows({p.batch, heads, length, dim}, like, dtype, dim);
    view = memory.rows(grad, "gradient");
    return grad;
  };
  // The gradient of an optional tensor: contiguous, in its shape.
  const auto of_optional = [&](Gradient bit, const OptionalTensor& t, ScalarType grad_dtype,
                               StridedView& view) {
    if (!(output_mask & bit)) return needs.terms ? memory.empty({0}, dtype) : Tensor();
    STD_TORCH_CHECK(t.has_value(),
                    "attn_ext: output_mask asks for the gradient of a tensor that was not given");
    Tensor grad = memory.empty(t->sizes(), grad_dtype);
    view = memory.strided(grad, "gradient");
    return grad;
  };
  // Where many scores add up to one element, in float32; the caller's dtype comes at the end.
  const auto of_term = [&](Gradient bit, const OptionalTensor& t, StridedView& view) {
    const bool one_score =
        t && is_shape(t->sizes(), {p.batch, p.heads_q, p.len_q, p.len_k}) && !needs.single_bias;
    return of_optional(bit, t, one_score ? t->scalar_type() : sum_dtype(p), view);
  };
  BackwardResult r{of_rows(kQ, p.q, p.heads_q, p.len_q, p.dim_qk, io.grad_q),
                   of_rows(kK, p.k, p.heads_kv, p.len_k, p.dim_qk, io.grad_k),
                   of_rows(kV, p.v, p.heads_kv, p.len_k, p.dim_v, io.grad_v),
                   of_term(kBias, bias, io.grad_bias),
                   of_term(kFloatMask, float_mask, io.grad_float_mask),
                   of_optional(kAlibiSlopes, alibi_slopes, alibi_slopes ? alibi_slopes->scalar_type() : dtype,
                               io.grad_alibi_slopes),
                   of_optional(kSinks, sinks, sinks ? sinks->scalar_type() : dtype, io.grad_sinks),
                   {}};
  if (bias) std::copy_n(bias->sizes().begin(), 4, io.bias_size);
  if (float_mask) std::copy_n(float_mask->sizes().begin(), 4, io.float_mask_size);
  if (io.grad_alibi_slopes.present) {
    io.alibi_batch = alibi_slopes->dim() == 2 ? p.batch : 1;
    io.grad_alibi_slopes.stride[0] = alibi_slopes->dim() == 2 ? p.heads_q : 0;
    io.grad_alibi_slopes.stride[1] = 1;
  }
  if (io.grad_sinks.present) io.grad_sinks.stride[1] = 1;
  r.views = io;
  return r;
}

BackwardResult::Tensors BackwardResult::rounded(const OptionalTensor& bias,
                                                const OptionalTensor& float_mask) && {
  if (views.grad_bias.present) grad_bias = torch::stable::to(grad_bias, bias->scalar_type());
  if (views.grad_float_mask.present)
    grad_float_mask = torch::stable::to(grad_float_mask, float_mask->scalar_type());
  return {std::move(grad_q),    std::move(grad_k),          std::move(grad_v),
          std::move(grad_bias), std::move(grad_float_mask), std::move(grad_alibi_slopes),
          std::move(grad_sinks)};
}

JvpResult allocate_jvp(Memory& memory, const AttentionParams& p, const Tensor& q, const Tensor& out,
                       const Tensor& lse_parts, const Tangents& tangents, bool aligned_rows) {
  JvpIO io;
  view_saved(memory, p, out, lse_parts, io.out, io.lse_parts);
  const auto of_rows = [&](const OptionalTensor& t, int64_t heads, int64_t length, int64_t dim,
                           const char* name) {
    if (!t.has_value()) return StridedView{};
    STD_TORCH_CHECK(is_shape(t->sizes(), {p.batch, heads, length, dim}), "attn_ext: shape of ", name,
                    " does not fit q, k and v");
    const StridedView view = memory.rows(*t, name, aligned_rows);
    STD_TORCH_CHECK(view.dtype == p.q.dtype, "attn_ext: ", name, " must have q's dtype");
    return view;
  };
  io.tangent_q = of_rows(tangents.q, p.heads_q, p.len_q, p.dim_qk, "tangent_q");
  io.tangent_k = of_rows(tangents.k, p.heads_kv, p.len_k, p.dim_qk, "tangent_k");
  io.tangent_v = of_rows(tangents.v, p.heads_kv, p.len_k, p.dim_v, "tangent_v");
  io.tangent_bias = memory.score_term(tangents.bias, p, false, "tangent_bias");
  io.tangent_float_mask = memory.score_term(tangents.float_mask, p, false, "tangent_float_mask");
  io.tangent_alibi_slopes = memory.per_head(tangents.alibi_slopes, p, true, "tangent_alibi_slopes");
  io.tangent_sinks = memory.per_head(tangents.sinks, p, false, "tangent_sinks");
  STD_TORCH_CHECK((!tangents.bias || p.bias.present) && (!tangents.float_mask || p.float_mask.present) &&
                      (!tangents.alibi_slopes || p.alibi_slopes.present) &&
                      (!tangents.sinks || p.sinks.present),
                  "attn_ext: a tangent belongs to a tensor that was not given");
  JvpResult r{memory.empty_rows({p.batch, p.heads_q, p.len_q, p.dim_v}, p.q, q.scalar_type(), p.dim_v),
              memory.empty({p.batch, p.heads_q, p.len_q}, sum_dtype(p)),
              {}};
  io.tangent_out = memory.rows(r.tangent_out, "tangent_out");
  io.tangent_lse = memory.strided(r.tangent_lse, "tangent_lse");
  r.views = io;
  return r;
}

}  // namespace attn_ext
