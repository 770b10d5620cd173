#include "launch_plan.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "simt/tile_sizes.h"
#include "sm80/backward_sizes.h"
#include "sm80/decode_sizes.h"
#include "sm80/jvp_sizes.h"
#include "sm80/tile_sizes.h"
#include "sm90/backward_plan.h"
#include "sm90/forward_plan.h"

namespace attn_ext::cuda {
namespace {

// Kernels count queries and keys in 32 bits, up to the end of the last tile.
constexpr int64_t kMaxLength = (int64_t(1) << 31) - 1024;
constexpr int64_t kMaxGrid = (int64_t(1) << 31) - 1;  // blocks along x, CUDA's own limit

bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

std::string type_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return "f64";
    case DType::kFloat32: return "f32";
    case DType::kFloat16: return "f16";
    default: return "bf16";
  }
}

// The head-dim bucket of the tensor-core kernels, 0 where there is none.
int bucket(const AttentionParams& p) {
  if (!is_half(p.q.dtype)) return 0;
  for (const int size : kHeadDimBuckets) {
    if (std::max(p.dim_qk, p.dim_v) <= size) return size;
  }
  return 0;
}

// Options that the lean backward leaves out. It needs no sinks: they are inside the LSE.
bool backward_needs_full(const AttentionParams& p) {
  return p.bias.present || p.float_mask.present || p.bool_mask.present || p.block_mask.present() ||
         p.alibi_slopes.present || p.softcap > 0 || p.dropout.threshold != 0;
}

// The same for the forward.
bool forward_needs_full(const AttentionParams& p) { return backward_needs_full(p) || p.sinks.present; }

void check_sizes(const AttentionParams& p) {
  if (p.len_q > kMaxLength || p.len_k > kMaxLength) {
    throw std::invalid_argument("attn_ext: the CUDA kernels take up to " + std::to_string(kMaxLength) +
                                " queries and keys, got " + std::to_string(p.len_q) + " and " +
                                std::to_string(p.len_k));
  }
}

template <class Params>
Launch make_launch(std::string kernel, int64_t grid, int block, int shared_bytes, const Params& params) {
  if (grid > kMaxGrid) {
    throw std::invalid_argument("attn_ext: " + kernel + " would need " + std::to_string(grid) +
                                " blocks, CUDA launches up to " + std::to_string(kMaxGrid));
  }
  Launch launch{std::move(kernel), grid, block, shared_bytes, {}, {}};
  launch.params.resize(sizeof(Params));
  std::memcpy(launch.params.data(), &params, sizeof(Params));
  return launch;
}

// The Hopper forward, or an empty plan where the sm_80 kernels take the problem.
Plan plan_sm90_forward(const AttentionParams& p, const ForwardOutput& output, const Target& target) {
  if (!target.sm90_kernels || target.architecture != 90 || forward_needs_full(p)) return {};
  const sm90::ForwardPlan plan(p, output);
  if (!plan.possible(target.multiprocessors)) return {};
  const std::string kernel = "attn_fwd_sm90_" + type_name(p.q.dtype) + "_d" + std::to_string(plan.head_dim) +
                             (plan.variant == sm90::ForwardVariant::kBanded ? "_banded" : "");
  Launch launch = make_launch(kernel, std::min<int64_t>(plan.tiles, target.multiprocessors),
                              plan.tile.threads(), plan.tile.shared_bytes(), plan.params);
  launch.tensor_maps = plan.maps;
  return {launch};
}

// Whether the Hopper kernels compute dQ, dK and dV; else those of sm_80 do.
bool takes_sm90_backward(const AttentionParams& p, const BackwardIO& io, const Target& target) {
  return target.sm90_kernels && target.architecture == 90 && is_half(p.q.dtype) && !backward_needs_full(p) &&
         sm90::backward_possible(p, io);
}

std::string tensor_core_kernel(const std::string& family, const AttentionParams& p, const char* variant) {
  return family + "_sm80_" + type_name(p.q.dtype) + "_d" + std::to_string(bucket(p)) + variant;
}

// Kernels for every head dim: attn_fwd_simt_f32, or attn_fwd_tf32_sm80.
std::string any_dim_kernel(const std::string& family, const AttentionParams& p) {
  return family + (simt::in_tf32(p) ? "_tf32_sm80" : "_simt_" + type_name(p.q.dtype));
}

