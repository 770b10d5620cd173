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

// The same with each matrix transposed: a row in shared memory is a column of the registers.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t row_address, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
               "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// `bytes` of shared memory to global memory, added to the floats there if `add`; they belong to this thread's open
// group of bulk copies. Multiples of 16, as are both addresses.
__device__ __forceinline__ void bulk_store(float* global, uint32_t shared, int bytes, bool add) {
  if (add) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
                 "r"(shared), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared),
                 "r"(bytes)
                 : "memory");
  }
}

// The bulk stores since the last commit become a group.
__device__ __forceinline__ void commit_bulk_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this thread's bulk stores have read their shared memory.
__device__ __forceinline__ void wait_for_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until they are done.
__device__ __forceinline__ void wait_for_bulk_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace attn_ext::cuda::sm90
