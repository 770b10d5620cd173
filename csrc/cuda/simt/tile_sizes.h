// How the kernels of this folder cut a problem. Plain C++: the planner sizes launches with it, the kernels decompose
// blockIdx.x with it.
//
// A block of 128 threads computes a tile of scores (queries x keys) and adds to a chunk of an output, of up to
// kColumns columns, that stays in its registers. Head dims of any size are taken in slices of kSlice, outputs wider
// than a chunk by several blocks, each of which computes the scores again.
#pragma once

#include "../../attention_params.h"

namespace attn_ext::cuda::simt {

constexpr int kThreads = 128;
// Blocks on a multiprocessor that the kernels are compiled for: with 255 registers a thread none spills, with the 168 of
// three blocks all do. Two take 87 KB of shared memory, and sm_86 and sm_89 have 100.
constexpr int kBlocksPerMultiprocessor = 2;

// A tile and what it takes of shared memory, in numbers of type T.
template <class T, class Layout>
struct SharedMemory : Layout {
  using L = Layout;
  // Either both operands of the scores or a slice of rows.
  static constexpr int kScoreStage = (L::kQueries + L::kKeys) * L::kSlicePitch;
  static constexpr int kRowPitch = L::kKeyRowPitch > L::kQueryRowPitch ? L::kKeyRowPitch : L::kQueryRowPitch;
  static constexpr int kRowStage = L::kSlice * kRowPitch;
  static constexpr int kStage = kScoreStage > kRowStage ? kScoreStage : kRowStage;
  static constexpr int kTileSize = L::kQueries * L::kTilePitch;
  static constexpr int kRowSums = 2 * L::kQueries;   // forward: max, sum
  static constexpr int kRowState = 3 * L::kQueries;  // max, log; backward: delta, forward mode: lse.

  static constexpr int kForwardBytes = int(sizeof(T)) * (2 * kStage + kTileSize + kRowSums);
  static constexpr int kJvpBytes = int(sizeof(T)) * (2 * kStage + kTileSize + kRowState);
  static constexpr int kBackwardBytes = int(sizeof(T)) * (2 * kStage + kTileSize + 2 * kRowState);
};

// On CUDA cores. Thread t stands at (t / 16, t % 16). T is what is computed in: float for float32 and the half types,
// double for float64.
template <class T>
struct CudaCoreLayout {
  static constexpr int kThreadRows = 8, kThreadColumns = 16;
  static constexpr int kVector = 16 / sizeof(T);  // numbers in 16 bytes, the widest access of shared memory
  // Scores of a thread: 8 x 4 floats. Per 128 multiply-adds it reads 12 vectors, so that shared memory keeps up with
  // the 128 FMA a cycle of sm_86 and newer. With the 64 numbers of output, and another 32 scores in the backward (P and
  // dP), they leave a thread enough registers for operands and addresses. A double takes two, hence half the rows.
  static constexpr int kRows = sizeof(T) == 4 ? 8 : 4;
  static constexpr int kQueries = kThreadRows * kRows;    // 64 or 32
  static constexpr int kKeys = 4 * kThreadColumns;        // 64
  static constexpr int kKeyRows = kKeys / kThreadRows;    // rows of dK and dV of a thread
  static constexpr int kHalf = kThreadColumns * kVector;  // 64 or 32: a vector for each thread of a row
  static constexpr int kColumns = 2 * kHalf;              // of an output chunk
  // Head dims, or rows of V, K, Q or dO, that arrive at a time. 512 multiply-adds of a thread between two barriers.
  static constexpr int kSlice = 16;

  // The pitch of a slice is an odd number of vectors, so that eight threads that read a vector each from eight rows meet
  // eight different groups of banks. That of the tile is 16 more than a multiple of 32 (banks) for float: the two rows
  // that a warp writes at a time fall into different halves of the banks.
  static constexpr int kSlicePitch = kSlice + kVector;
  static constexpr int kTilePitch = kKeys + 16;
  static constexpr int kKeyRowPitch = kColumns, kQueryRowPitch = kColumns;  // slices of rows: read one by one
};

template <class T>
using CudaCoreTile = SharedMemory<T, CudaCoreLayout<T>>;

// On tensor cores: float32 whose products take TF32 operands. The same tile in float; a warp computes 16 of its rows, in
// fragments of mma.m16n8k8 (tf32.cuh says which thread has what). With lane = 4 g + q:
struct Tf32Layout {
  static constexpr int kVector = 4;
  static constexpr int kRows = 2;  // of queries or keys: g and g + 8 of the warp's 16
  static constexpr int kQueries = 64, kKeys = 64, kKeyRows = kRows;
  static constexpr int kHalf = 64, kColumns = 128;
  static constexpr int kSlice = 16;  // two steps of k