// Dynamic shared memory that a block may have (CUDA C++ Programming Guide, compute capabilities).
int max_shared_bytes(int architecture) {
  const bool small = architecture == 86 || architecture == 89 || architecture / 10 == 12;
  return (small ? 99 : architecture < 90 ? 163 : 227) << 10;
}

ForwardVariant forward_variant(const AttentionParams& p, const Target& target) {
  if (forward_needs_full(p)) return ForwardVariant::kFull;
  const bool fits =
      forward_tile(bucket(p), ForwardVariant::kLean).shared_bytes() <= max_shared_bytes(target.architecture);
  return fits ? ForwardVariant::kLean : ForwardVariant::kCompact;
}

const char* suffix(ForwardVariant variant) {
  return variant == ForwardVariant::kFull ? "_full" : variant == ForwardVariant::kCompact ? "_compact" : "";
}

// Query tiles of all heads.
int64_t forward_blocks(const AttentionParams& p, const ForwardTile& tile) {
  return p.batch * p.heads_q * ((p.len_q + tile.rows() - 1) / tile.rows());
}

bool splits_keys(const AttentionParams& p, const Target& target) {
  return bucket(p) != 0 && decode_pays(p, target.multiprocessors);
}

int splits(const AttentionParams& p, const Target& target) {
  return decode_splits(p, decode_sizes(decode_bucket(p)), target.multiprocessors,
                       decode_blocks_per_sm(target.architecture));
}

Plan plan_decode(const AttentionParams& p, ForwardParams params, void* workspace, const Target& target) {
  const DecodeSizes sizes = decode_sizes(decode_bucket(p));
  params.splits = splits(p, target);
  if (params.splits > 1) {
    params.partial_out = static_cast<float*>(workspace);
    params.partial_parts =
        reinterpret_cast<float*>(static_cast<char*>(workspace) + decode_parts_offset(p, params.splits));
  }
  const std::string type = type_name(p.q.dtype);
  Plan plan;
  plan.push_back(make_launch("attn_decode_sm80_" + type + "_d" + std::to_string(sizes.bucket),
                             decode_grid(p, sizes, params.splits), sizes.threads(), sizes.shared_bytes(),
                             params));
  if (params.splits > 1) {
    plan.push_back(make_launch("attn_decode_combine_" + type, p.batch * p.heads_q * p.len_q, kCombineThreads,
                               0, params));
  }
  return plan;
}

// Where the arrays of BackwardParams lie in the workspace.
struct BackwardWorkspace {
  const bool hopper;  // the kernels of sm90/ read it
  int64_t bytes = 0, row_stride = 0;

  BackwardWorkspace(const AttentionParams& p, const BackwardIO& io, const Target& target)
      : hopper(takes_sm90_backward(p, io, target)) {
    const int64_t heads = p.batch * p.heads_q, size = p.q.dtype == DType::kFloat64 ? 8 : 4;
    const int head_dim = bucket(p);
    const bool full = backward_needs_full(p);
    if (hopper) {
      const int bucket = sm90::backward_bucket(p);
      row_tile_ = sm90::backward_queries(bucket);
      row_stride = sm90::query_tiles(p) * row_tile_;
      term_size_ = sm90::kTermSize;
      if (io.grad_q.present) sums_ = take(4 * sm90::query_blocks(p) * sm90::sums_elements(bucket));
      turn_count_ = (io.grad_q.present ? sm90::query_blocks(p) : 0) + 1;
      turns_ = take(4 * turn_count_);
    } else if (head_dim != 0) {
      row_stride = backward_row_stride(p);
      term_size_ = row_term_size(full);
    }
    if (head_dim != 0) terms_ = take(4 * heads * row_stride * term_size_);
    if (head_dim == 0 || io.grad_sinks.present) {
      max_ = take(size * heads * p.len_q);
      log_ = take(size * heads * p.len_q);
      delta_ = take(size * heads * p.len_q);
    }
    if (io.grad_alibi_slopes.present) {
      const int rows = head_dim != 0 ? dq_tile(head_dim, full).rows() : simt::sizes(p).queries;
      alibi_tiles_ = int32_t(ceil_tiles(p.len_q, rows));
      alibi_ = take(size * heads * alibi_tiles_);
    }
  }

  void assign(BackwardParams& params, char* base) const {
    const auto at = [base](int64_t offset) { return offset < 0 ? nullptr : base + offset; };
    params.row_terms = reinterpret_cast<float*>(at(terms_));
    params.row_stride = row_stride;
    params.row_term_size = term_size_;
    params.row_tile = row_tile_;
    params.query_sums = reinterpret_cast<float*>(at(sums_));
    params.turns = reinterpret_cast<uint32_t*>(at(turns_));
    params.turn_count = turn_count_;
    params.row_max = at(max_);
    params.row_log = at(log_);
    params.row_delta = at(delta_);
    params.alibi_sums = at(alibi_);
    params.alibi_tiles = alibi_tiles_;
  }

