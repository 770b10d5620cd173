// The problem that every kernel solves, in plain C++17: sizes, strides, pointers and score modifiers.
// No torch and no CUDA here, so that kernels, launch planning and C++ tests can all share it.
//
//   s[i][j] = scale * (q[i] . k[j])
//   s       = softcap * tanh(s / softcap)                                  if softcap > 0
//   s       = s + bias[i][j] + float_mask[i][j] - slope * |i + Nk - Nq - j|
//   s[i][j] = -inf where a rule (bool mask, block mask, causal, window, lengths) hides key j from query i
//   out[i]  = sum_j softmax(s)[i][j] * v[j],   lse[i] = log(sum_j exp(s[i][j]) + exp(sink))
//
// Sizes: q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv); query head h reads KV head h / (Hq / Hkv).
#pragma once

#include <cstdint>

// Member functions that CUDA kernels call too.
#ifdef __CUDACC__
#define ATTN_HOST_DEVICE __host__ __device__
#else
#define ATTN_HOST_DEVICE
#endif

namespace attn_ext {

// The low four bits are the bytes of a number: kernels then learn its size without a branch.
enum class DType : int32_t { kBool = 1, kFloat16 = 2, kFloat32 = 4, kFloat64 = 8, kBFloat16 = 16 + 2 };

ATTN_HOST_DEVICE inline int64_t size_of(DType dtype) { return int32_t(dtype) % 16; }

// A tensor seen as (batch, head, row, column). Strides count elements; a broadcast axis has stride 0.
struct StridedView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t stride[4] = {0, 0, 0, 0};
  bool present = false;  // an empty tensor has no address, so `data` cannot tell

  ATTN_HOST_DEVICE char* at(int64_t b, int64_t h, int64_t row, int64_t column) const {
    const int64_t element = b * stride[0] + h * stride[1] + row * stride[2] + column * stride[3];
    return static_cast<char*>(data) + element * size_of(dtype);
  }
};

enum class Causal : int32_t { kNone = 0, kUpperLeft = 1, kLowerRight = 2 };

// Dropout keeps probability (b, h, i, j) iff the 16-bit number that Philox 4x32-10 gives it is >= threshold.
struct Dropout {
  const int64_t* rng_state =
      nullptr;             // (seed, offset) from torch's generator, in the memory of the tensors' device
  uint32_t threshold = 0;  // round(p * 65536); 0 = no dropout

  // The offset is spread over all bits (2^64 / golden ratio), so that neighbouring offsets give unrelated keys.
  ATTN_HOST_DEVICE uint64_t key() const {
    return uint64_t(rng_state[0]) + uint64_t(rng_state[1]) * 0x9E3779B97F4A7C15ull;
  }
  ATTN_HOST_DEVICE double scale() const { return threshold >= 65536 ? 0.0 : 65536.0 / (65536.0 - threshold); }
};

// Which keys queries may see, known for whole blocks of scores, so that kernels leave out those where nobody sees any.
// A map says of each block of 64 queries and 64 keys: 0 nobody sees any key, 1 all see all, n: look at tile n, whose word
// i has bit j set iff query i of the block sees key j of it. Tiles 0 and 1 are there too, and all blocks are the same to
// who looks at bits only.
struct BlockMask {
  static constexpr int kSize = 64;

  const int32_t* map = nullptr;     // (B or 1, Hq or 1, query blocks, key blocks); null: no block mask
  const uint64_t* tiles = nullptr;  // (tile_count, 64)
  int64_t stride[2] = {0, 0};       // of a batch element and of a head in the map; 0 where they share it
  int32_t key_blocks = 0, tile_count = 0;

  ATTN_HOST_DEVICE bool present() const { return map != nullptr; }

  // The row of the map for a query block of head h.
  ATTN_HOST_DEVICE const int32_t* row(int64_t b, int64_t h, int64_t query_block) const {
    return map + b * stride[0] + h * stride[1] + query_block * key_blocks;
  }

  // A map made by hand may name tiles that are not there: such blocks are hidden, so that memory is safe.
  ATTN_HOST_DEVICE int32_t checked(int32_t entry) const {
    return entry >= 0 && entry < tile_count ? entry : 0;
  }

  ATTN_HOST_DEVICE int32_t block(int64_t b, int64_t h, int64_t query_block, int64_t key_block) const {
    return checked(row(b, h, query_block)[key_block]);
  }

