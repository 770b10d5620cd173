// What the planner passes to each family of kernels, by value. Plain C++: host code and kernels share it.
#pragma once

#include "../attention_params.h"

namespace attn_ext::cuda {

struct ForwardParams {
  AttentionParams problem;
  ForwardOutput output;
  // Split-KV (decode kernels): keys are cut into `splits` pieces, each written as an unfinished row that the combine
  // kernel joins. Rows are counted as ((batch * Hq + head) * Nq + query).
  int32_t splits = 1;
  float* partial_out = nullptr;    // (splits, rows, Dv): sum of exp(s - max) * v, not yet divided
  float* partial_parts = nullptr;  // (splits, rows, 2): max in natural units, sum of exp(s - max)
};

struct BackwardParams {
  AttentionParams problem;
  BackwardIO io;
  // Written by attn_bwd_rows_*, read by the kernels after it. Rows are counted as ((batch * Hq + head) * Nq + query).
  void* row_max =
      nullptr;  // (rows): maximum of the row's scores, natural units; +inf for an empty row, so P = 0
  void* row_log = nullptr;    // (rows): log of the row's sum
  void* row_delta = nullptr;  // (rows): rowsum(dO * O) - dLSE
  // The same for the tensor-core kernels: `row_stride` rows a head, those past the last query of the empty kind, so that
  // whole tiles can be copied. A row is {-lse * log2(e), -delta}, or {max, -log * log2(e), -delta, 0} for full variants;
  // for Hopper the numbers of `row_tile` rows lie together, as sm90/backward_sizes.h says.
  float* row_terms = nullptr;
  int64_t row_stride = 0;
  int32_t row_term_size = 0;  // floats a row: 2 or 4, 3 for Hopper
  int32_t row_tile = 0;       // queries in a tile of the kernels for Hopper
  // For kernels that add up dQ over blocks in turn (sm90/backward_sums.cuh): the sums in float32, whole tiles a head, or
  // null if nobody wants dQ; whose turn it is at each of these tiles, and in the last place how many blocks have started.
  // attn_bwd_rows_* makes `turns` zero.
  float* query_sums = nullptr;
  uint32_t* turns = nullptr;
  int64_t turn_count = 0;
  void* alibi_sums = nullptr;  // (batch, Hq, query tiles): partial sums of the slopes' gradient
  int32_t alibi_tiles = 0;     // query tiles of a head, as the dQ kernel cuts it
  bool of_float_mask = false;  // the bias kernel writes grad_float_mask, not grad_bias
};

struct JvpParams {
  AttentionParams problem;
  JvpIO io;
};

// Whether a bias or float mask takes the gradient of the scores as it is, summed over nothing: the dQ kernels write it
// then. `size`: its own shape. Planner and kernels must agree.
ATTN_HOST_DEVICE inline bool takes_scores(const AttentionParams& p, const StridedView& grad,
                                          const int64_t (&size)[4]) {
  return grad.present && size[0] == p.batch && size[1] == p.heads_q && size[2] == p.len_q &&
         size[3] == p.len_k;
}

}  // namespace attn_ext::cuda
