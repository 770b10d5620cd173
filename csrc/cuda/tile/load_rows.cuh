// Copies of rows of halves from global to shared memory, 16 bytes a lane, with zero fill: beyond column D up to the
// bucket, and beyond the last row that exists. Nothing outside the tensor is read.
#pragma once

#include "../../attention_params.h"
#include "async_copy.cuh"
#include "math.cuh"
#include "shared_layout.h"
#include "view.cuh"

namespace attn_ext::cuda {

// How `Threads` threads share tiles of `HeadDim` columns: neighbouring lanes take neighbouring chunks of 16 bytes.
template <int HeadDim, int Threads>
struct RowLanes {
  static constexpr int kChunks = HeadDim / 8;
  // Lanes a row: the power of two in its chunks (12 = 4 * 3).
  static constexpr int kLanes = kChunks & -kChunks;
  static constexpr int kColumns = kChunks / kLanes;     // chunks a lane copies of each of its rows
  static constexpr int kRowsAtOnce = Threads / kLanes;  // rows all threads copy together
  static constexpr int kRowBytes = shared_row_bytes(HeadDim);

  // Rows are an odd multiple of 16 bytes apart, 5 mod 8 of them at D 32 and 96. There eight lanes write chunks of two
  // rows, which share no bank if the rows are four apart: of each eight rows, the order is 0, 4, 1, 5, 2, 6, 3, 7.
  __device__ static int row() {
    const int row = threadIdx.x / kLanes;
    return kLanes == 4 ? row / 8 * 8 + row % 2 * 4 + row % 8 / 2 : row;
  }
  __device__ static int byte() { return threadIdx.x % kLanes * 16; }  // of the lane's first chunk
};

// This thread's share of the rows of one (batch, head), `Rows` at a time.
template <int HeadDim, int Rows, int Threads>
struct RowLoader {
  using Lanes = RowLanes<HeadDim, Threads>;
  static_assert(Rows % Lanes::kRowsAtOnce == 0, "a tile is a whole number of passes");
  static constexpr int kPasses = Rows / Lanes::kRowsAtOnce;

  const char* source;                // this lane's first chunk of the tile's rows
  int64_t row_bytes;                 // from row to row in global memory
  int chunk_bytes[Lanes::kColumns];  // how much of each of the lane's chunks lies below column `dim`

  __device__ __forceinline__ RowLoader(const StridedView& view, int64_t b, int64_t h, int64_t row, int dim)
      : source(element<2>(view, b, h, row + Lanes::row(), 0) + Lanes::byte()), row_bytes(view.stride[2] * 2) {
    keep_in_register(row_bytes);
#pragma unroll
    for (int c = 0; c < Lanes::kColumns; c++) {
      const int left = 2 * dim - Lanes::byte() - c * Lanes::kLanes * 16;
      chunk_bytes[c] = left < 0 ? 0 : left > 16 ? 16 : left;
      keep_in_register(chunk_bytes[c]);
    }
  }

  // Where this thread's first chunk goes in a tile at `shared`.
  __device__ __forceinline__ static uint32_t target(uint32_t shared) {
    uint32_t address = shared + Lanes::row() * Lanes::kRowBytes + Lanes::byte();
    keep_in_register(address);
    return address;
  }

  // On to the tile before, or several tiles back.
  __device__ __forceinline__ void step_back(bool really = true) { source -= really ? Rows * row_bytes : 0; }

  __device__ __forceinline__ void step_back_by(int tiles) {
    source -= uint32_t(tiles * Rows) * uint64_t(row_bytes);
  }

  // A tile whose rows all exist. `shared`: what target() gave.
  __device__ __forceinline__ void load(uint32_t shared) const {
    const char* from = source;
#pragma unroll
    for (int i = 0; i < kPasses; i++) {
#pragma unroll
      for (int c = 0; c < Lanes::kColumns; c++) {
        copy_async_16(shared + i * Lanes::kRowsAtOnce * Lanes::kRowBytes + c * Lanes::kLanes * 16,
                      from + c * Lanes::kLanes * 16, chunk_bytes[c]);
      }
      from += Lanes::kRowsAtOnce * row_bytes;
      keep_in_register(from);  // one address that grows, instead of a multiple of the stride for each pass
    }
  }

  // A tile of which only the first `rows` rows exist; the others become zero. `valid`: any address of the tensor.
  __device__ __forceinline__ void load(uint32_t shared, int rows, const void* valid) const {
    const char* from = source;
#pragma unroll
    for (int i = 0; i < kPasses; i++) {
      const bool exists = Lanes::row() + i * Lanes::kRowsAtOnce < rows;
#pragma unroll
      for (int c = 0; c < Lanes::kColumns; c++) {
        const bool some = exists && chunk_bytes[c] > 0;
        copy_async_16(shared + i * Lanes::kRowsAtOnce * Lanes::kRowBytes + c * Lanes::kLanes * 16,
                      some ? from + c * Lanes::kLanes * 16 : valid, some ? chunk_bytes[c] : 0);
      }
      from += Lanes::kRowsAtOnce * row_bytes;
    }
  }
};

}  // namespace attn_ext::cuda