  // The keys of a block that query i sees: bit j is key j of the block.
  ATTN_HOST_DEVICE uint64_t keys(int32_t block, int64_t i) const {
    return tiles[int64_t(block) * kSize + i % kSize];
  }
};

struct AttentionParams {
  int64_t batch = 0, heads_q = 0, heads_kv = 0, len_q = 0, len_k = 0, dim_qk = 0, dim_v = 0;
  StridedView q, k, v;                      // last stride 1
  StridedView bias, float_mask, bool_mask;  // optional; bool_mask: 1 = may attend
  BlockMask block_mask;                     // optional
  StridedView alibi_slopes;                 // optional; (batch, head) strides only
  StridedView sinks;                        // optional; head stride only
  const int64_t* key_lengths = nullptr;     // optional (B,)
  const int64_t* query_lengths = nullptr;   // optional (B,)
  double scale = 1.0, softcap = 0.0;        // softcap 0 = none
  Causal causal = Causal::kNone;
  int64_t window_left = -1, window_right = -1;  // -1 = open
  Dropout dropout;
  bool allow_tf32 = false;  // float32 on CUDA: products may round their operands, for the tensor cores

  ATTN_HOST_DEVICE int64_t group() const { return heads_q / heads_kv; }  // query heads that share a KV head
  // Query i stands at key position i + offset: the diagonal of causal and window rules.
  ATTN_HOST_DEVICE int64_t offset() const { return causal == Causal::kUpperLeft ? 0 : len_k - len_q; }
  ATTN_HOST_DEVICE int64_t valid_keys(int64_t b) const { return clamp_length(key_lengths, b, len_k); }
  ATTN_HOST_DEVICE int64_t valid_queries(int64_t b) const { return clamp_length(query_lengths, b, len_q); }

 private:
  // Python refuses lengths outside [0, n]; clamping keeps memory safe whoever calls the op.
  ATTN_HOST_DEVICE static int64_t clamp_length(const int64_t* lengths, int64_t b, int64_t n) {
    if (lengths == nullptr) return n;
    return lengths[b] < 0 ? 0 : (lengths[b] > n ? n : lengths[b]);
  }
};

struct ForwardOutput {
  StridedView out;  // (B, Hq, Nq, Dv), dtype of q, last stride 1
  StridedView lse;  // (B, Hq, Nq), float32 or float64, in stride[0..2]
  // (B, Hq, Nq, 2) of lse's dtype, for the backward: the row's maximum, or a number near it, and the log of the sum
  // relative to that; -inf and 0 for an empty row. Added up they are the LSE, but a float32 LSE of 10,000 is good to
  // 1e-3 only, and that would be the relative error of every recomputed probability.
  StridedView lse_parts;
};

// Gradients are written where `present`; the others are neither computed nor touched.
struct BackwardIO {
  StridedView grad_out;                // (B, Hq, Nq, Dv), last stride 1
  StridedView grad_lse;                // optional (B, Hq, Nq)
  StridedView out, lse_parts;          // what forward returned
  StridedView grad_q, grad_k, grad_v;  // last stride 1
  // Of the shapes of their inputs (`size` says which axes are reduced). In float32 for half types too, or, on the CPU
  // where each score has an element of its own, in any dtype.
  StridedView grad_bias, grad_float_mask;
  int64_t bias_size[4] = {1, 1, 1, 1}, float_mask_size[4] = {1, 1, 1, 1};
  StridedView grad_alibi_slopes;  // (B or 1, Hq)
  int64_t alibi_batch = 1;
  StridedView grad_sinks;     // (Hq,)
  void* workspace = nullptr;  // backward_workspace_bytes() of memory, 64-byte aligned
};

// Forward mode. A tangent that is not present is zero; the others have the shape of what they belong to.
struct JvpIO {
  StridedView out, lse_parts;                   // what forward returned
  StridedView tangent_q, tangent_k, tangent_v;  // last stride 1
  StridedView tangent_bias, tangent_float_mask, tangent_alibi_slopes, tangent_sinks;
  StridedView tangent_out, tangent_lse;  // results, as ForwardOutput's
};

// Per query row lse in two parts and delta, per head sums of the sinks' gradient, per head and key block those of ALiBi's.
// At least one key block in 128 keys.
inline int64_t backward_workspace_bytes(const AttentionParams& p) {
  const int64_t heads = p.batch * p.heads_q;
  return 8 * (heads * (3 * p.len_q + p.len_k / 128 + 2) + 1);
}

}  // namespace attn_ext