 private:
  int64_t take(int64_t size) {
    const int64_t offset = bytes;
    bytes += (size + kSectionBytes - 1) / kSectionBytes * kSectionBytes;
    return offset;
  }

  static constexpr int64_t kSectionBytes = 256;  // the alignment of what torch's allocator gives
  int64_t terms_ = -1, sums_ = -1, turns_ = -1, max_ = -1, log_ = -1, delta_ = -1, alibi_ = -1;
  int64_t turn_count_ = 0;
  int32_t term_size_ = 0, row_tile_ = 0, alibi_tiles_ = 0;
};

// A list of buffers in the making.
class Buffers {
 public:
  // The part of memory that a view of these sizes reaches.
  void add(const char* name, const StridedView& view, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
    if (!view.present) return;
    const int64_t size[4] = {n0, n1, n2, n3};
    int64_t elements = 1;
    for (int axis = 0; axis < 4; axis++) {
      if (size[axis] == 0) return;
      elements += (size[axis] - 1) * view.stride[axis];
    }
    list.push_back({name, view.data, elements * size_of(view.dtype)});
  }

  void add(const char* name, const void* data, int64_t bytes) {
    if (data != nullptr && bytes > 0) list.push_back({name, data, bytes});
  }

  void add_inputs(const AttentionParams& p) {
    add("q", p.q, p.batch, p.heads_q, p.len_q, p.dim_qk);
    add("k", p.k, p.batch, p.heads_kv, p.len_k, p.dim_qk);
    add("v", p.v, p.batch, p.heads_kv, p.len_k, p.dim_v);
    add("bias", p.bias, p.batch, p.heads_q, p.len_q, p.len_k);
    add("float_mask", p.float_mask, p.batch, p.heads_q, p.len_q, p.len_k);
    add("bool_mask", p.bool_mask, p.batch, p.heads_q, p.len_q, p.len_k);
    add_block_mask(p);
    add("alibi_slopes", p.alibi_slopes, p.batch, p.heads_q, 1, 1);
    add("sinks", p.sinks, 1, p.heads_q, 1, 1);
    add("key_lengths", p.key_lengths, 8 * p.batch);
    add("query_lengths", p.query_lengths, 8 * p.batch);
    add("rng_state", p.dropout.rng_state, 16);
  }

  std::vector<Buffer> list;

 private:
  void add_block_mask(const AttentionParams& p) {
    const BlockMask& mask = p.block_mask;
    if (!mask.present()) return;
    const int64_t map = ceil_tiles(p.len_q, BlockMask::kSize) * mask.key_blocks;
    const int64_t maps = map + (p.heads_q - 1) * mask.stride[1] + (p.batch - 1) * mask.stride[0];
    add("block_map", mask.map, 4 * maps);
    add("block_tiles", mask.tiles, 8 * BlockMask::kSize * int64_t(mask.tile_count));
  }
};

}  // namespace

std::vector<Buffer> forward_buffers(const AttentionParams& p, const ForwardOutput& output, void* workspace,
                                    const Target& target) {
  Buffers buffers;
  buffers.add_inputs(p);
  buffers.add("out", output.out, p.batch, p.heads_q, p.len_q, p.dim_v);
  buffers.add("lse", output.lse, p.batch, p.heads_q, p.len_q, 1);
  buffers.add("lse_parts", output.lse_parts, p.batch, p.heads_q, p.len_q, 2);
  buffers.add("workspace", workspace, forward_workspace_bytes(p, target));
  return std::move(buffers.list);
}

