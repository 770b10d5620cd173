// The order in which blocks of the Hopper backward add to dQ (csrc/cuda/sm90/backward_order.h). Prints, of many problems:
// in how many a block would not find its turn, how many visits there were, and the longest wait of any block, in tiles,
// beyond one tile for each block before it in its head; then how much waiting costs on a GPU.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "cuda/sm90/backward_order.h"

using namespace attn_ext;

// Two heads of queries a KV head, on 132 multiprocessors where the next in turn can add 0.8 tiles' time after the one before:
// how much longer all takes than without an order. Negative: if a block is not there once, or before one with smaller keys.
double schedule(int len, Causal causal) {
  constexpr int kKeys = 128, kQueries = 80, kBlocks = 132;
  constexpr double kHandOver = 0.8;
  AttentionParams p;
  p.batch = 12;
  p.heads_q = 22;
  p.heads_kv = 11;
  p.len_q = p.len_k = len;
  p.dim_qk = p.dim_v = 128;
  p.causal = causal;
  const int blocks = (len + kKeys - 1) / kKeys, tiles = (len + kQueries - 1) / kQueries;
  double took[2];
  for (const bool ordered : {false, true}) {
    std::vector<double> free_at(kBlocks), added(int(p.batch * p.heads_kv) * tiles * 2);
    std::vector<int> next(p.batch * p.heads_kv);
    for (int number = 0; number < p.batch * p.heads_kv * blocks; number++) {
      const auto own = cuda::sm90::key_block_of_number(p, number, kKeys);
      const int head = own.batch * int(p.heads_kv) + own.head_kv;
      if (own.first_key != kKeys * next[head]++) return -1;
      double& now = *std::min_element(free_at.begin(), free_at.end());
      const cuda::sm90::QueryTiles seen(cuda::Visibility(p, own.batch), own.first_key, kKeys, kQueries);
      for (int tile = seen.end - 1; tile >= seen.begin; tile--) {
        for (int of_group = 0; of_group < 2; of_group++) {
          double& last = added[(head * tiles + tile) * 2 + of_group];
          now += 1;
          if (ordered) now = std::max(now, last + kHandOver);
          last = now;
        }
      }
    }
    if (next != std::vector<int>(next.size(), blocks)) return -1;
    took[ordered] = *std::max_element(free_at.begin(), free_at.end());
  }
  return took[1] / took[0];
}

int main() {
  constexpr int kKeys = 128, kQueries = 80;
  int wrong = 0, most_behind = 0;
  long visits = 0;
  int64_t key_length, query_length;
  for (const int len_q : {1, 79, 80, 81, 400, 1000}) {
    for (const int len_k : {1, 127, 128, 129, 500, 1000}) {
      for (const Causal causal : {Causal::kNone, Causal::kUpperLeft, Causal::kLowerRight}) {
        for (const int left : {-1, 0, 60, 300}) {
          for (const int right : {-1, 0, 60, 300}) {
            for (const int missing : {0, 1, 150, 2000}) {
              AttentionParams p;
              p.batch = p.heads_q = p.heads_kv = 1;
              p.len_q = len_q;
              p.len_k = len_k;
              p.causal = causal;
              p.window_left = left;
              p.window_right = right;
              key_length = std::max(0, len_k - missing);
              query_length = std::max(0, len_q - missing / 2);
              p.key_lengths = &key_length;
              p.query_lengths = &query_length;
              const cuda::Visibility visible(p, 0);
              const int tiles = (len_q + kQueries - 1) / kQueries;
              std::vector<int> turns(tiles),
                  free_at(tiles);  // adders so far; when the last of them has added
              for (int key = 0, block = 0; key < len_k; key += kKeys, block++) {
                const cuda::sm90::QueryTiles own(visible, key, kKeys, kQueries);
                int now = 0;  // in tiles; all blocks start together
                for (int tile = own.end - 1; tile >= own.begin; tile--) {
                  wrong += cuda::sm90::turn_of_block(visible, key, kKeys, tile, kQueries) != turns[tile]++;
                  now = std::max(now, free_at[tile]) + 1;
                  free_at[tile] = now;
                  visits++;
                }
                if (own.begin < own.end)
                  most_behind = std::max(most_behind, now - (own.end - own.begin) - block);
              }
            }
          }
        }
      }
    }
  }
  std::printf("%d %ld %d\n", wrong, visits, most_behind);
  for (const int len : {2048, 8192}) {
    for (const Causal causal : {Causal::kNone, Causal::kLowerRight})
      std::printf("%.4f\n", schedule(len, causal));
  }
}
