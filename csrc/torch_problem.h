// From tensors to the problem that kernels solve, and the tensors that hold its results: what the ops of every device
// share. attn_ext/functional.py says what a user did wrong, in Python exceptions; the checks here only keep memory safe
// for whoever calls the raw ops.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "attention_params.h"

namespace attn_ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Sizes or strides of a tensor, all in one call: each call crosses the stable ABI, and a small problem feels them.
using Extents = torch::headeronly::IntHeaderOnlyArrayRef;

// What both ops take at their end, in schema order: the score options and the optional tensors. What is used most
// comes first and everything has a default, because each argument that a call names costs it a tenth of a microsecond
// or two; a small problem takes ten.
#define ATTN_OPTION_SCHEMA                                                                                \
  "float scale=1.0, int causal=0, float softcap=0.0, int window_left=-1, int window_right=-1, "           \
  "float dropout_p=0.0, Tensor? bias=None, Tensor? float_mask=None, Tensor? bool_mask=None, "             \
  "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? key_lengths=None, Tensor? query_lengths=None, " \
  "Tensor? rng_state=None, Tensor? block_map=None, Tensor? block_tiles=None, bool allow_tf32=False"
#define ATTN_OPTION_PARAMETERS                                                                               \
  double scale, int64_t causal, double softcap, int64_t window_left, int64_t window_right, double dropout_p, \
      const OptionalTensor &bias, const OptionalTensor &float_mask, const OptionalTensor &bool_mask,         \
      const OptionalTensor &alibi_slopes, const OptionalTensor &sinks, const OptionalTensor &key_lengths,    \
      const OptionalTensor &query_lengths, const OptionalTensor &rng_state, const OptionalTensor &block_map, \
      const OptionalTensor &block_tiles, bool allow_tf32
#define ATTN_TANGENT_SCHEMA                                                         \
  "Tensor? tangent_q, Tensor? tangent_k, Tensor? tangent_v, Tensor? tangent_bias, " \
  "Tensor? tangent_float_mask, Tensor? tangent_alibi_slopes, Tensor? tangent_sinks, "
#define ATTN_TANGENT_PARAMETERS                                                                      \
  const OptionalTensor &tangent_q, const OptionalTensor &tangent_k, const OptionalTensor &tangent_v, \
      const OptionalTensor &tangent_bias, const OptionalTensor &tangent_float_mask,                  \
      const OptionalTensor &tangent_alibi_slopes, const OptionalTensor &tangent_sinks
#define ATTN_TANGENTS \
  {tangent_q, tangent_k, tangent_v, tangent_bias, tangent_float_mask, tangent_alibi_slopes, tangent_sinks}
#define ATTN_OPTIONS                                                                                       \
  scale, causal, softcap, window_left, window_right, dropout_p, bias, float_mask, bool_mask, alibi_slopes, \
      sinks, key_lengths, query_lengths, rng_state, block_map, block_tiles, allow_tf32
// Those of a call that names scale and causal alone.
#define ATTN_PLAIN_OPTIONS \
  scale, causal, 0.0, -1, -1, 0.0, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, /* allow_tf32 */ false

// Memory of one call: views of its tensors, checked to lie on one device, and new tensors on it. Copies made here (last
// stride not 1, addresses not aligned) live as long as this object: as long as the call.
class Memory {
 public:
  explicit Memory(const Tensor& q);

  // (B, H, N, D) with last stride 1, copied if need be. `aligned`: in 16-byte pieces, too: base address and strides.
  StridedView rows(const Tensor& t, const char* name, bool aligned = false);

  // A 4-D tensor that broadcasts to (B, Hq, Nq, Nk).
  StridedView score_term(const OptionalTensor& t, const AttentionParams& p, bool is_bool, const char* name);

  // What a forward returned for a derivative.
  StridedView saved_lse_parts(const Tensor& t, const AttentionParams& p);

  // (Hq,), or (B, Hq) where `batched` allows it, as a view with batch and head strides.
  StridedView per_head(const OptionalTensor& t, const AttentionParams& p, bool batched, const char* name);

