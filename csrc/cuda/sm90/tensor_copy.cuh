// Tiles of rows by TMA: one thread starts the copy of a whole tile, the hardware computes addresses, swizzles, and puts
// zeros where the tensor ends (PTX ISA, "cp.async.bulk.tensor").
//
// A tile lies in shared memory as panels of 64 columns, [panel][row][128 bytes]. Within each eight rows the 16-byte
// pieces of row r change places, piece c to c ^ r % 8, so that eight rows of one column fall into different banks: the
// "128-byte swizzle" that wgmma reads too. Tiles start at multiples of 1024 bytes, where the pattern starts.
#pragma once

#include "barriers.cuh"
#include "params.h"

namespace attn_ext::cuda::sm90 {

// The copy of one box of a tensor map of (column, row, head, batch); `full` counts the bytes.
__device__ __forceinline__ void tensor_copy(uint32_t shared, const TensorMapBytes& map, Barrier full,
                                            int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(&map), "r"(full.address), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Rows row .. row + Rows - 1 and the bucket's columns: tile_bytes(Rows, HeadDim) bytes, which `full` must expect. What
// lies outside the tensor becomes zero, and counts as bytes that arrive.
template <int Rows, int HeadDim>
__device__ __forceinline__ void copy_tile(uint32_t shared, const TensorMapBytes& map, Barrier full, int row,
                                          int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < panels(HeadDim); panel++) {
    tensor_copy(shared + panel * panel_bytes(Rows), map, full, panel * kPanelColumns, row, head, batch);
  }
}

// `bytes` as they are, a multiple of 16, as are both addresses.
__device__ __forceinline__ void bulk_copy(uint32_t shared, const void* global, int bytes, Barrier full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(full.address)
      : "memory");
}

// Where 16-byte piece `piece` (of 8) of a row of a panel lies, from the panel's start.
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
  return row * kPanelRowBytes + ((piece ^ row) % 8) * 16;
}

// Four 8 x 8 matrices of halves to shared memory, the inverse of ldmatrix_x4: lanes 8m .. 8m + 7 give the row addresses
// (16 bytes each) of matrix m.
__device__ __forceinline__ void stmatrix_x4(uint32_t row_address, uint32_t m0, uint32_t m1, uint32_t m2,
                                            uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(m0),
               "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace attn_ext::cuda::sm90
