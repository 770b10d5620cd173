// How evenly the persistent blocks of the Hopper forward share a problem: prints whether every tile is taken once,
// and the tiles of keys of the busiest block over the mean.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "cuda/sm90/forward_scheduler.h"
#include "cuda/tile/visibility.cuh"

using namespace attn_ext;

int main() {
  constexpr int kRows = 128, kKeys = 128;
  for (const Causal causal : {Causal::kNone, Causal::kLowerRight}) {
    for (const int heads : {32, 64}) {
      AttentionParams p;
      p.batch = 1;
      p.heads_q = p.heads_kv = heads;
      p.len_q = p.len_k = 8192;
      p.dim_qk = p.dim_v = 128;
      p.causal = causal;
      const uint32_t tiles = heads * 8192 / kRows, blocks = 132;
      std::vector<int> taken(tiles);
      double most = 0, all = 0;
      for (uint32_t block = 0; block < blocks; block++) {
        cuda::sm90::BlockTiles tiles_of_block{block, blocks};
        double own = 0;
        for (uint32_t tile = tiles_of_block.next(); tile < tiles; tile = tiles_of_block.next()) {
          const cuda::BlockPlace place = cuda::sm90::place_of_tile(p, tile, kRows);
          taken[place.head * 8192 / kRows + place.row / kRows]++;
          const cuda::KeyTiles keys(cuda::Visibility(p, place.batch), place.row, kRows, kKeys);
          own += keys.last - keys.first + 1;
        }
        most = std::max(most, own);
        all += own;
      }
      const bool once = std::all_of(taken.begin(), taken.end(), [](int n) { return n == 1; });
      std::printf("%d %.4f\n", once, most * blocks / all);
    }
  }
}