std::vector<Buffer> backward_buffers(const AttentionParams& p, const BackwardIO& io, void* workspace,
                                     const Target& target) {
  Buffers buffers;
  buffers.add_inputs(p);
  buffers.add("grad_out", io.grad_out, p.batch, p.heads_q, p.len_q, p.dim_v);
  buffers.add("grad_lse", io.grad_lse, p.batch, p.heads_q, p.len_q, 1);
  buffers.add("out", io.out, p.batch, p.heads_q, p.len_q, p.dim_v);
  buffers.add("lse_parts", io.lse_parts, p.batch, p.heads_q, p.len_q, 2);
  buffers.add("grad_q", io.grad_q, p.batch, p.heads_q, p.len_q, p.dim_qk);
  buffers.add("grad_k", io.grad_k, p.batch, p.heads_kv, p.len_k, p.dim_qk);
  buffers.add("grad_v", io.grad_v, p.batch, p.heads_kv, p.len_k, p.dim_v);
  buffers.add("grad_bias", io.grad_bias, io.bias_size[0], io.bias_size[1], io.bias_size[2], io.bias_size[3]);
  buffers.add("grad_float_mask", io.grad_float_mask, io.float_mask_size[0], io.float_mask_size[1],
              io.float_mask_size[2], io.float_mask_size[3]);
  buffers.add("grad_alibi_slopes", io.grad_alibi_slopes, io.alibi_batch, p.heads_q, 1, 1);
  buffers.add("grad_sinks", io.grad_sinks, 1, p.heads_q, 1, 1);
  buffers.add("workspace", workspace, backward_workspace_bytes(p, io, target));
  return std::move(buffers.list);
}

std::vector<Buffer> jvp_buffers(const AttentionParams& p, const JvpIO& io) {
  Buffers buffers;
  buffers.add_inputs(p);
  buffers.add("out", io.out, p.batch, p.heads_q, p.len_q, p.dim_v);
  buffers.add("lse_parts", io.lse_parts, p.batch, p.heads_q, p.len_q, 2);
  buffers.add("tangent_q", io.tangent_q, p.batch, p.heads_q, p.len_q, p.dim_qk);
  buffers.add("tangent_k", io.tangent_k, p.batch, p.heads_kv, p.len_k, p.dim_qk);
  buffers.add("tangent_v", io.tangent_v, p.batch, p.heads_kv, p.len_k, p.dim_v);
  buffers.add("tangent_bias", io.tangent_bias, p.batch, p.heads_q, p.len_q, p.len_k);
  buffers.add("tangent_float_mask", io.tangent_float_mask, p.batch, p.heads_q, p.len_q, p.len_k);
  buffers.add("tangent_alibi_slopes", io.tangent_alibi_slopes, p.batch, p.heads_q, 1, 1);
  buffers.add("tangent_sinks", io.tangent_sinks, 1, p.heads_q, 1, 1);
  buffers.add("tangent_out", io.tangent_out, p.batch, p.heads_q, p.len_q, p.dim_v);
  buffers.add("tangent_lse", io.tangent_lse, p.batch, p.heads_q, p.len_q, 1);
  return std::move(buffers.list);
}

bool needs_aligned_rows(const AttentionParams& p) { return bucket(p) != 0; }

int64_t forward_workspace_bytes(const AttentionParams& p, const Target& target) {
  if (p.batch * p.heads_q * p.len_q == 0 || !splits_keys(p, target)) return 0;
  return decode_workspace_bytes(p, splits(p, target));
}

Plan plan_forward(const AttentionParams& p, const ForwardOutput& output, void* workspace,
                  const Target& target) {
  check_sizes(p);
  if (p.batch * p.heads_q * p.len_q == 0) return {};
  ForwardParams params;
  params.problem = p;
  params.output = output;
  if (splits_keys(p, target)) return plan_decode(p, params, workspace, target);
  if (bucket(p) == 0) {
    const simt::Sizes sizes = simt::sizes(p);
    return {make_launch(any_dim_kernel("attn_fwd", p), simt::forward_blocks(p, sizes), simt::kThreads,
                        sizes.forward_bytes, params)};
  }
  if (Plan plan = plan_sm90_forward(p, output, target); !plan.empty()) return plan;
  const ForwardVariant variant = forward_variant(p, target);
  const ForwardTile tile = forward_tile(bucket(p), variant);
  return {make_launch(tensor_core_kernel("attn_fwd", p, suffix(variant)), forward_blocks(p, tile),
                      tile.threads(), tile.shared_bytes(), params)};
}

int64_t backward_workspace_bytes(const AttentionParams& p, const BackwardIO& io, const Target& target) {
  return BackwardWorkspace(p, io, target).bytes;
}