  // Pitches in banks, of which there are 32. Slices of the scores' operands: a thread reads four neighbours of row g,
  // and the eight threads of two rows all banks.
  static constexpr int kSlicePitch = kSlice;
  // The tile: of row g column 2 q or its neighbour (8 g + 2 q + 0 or 1), of row q column g (8 q + g).
  static constexpr int kTilePitch = kKeys + 8;
  // Slices of rows, vectors at column 4 g: of row 2 q where the tile's rows are multiplied with them, of row q where its
  // columns are (8 q + 4 g both times).
  static constexpr int kKeyRowPitch = kColumns + 4, kQueryRowPitch = kColumns + 8;
};

using Tf32Tile = SharedMemory<float, Tf32Layout>;

// The same for host code.
struct Sizes {
  int queries, keys, columns, forward_bytes, jvp_bytes, backward_bytes;
};

template <class Tile>
constexpr Sizes sizes_of_tile() {
  return {Tile::kQueries,      Tile::kKeys,     Tile::kColumns,
          Tile::kForwardBytes, Tile::kJvpBytes, Tile::kBackwardBytes};
}

constexpr bool in_tf32(const AttentionParams& p) { return p.allow_tf32 && p.q.dtype == DType::kFloat32; }

constexpr Sizes sizes(const AttentionParams& p) {
  return in_tf32(p)                     ? sizes_of_tile<Tf32Tile>()
         : p.q.dtype == DType::kFloat64 ? sizes_of_tile<CudaCoreTile<double>>()
                                        : sizes_of_tile<CudaCoreTile<float>>();
}

ATTN_HOST_DEVICE constexpr int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }
ATTN_HOST_DEVICE constexpr int64_t pieces_or_one(int64_t n, int64_t size) {
  return n > 0 ? pieces(n, size) : 1;
}

// Blocks of each kernel, the fastest index first:
// forward and forward mode (query tile, chunk of Dv, head, batch)
constexpr int64_t forward_blocks(const AttentionParams& p, const Sizes& z) {
  return pieces(p.len_q, z.queries) * pieces_or_one(p.dim_v, z.columns) * p.heads_q * p.batch;
}

// dQ (query tile, chunk of D, head, batch). One chunk at least: it also has the gradients of the bias and of ALiBi.
constexpr int64_t dq_blocks(const AttentionParams& p, const BackwardIO& io, const Sizes& z) {
  const int64_t chunks = io.grad_q.present ? pieces_or_one(p.dim_qk, z.columns) : 1;
  return pieces(p.len_q, z.queries) * chunks * p.heads_q * p.batch;
}

// dK and dV: a block owns a chunk of dV or of dK; where half a chunk holds all columns of either, both. The fused block
// computes 4 products (S, dP, dV, dK), blocks of their own 5 (S twice), and every further chunk another S (dV) or S and
// dP (dK): the simplest way to any head dim without atomics or memory for the scores.
struct KeyParts {
  bool fused;
  int value_chunks, key_chunks;
  ATTN_HOST_DEVICE constexpr int count() const { return fused ? 1 : value_chunks + key_chunks; }
};

ATTN_HOST_DEVICE constexpr KeyParts key_parts(const AttentionParams& p, const BackwardIO& io, int columns) {
  return {io.grad_k.present && io.grad_v.present && 2 * p.dim_qk <= columns && 2 * p.dim_v <= columns,
          io.grad_v.present ? int(pieces(p.dim_v, columns)) : 0,
          io.grad_k.present ? int(pieces(p.dim_qk, columns)) : 0};
}

// dK/dV (key tile, part, KV head, batch); 0 where neither is wanted.
constexpr int64_t dkdv_blocks(const AttentionParams& p, const BackwardIO& io, const Sizes& z) {
  return pieces(p.len_k, z.keys) * key_parts(p, io, z.columns).count() * p.heads_kv * p.batch;
}

// dBias of a broadcast bias or float mask of this size (column tile, row tile, head, batch); one tile on reduced axes.
constexpr int64_t bias_blocks(const int64_t (&size)[4], const Sizes& z) {
  return size[0] * size[1] * (size[2] == 1 ? 1 : pieces(size[2], z.queries)) *
         (size[3] == 1 ? 1 : pieces(size[3], z.keys));
}

}  // namespace attn_ext::cuda::simt