  // int64 of `count` elements, contiguous.
  const int64_t* integers(const OptionalTensor& t, int64_t count, const char* name);

  // The map, (B or 1, Hq or 1, blocks of Nq, blocks of Nk) int32, and the tiles, (T, 64) int64. Both or none.
  BlockMask block_mask(const OptionalTensor& map, const OptionalTensor& tiles, const AttentionParams& p);

  // Any tensor of up to four axes; those of one element, which broadcast, and those of none have stride 0.
  StridedView strided(const Tensor& t, const char* name);

  // Uninitialised; without strides contiguous, of at most four axes.
  Tensor empty(Extents size, Extents stride, ScalarType dtype) const;
  Tensor empty(Extents size, ScalarType dtype) const;
  // (B, H, N, D) in the memory order of `like`, rows `pitch` elements apart: who gave heads inside positions wants them
  // back so. An axis without a stride (repeated, or of at most one element) goes right inside the axis before it.
  // attn_ext/ops.py has the same rule for tensors without data.
  Tensor empty_rows(Extents size, const StridedView& like, ScalarType dtype, int64_t pitch) const;

  const std::vector<Tensor>& copies() const { return copies_; }

 private:
  void check_device(const Tensor& t, const char* name) const;

  int32_t device_type_ = 0, device_index_ = 0;
  std::vector<Tensor> copies_;
};

// `aligned_rows` decides from sizes and dtype whether q, k and v must be readable in 16-byte pieces; null: never.
AttentionParams make_params(Memory& memory, const Tensor& q, const Tensor& k, const Tensor& v,
                            ATTN_OPTION_PARAMETERS, bool (*aligned_rows)(const AttentionParams&) = nullptr);

struct ForwardResult {
  Tensor out, lse, lse_parts;
  ForwardOutput views;
};

// Without `want_lse` lse is no tensor; only the CPU's kernels do without it.
ForwardResult allocate_forward(Memory& memory, const AttentionParams& p, const Tensor& q,
                               bool want_lse = true);

// Bits of output_mask, in the order of the results. The schema's default is those of q, k and v.
enum Gradient { kQ = 1, kK = 2, kV = 4, kBias = 8, kFloatMask = 16, kAlibiSlopes = 32, kSinks = 64 };

struct BackwardResult {
  using Tensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

  Tensor grad_q, grad_k, grad_v, grad_bias, grad_float_mask, grad_alibi_slopes, grad_sinks;
  BackwardIO views;

  // What the op returns: bias and float mask in the caller's dtype, not the float32 that scores are added up in.
  Tensors rounded(const OptionalTensor& bias, const OptionalTensor& float_mask) &&;
};

// What kernels ask of the memory for a backward.
struct BackwardMemory {
  bool aligned_grad_out = false;  // as q, k and v
  // Gradients of bias and float mask in sum_dtype, also where no scores are added up.
  bool single_bias = false;
  bool terms = true;  // the gradients of bias and what follows it are tensors, if without elements
};

BackwardResult allocate_backward(Memory& memory, const AttentionParams& p, const Tensor& grad_out,
                                 const OptionalTensor& grad_lse, const Tensor& q, const Tensor& out,
                                 const Tensor& lse_parts, const OptionalTensor& bias,
                                 const OptionalTensor& float_mask, const OptionalTensor& alibi_slopes,
                                 const OptionalTensor& sinks, int64_t output_mask, BackwardMemory needs);

// The tangents of the inputs, none of which has to be given.
struct Tangents {
  const OptionalTensor &q, &k, &v, &bias, &float_mask, &alibi_slopes, &sinks;
};

struct JvpResult {
  Tensor tangent_out, tangent_lse;
  JvpIO views;
};

JvpResult allocate_jvp(Memory& memory, const AttentionParams& p, const Tensor& q, const Tensor& out,
                       const Tensor& lse_parts, const Tangents& tangents, bool aligned_rows = false);

}  // namespace attn_ext