Plan plan_backward(const AttentionParams& p, const BackwardIO& io, void* workspace, const Target& target) {
  check_sizes(p);
  const int head_dim = bucket(p);
  const bool full = backward_needs_full(p);
  const std::string type = type_name(p.q.dtype), sum_type = p.q.dtype == DType::kFloat64 ? "f64" : "f32";
  const simt::Sizes sizes = simt::sizes(p);

  const BackwardWorkspace layout(p, io, target);
  BackwardParams params;
  params.problem = p;
  params.io = io;
  layout.assign(params, static_cast<char*>(workspace));

  Plan plan;
  const auto add = [&](const std::string& kernel, int64_t grid, int block, int shared_bytes) {
    if (grid > 0) plan.push_back(make_launch(kernel, grid, block, shared_bytes, params));
  };
  const auto add_bias = [&](const int64_t (&size)[4], bool of_float_mask) {
    params.of_float_mask = of_float_mask;
    if (head_dim != 0) {
      add(tensor_core_kernel("attn_bwd_bias", p, ""), bias_blocks(size, head_dim), kBiasThreads,
          bias_shared_bytes(head_dim));
    } else {
      add(any_dim_kernel("attn_bwd_bias", p), simt::bias_blocks(size, sizes), simt::kThreads,
          sizes.backward_bytes);
    }
  };

  const bool whole_bias = takes_scores(p, io.grad_bias, io.bias_size);
  const bool whole_mask = takes_scores(p, io.grad_float_mask, io.float_mask_size);
  const bool wants_queries = io.grad_q.present || io.grad_alibi_slopes.present || whole_bias || whole_mask;
  const bool wants_keys = io.grad_k.present || io.grad_v.present;

  add("attn_bwd_rows_" + (simt::in_tf32(p) ? "tf32" : type),
      rows_blocks(p, head_dim != 0 ? layout.row_stride : p.len_q), kBackwardRowThreads, 0);
  if (layout.hopper) {
    const int bucket = sm90::backward_bucket(p);
    const std::string kind = "_sm90_" + type + "_d" + std::to_string(bucket);
    if (wants_keys || wants_queries) {
      plan.push_back(make_launch("attn_bwd" + kind, sm90::key_blocks(p), sm90::kBackwardThreads,
                                 sm90::backward_shared_bytes(bucket),
                                 sm90::BackwardParams{{}, {}, {}, {}, params}));
      plan.back().tensor_maps = sm90::backward_maps(p, io);
    }
    if (wants_queries) add("attn_bwd_dq" + kind, sm90::query_blocks(p), sm90::sums_threads(bucket), 0);
  } else if (head_dim != 0) {
    const char* variant = full ? "_full" : "";
    if (wants_keys) {
      add(tensor_core_kernel("attn_bwd_dkdv", p, variant), dkdv_blocks(p, head_dim, full),
          dkdv_tile(head_dim, full).threads(), dkdv_shared_bytes(head_dim, full));
    }
    if (wants_queries) {
      add(tensor_core_kernel("attn_bwd_dq", p, variant), dq_blocks(p, head_dim, full),
          dq_tile(head_dim, full).threads(), dq_shared_bytes(head_dim, full));
    }
  } else {
    if (wants_keys) {
      add(any_dim_kernel("attn_bwd_dkdv", p), simt::dkdv_blocks(p, io, sizes), simt::kThreads,
          sizes.backward_bytes);
    }
    if (wants_queries) {
      add(any_dim_kernel("attn_bwd_dq", p), simt::dq_blocks(p, io, sizes), simt::kThreads,
          sizes.backward_bytes);
    }
  }
  if (io.grad_bias.present && !whole_bias) add_bias(io.bias_size, false);
  if (io.grad_float_mask.present && !whole_mask) add_bias(io.float_mask_size, true);
  if (io.grad_alibi_slopes.present || io.grad_sinks.present) {
    add("attn_bwd_sums_" + sum_type, p.heads_q, kBackwardSumThreads, 0);
  }
  return plan;
}

// Forward mode has no kernels for Hopper: there it takes those of sm_80 whatever the target wishes.
Plan plan_jvp(const AttentionParams& p, const JvpIO& io, const Target&) {
  check_sizes(p);
  if (p.batch * p.heads_q * p.len_q == 0) return {};
  const JvpParams params{p, io};
  const int head_dim = bucket(p);
  if (head_dim == 0) {
    const simt::Sizes sizes = simt::sizes(p);
    return {make_launch(any_dim_kernel("attn_jvp", p), simt::forward_blocks(p, sizes), simt::kThreads,
                        sizes.jvp_bytes, params)};
  }
  return {make_launch(tensor_core_kernel("attn_jvp", p, ""), jvp_blocks(p, head_dim),
                      jvp_tile(head_dim).threads(), jvp_shared_bytes(head_dim), params)};
}

}  // namespace attn_ext::cuda
