// Forward: online softmax over key blocks (Milakov and Gimelshein 2018; Dao et al., FlashAttention, 2022).
//
//   for each tile of queries:
//     for each block of keys:  S = logits(Q K^T); the online softmax of online_softmax.h makes P of it; O += dropout(P) V
namespace attn_ext {
namespace ATTN_ISA {

template <class T, class Products>
class ForwardUnit {
 public:
  ForwardUnit(const AttentionParams& p, const ForwardOutput& o, int64_t b, int64_t h, int64_t i0,
              int64_t rows, bool* in_range)
      : p_(p), o_(o), b_(b), h_(h), i0_(i0), rows_(rows), scores_(p, b, h), products_(p, rows, in_range) {}

  void run() {
    const int64_t h_kv = h_ / p_.group();
    const int64_t padded_rows = round_up(rows_, Products::kStripRows);
    static_assert(Products::kStripRows % kLanes<T> == 0,
                  "the vectors of a strip's rows do not reach into the next one");
    T* top = scratch<T>(kState, 2 * padded_rows);
    state_ = {top, top + padded_rows, scratch<T>(kOutput, padded_rows * products_.ld_out), products_.ld_out};
    state_.start(padded_rows);
    score_ = scratch<T>(kScore, Products::kStripRows * kBlockKeys);

    const int64_t valid =
        max(0, min(rows_, scores_.valid_queries() - i0_));  // rows past query_lengths are not read
    products_.set_queries(b_, h_, i0_, valid);
    const KeyRange range = scores_.visible(i0_, valid);
    // To where a strip with the same last key would read in a longer unit: 0 * NaN must not depend on how units are cut.
    const int64_t end = min(round_up(range.end, Products::kKeyStep), scores_.valid_keys());
    for (int64_t j0 = range.begin / kBlockKeys * kBlockKeys; j0 < range.end; j0 += kBlockKeys) {
      const KeyRange keys = scores_.narrowed(i0_, valid, {j0, min(j0 + kBlockKeys, end)});
      if (keys.begin >= keys.end) continue;
      products_.set_keys(b_, h_kv, keys.begin, keys.end - keys.begin);
      for (int64_t r0 = 0; r0 < valid; r0 += Products::kStripRows) {
        const int64_t rows = min(Products::kStripRows, valid - r0);
        const KeyRange visible = scores_.visible(i0_ + r0, rows);
        if (visible.end <= keys.begin || visible.begin >= keys.end) continue;
        attend(r0, rows, keys.begin,
               products_.meet(
                   {max(visible.begin, keys.begin) - keys.begin, min(visible.end, keys.end) - keys.begin}));
      }
    }
    state_.write(p_, o_, b_, h_, i0_, 0, rows_);
  }

 private:
  // Rows r0 .. r0+rows of the unit meet some keys of the block that begins with key `block`.
  void attend(int64_t r0, int64_t rows, int64_t block, const KeyRange& keys) {
    const int64_t j0 = block + keys.begin, n = keys.end - keys.begin;
    products_.scores(r0, rows, keys, score_, scores_.term(i0_ + r0, j0));
    scores_.finish(score_, kBlockKeys, i0_ + r0, rows, j0, n, nullptr);
    bool& started = started_[r0 / Products::kStripRows];
    state_.template add<Products::kStripRows>(r0, rows, padded<T>(n), started, score_);
    for (int64_t r = 0; p_.dropout.threshold != 0 && r < rows; r++)
      drop<T>(p_.dropout, b_, h_, i0_ + r0 + r, j0, n, score_ + r * kBlockKeys);
    products_.add_values(rows, keys, score_, !started, state_.out + r0 * state_.ld);
    started = true;
  }

  const AttentionParams& p_;
  const ForwardOutput& o_;
  const int64_t b_, h_, i0_, rows_;
  const Scores<T> scores_;
  Products products_;
  OnlineSoftmax<T> state_ = {};
  T* score_ = nullptr;
  bool started_[Products::kUnitRows / Products::kStripRows] = {};  // strips that have met keys
};

// False if some number is out of the products' range: the results are then worth nothing.
template <class T, class Products>
bool forward(const AttentionParams& p, const ForwardOutput& o, const Threads& threads) {
  bool in_range = true;
  const int64_t rows = unit_rows(p, Products::kUnitRows, Products::kStripRows, threads.count);
  const int64_t tiles = ceil_div(p.len_q, rows), heads = p.batch * p.heads_q;
  for_each_unit(threads, tiles * heads, score_products(p), [&](int64_t unit) {
    // Head after head, whose keys then stay in the cache. Last query tiles first: under a causal mask they are the
    // longest, and the short ones fill the gaps.
    const int64_t tile = tiles - 1 - unit % tiles, bh = unit / tiles, i0 = tile * rows;
    ForwardUnit<T, Products>(p, o, bh / p.heads_q, bh % p.heads_q, i0, min(rows, p.len_q - i0), &in_range)
        .run();
  });
  return in_range;
}

}  // namespace ATTN_ISA
}  // namespace attn_ext
