// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed and counted as
// csrc/cpu/scores.h does it, so that CPU and GPU drop the same probabilities: key from the generator's state, counter
// (key position / 8, query, head, batch); eight 16-bit numbers a call, for eight neighbouring keys.
#pragma once

#include <cstdint>

namespace attn_ext::cuda {

struct Philox4 {
  uint32_t word[4];  // number j % 8 is the low (even) or high (odd) half of word (j % 8) / 2
};

__device__ __forceinline__ Philox4 philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t key0 = uint32_t(key), key1 = uint32_t(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = uint64_t(c0) * 0xD2511F53u, product1 = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(product1 >> 32) ^ c1 ^ key0;
    c1 = uint32_t(product1);
    c2 = uint32_t(product0 >> 32) ^ c3 ^ key1;
    c3 = uint32_t(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace attn_ext::cuda
