// Dropout of the probabilities in C fragments (or the A fragments packed of them).
#pragma once

#include "../../attention_params.h"
#include "fragment.cuh"
#include "philox.cuh"

namespace attn_ext::cuda {

// The random numbers of one (batch, query head).
struct DropoutNumbers {
  uint64_t key;
  uint32_t threshold, head, batch;

  __device__ __forceinline__ DropoutNumbers(const Dropout& dropout, int b, int h)
      : key(dropout.threshold ? dropout.key() : 0), threshold(dropout.threshold), head(h), batch(b) {}

  // The numbers of query `row` for 32 keys from key0 on, a multiple of 8: word[n] has the two that this lane's columns
  // of key fragment n need, the even column's in the low half. One call of Philox serves the eight keys of a fragment's
  // row, so each lane of the quad makes the call of one fragment of four.
  __device__ __forceinline__ void quad_numbers(uint32_t (&word)[4], int row, int key0) const {
    const Philox4 own = philox(key, uint32_t(key0) / 8 + threadIdx.x % 4, uint32_t(row), head, batch);
#pragma unroll
    for (int i = 0; i < 4; i++) word[i] = own.word[i];
    quad_transpose(word);
  }

  __device__ __forceinline__ bool keep_low(uint32_t word) const { return (word & 0xffffu) >= threshold; }
  __device__ __forceinline__ bool keep_high(uint32_t word) const { return word >> 16 >= threshold; }
};

}  // namespace attn_ext::cuda
