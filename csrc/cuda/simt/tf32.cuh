// The products on tensor cores, with operands rounded to TF32 (10 bits of mantissa) and sums in float32, by mma.m16n8k8.
// A warp computes 16 rows. With lane = 4 g + q it gives thread (g, q)
//
//   scores   s[r][c]      query 16 warp + g + 8 r, key 2 q + 8 (c / 2) + c % 2
//   output   o[h][r][e]   row 16 warp + g + 8 r (queries or keys), column h * kHalf + 32 (e / 8) + 8 q + e % 8
//
// A product may sum over k, and cut its columns n into fragments, in any order. So k and n are dealt out to lanes in such
// a way that a thread reads vectors of 16 bytes and the left operand of the second product is what it has of the first:
//
//   Q K^T, dO V^T   for k = q and q + 4 of step t the columns 4 q + 2 t and 4 q + 2 t + 1 of a slice of 16
//   P V, dS K       for k = q and q + 4 the rows 2 q and 2 q + 1 of V or K, as the scores' fragment has its columns
//   columns of V, K, dO, Q   for n = g of fragment t the column 4 g + t of 32
//
// In the tile of scores, neighbours (columns 2 q and 2 q + 1) change places in rows whose bit 2 is set: otherwise rows g
// and g + 4 of a warp would meet in the same banks.
#pragma once

#include "../tile/dropout.cuh"
#include "elements.cuh"

namespace attn_ext::cuda::simt {

struct Tf32 : Tf32Tile {
  using T = float;

  static constexpr int kRowThreads = 4;  // that share a row of scores
  static constexpr int kRowScores = 16;  // of a thread
  static constexpr int kRowStep = 8;
  static constexpr int kOutputColumns = 16;  // of a thread in half a chunk

  static __device__ __forceinline__ int lane_row() { return threadIdx.x % 32 / 4; }  // g
  static __device__ __forceinline__ int lane_column() { return threadIdx.x % 4; }    // q

  static __device__ __forceinline__ int first_row() { return threadIdx.x / 32 * 16 + lane_row(); }
  static __device__ __forceinline__ int first_column() { return 2 * lane_column(); }
  static __device__ constexpr int column_step(int c) { return 8 * (c / 2) + c % 2; }
  static __device__ __forceinline__ int tile_column(int c) {
    return first_column() + 8 * (c / 2) + (c % 2 ^ lane_row() / 4);
  }
  static __device__ __forceinline__ int key_row(int r) { return first_row() + kRowStep * r; }
  static __device__ __forceinline__ int output_column(int half, int vector) {
    return half * kHalf + 32 * (vector / 2) + 8 * lane_column() + kVector * (vector % 2);
  }

  // s += A B^T over a slice of columns: A (queries, slice), then B (keys, slice), in one stage.
  static __device__ __forceinline__ void multiply_rows(float (&s)[kRows][kRowScores], const float* stage) {
    const float* a = stage + first_row() * kSlicePitch + kVector * lane_column();
    const float* b = stage + (kQueries + lane_row()) * kSlicePitch + kVector * lane_column();
    float left[2][4], right[4];
    load_rounded(left[0], a);
    load_rounded(left[1], a + kRowStep * kSlicePitch);
#pragma unroll
    for (int n = 0; n < kKeys / 8; n++) {
      load_rounded(right, b + 8 * n * kSlicePitch);
#pragma unroll
      for (int t = 0; t < 4; t += 2) {
        const float fragment[4] = {left[0][t], left[1][t], left[0][t + 1], left[1][t + 1]};
        mma_tf32(s[0][2 * n], s[0][2 * n + 1], s[1][2 * n], s[1][2 * n + 1], fragment, right[t],
                 right[t + 1]);
      }
    }
  }

  // Halves First .. First + Count of o += A B: A (queries, slice of keys) of the score tile, of which a thread reads its
  // own numbers, B (slice of keys, columns).
  template <int First, int Count>
  static __device__ __forceinline__ void multiply_tile(float (&o)[2][kRows][kOutputColumns],
                                                       const float* tile, int key, const float* stage) {
    const float* a = tile + first_row() * kTilePitch + key;
    const float* b = stage + 2 * lane_column() * kKeyRowPitch + 4 * lane_row();
#pragma unroll
    for (int k = 0; k < kSlice; k += 8) {
      float left[4];
#pragma unroll
      for (int n = 0; n < 4; n++)
        left[n] = round_to_tf32(a[n % 2 * kRowStep * kTilePitch + k + tile_column(n / 2)]);
      multiply_columns<First, Count>(o, left, b + k * kKeyRowPitch, kKeyRowPitch);
    }
  }

  // Halves First .. First + Count of o += A^T B: A (slice of queries, keys) of the score tile, B (slice of queries,
  // columns). Here k is dealt out as it is numbered.
  template <int First, int Count>
  static __device__ __forceinline__ void multiply_transposed_tile(float (&o)[2][kRows][kOutputColumns],
                                                                  const float* tile, int query,
                                                                  const float* stage) {
    const float* a = tile + (query + lane_column()) * kTilePitch;
    const float* b = stage + lane_column() * kQueryRowPitch + 4 * lane_row();
#pragma unroll
    for (int k = 0; k < kSlice; k += 8) {
      float left[4];
#pragma unroll
      for (int n = 0; n < 4; n++)  // n / 2 is bit 2 of the tile's row
        left[n] = round_to_tf32(a[(k + n / 2 * 4) * kTilePitch + (first_row() ^ n / 2) + n % 2 * kRowStep]);
      multiply_columns<First, Count>(o, left, b + k * kQueryRowPitch, 4 * kQueryRowPitch);
    }
  }

  // The scores that dropout keeps.
  static __device__ __forceinline__ uint32_t kept(const Dropout& dropout, int i0, int j0, int h, int b) {
    const DropoutNumbers numbers(dropout, b, h);
    uint32_t result = 0;
#pragma unroll 1
    for (int part = 0; part < 4; part++) {  // 32 keys of a row: 8 scores of a thread
      uint32_t word[4];
      numbers.quad_numbers(word, i0 + first_row() + part / 2 * kRowStep, j0 + part % 2 * 32);
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const uint32_t bits = uint32_t(numbers.keep_low(word[n])) | uint32_t(numbers.keep_high(word[n])) << 1;
        result |= bits << (8 * part + 2 * n);
      }
    }
    return result;
  }

 private:
  static __device__ __forceinline__ void load_rounded(float (&x)[4], const float* shared) {
    const Vector<float> loaded = load_vector(shared);
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = round_to_tf32(loaded.at[e]);
  }

  // A step of 8 of k: `b` is the row that this thread takes for k = q, `next` numbers behind it that for k = q + 4.
  template <int First, int Count>
  static __device__ __forceinline__ void multiply_columns(float (&o)[2][kRows][kOutputColumns],
                                                          const float (&left)[4], const float* b, int next) {
#pragma unroll
    for (int n = 0; n < 2 * Count; n++) {
      float first[4], second[4];
      load_rounded(first, b + 32 * n);
      load_rounded(second, b + next + 32 * n);
      float (&rows)[kRows][kOutputColumns] = o[First + n / 2];
#pragma unroll
      for (int t = 0; t < 4; t++) {
        const int e = n % 2 * 8 + t;
        mma_tf32(rows[0][e], rows[0][e + 4], rows[1][e], rows[1][e + 4], left, first[t], second[t]);
      }
    }
  }
};

}  // namespace attn_ext::cuda::simt
