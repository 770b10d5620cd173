// Forward for up to kFewQueries queries a head, as in decoding: what takes the time is to read K and V, once. A unit reads a
// stretch of the keys of one KV head for all query heads of its group. Where there are few heads the keys are cut into
// several stretches, whose results join in the order of the keys. The cut depends on the shapes of a sample alone, so a
// result depends neither on the number of threads nor on the rest of the batch.
namespace attn_ext {
namespace ATTN_ISA {

template <class T>
class Decode {
 public:
  Decode(const AttentionParams& p, const ForwardOutput& o)
      : p_(p), o_(o), rows_(p.group() * p.len_q), room_(round_up(rows_, kLanes<T>) + kLanes<T>),
        ld_(padded<T>(p.dim_v)) {
    // A stretch of 512 keys takes far longer than its unit costs.
    const int64_t wanted = ceil_div(kUnits, max(1, p.heads_kv));
    stretch_ = round_up(max(512, ceil_div(p.len_k, wanted)), kBlockKeys);
    stretches_ = max(1, ceil_div(p.len_k, stretch_));
  }
  Decode(const Decode&) = delete;
  ~Decode() { delete[] parts_; }

  void run(const Threads& threads) {
    const int64_t heads = p_.batch * p_.heads_kv;
    if (stretches_ == 1 || heads >= kUnits) {
      for_each_unit(threads, heads, score_products(p_), [&](int64_t head) {
        T* memory = scratch<T>(kState, 2 * part_size());
        const OnlineSoftmax<T> state = state_in(memory), more = state_in(memory + part_size());
        for (int64_t s = 0; s < stretches_; s++) {
          read_keys(head / p_.heads_kv, head % p_.heads_kv, s * stretch_, s == 0 ? state : more);
          if (s > 0) join(state, more);
        }
        write(head, state);
      });
      return;
    }
    parts_ = new T[size_t(heads * stretches_ * part_size())];
    for_each_unit(threads, heads * stretches_, score_products(p_), [&](int64_t unit) {
      const int64_t head = unit / stretches_, stretch = unit % stretches_;
      read_keys(head / p_.heads_kv, head % p_.heads_kv, stretch * stretch_, part(unit));
    });
    for (int64_t head = 0; head < heads; head++) {
      const OnlineSoftmax<T> state = part(head * stretches_);
      for (int64_t s = 1; s < stretches_; s++) join(state, part(head * stretches_ + s));
      write(head, state);
    }
  }

 private:
  static constexpr int64_t kUnits = 64;  // enough for many threads

  int64_t part_size() const { return 2 * room_ + rows_ * ld_; }
  OnlineSoftmax<T> state_in(T* memory) const { return {memory, memory + room_, memory + 2 * room_, ld_}; }
  OnlineSoftmax<T> part(int64_t unit) const { return state_in(parts_ + unit * part_size()); }

  // The rows of the group, head after head, meet keys begin .. begin+stretch_.
  ATTN_ONE_COPY void read_keys(int64_t b, int64_t h_kv, int64_t begin, const OnlineSoftmax<T>& state) const {
    state.start(room_);
    for (int64_t x = 0; x < rows_ * ld_; x++) state.out[x] = T(0);
    const int64_t h0 = h_kv * p_.group(), ld_q = padded<T>(p_.dim_qk);
    const Scores<T> first(p_, b, h0);
    const int64_t queries = min(p_.len_q, first.valid_queries());
    if (queries == 0) return;
    T* q = scratch<T>(kQuery, rows_ * ld_q);
    for (int64_t g = 0; g < p_.group(); g++)
      pack_rows<T>(p_.q, b, h0 + g, 0, queries, p_.dim_qk, T(p_.scale), q + g * p_.len_q * ld_q, ld_q);
    T* score = scratch<T>(kScore, kFewQueries * kBlockKeys);
    const KeyRange visible = first.visible(0, queries);
    const int64_t end = min(visible.end, begin + stretch_);
    for (int64_t block = max(begin, visible.begin) / kBlockKeys * kBlockKeys; block < end;
         block += kBlockKeys) {
      // A multiple of 8 in front, for dropout's groups of keys.
      const KeyRange keys = {max(block, visible.begin / 8 * 8), min(block + kBlockKeys, end)};
      // A block mask may hide the whole block from one head and not from another: then each row is for itself.
      const int64_t together = p_.block_mask.present() ? 1 : kFewQueries;
      for (int64_t r0 = 0; r0 < rows_; r0 += together) {
        if (p_.block_mask.present() &&
            !scores_of(b, h_kv, r0).meet(r0 % p_.len_q, 1, keys.begin, keys.end - keys.begin))
          continue;
        attend(b, h_kv, keys, r0, min(together, rows_ - r0), q + r0 * ld_q, ld_q, score, state);
      }
    }
  }

  void attend(int64_t b, int64_t h_kv, const KeyRange& keys, int64_t r0, int64_t rows, const T* q,
              int64_t ld_q, T* score, const OnlineSoftmax<T>& state) const {
    const int64_t j0 = keys.begin, n = keys.end - keys.begin;
    FewQueries<T>::scores(p_.k, b, h_kv, j0, n, p_.dim_qk, q, ld_q, rows, score, kBlockKeys);
    for (int64_t r = 0; r < rows; r++) {
      scores_of(b, h_kv, r0 + r)
          .finish(score + r * kBlockKeys, kBlockKeys, (r0 + r) % p_.len_q, 1, j0, n, nullptr);
    }
    state.template add<kFewQueries>(r0, rows, padded<T>(n), true, score);
    for (int64_t r = 0; p_.dropout.threshold != 0 && r < rows; r++) {
      drop<T>(p_.dropout, b, head_of(h_kv, r0 + r), (r0 + r) % p_.len_q, j0, n, score + r * kBlockKeys);
    }
    FewQueries<T>::values(p_.v, b, h_kv, j0, n, p_.dim_v, score, kBlockKeys, rows, state.out + r0 * ld_, ld_);
  }

  int64_t head_of(int64_t h_kv, int64_t row) const { return h_kv * p_.group() + row / p_.len_q; }
  Scores<T> scores_of(int64_t b, int64_t h_kv, int64_t row) const {
    return Scores<T>(p_, b, head_of(h_kv, row));
  }

  // Adds the keys that `more` has met.
  ATTN_ONE_COPY void join(const OnlineSoftmax<T>& state, const OnlineSoftmax<T>& more) const {
    for (int64_t r = 0; r < rows_; r++) {
      const T top = more.top[r] > state.top[r] ? more.top[r] : state.top[r];
      const T from = top == -infinity<T>() ? T(0) : top;
      const T old_weight = exp<T>(splat<T>(state.top[r] - from))[0],
              weight = exp<T>(splat<T>(more.top[r] - from))[0];
      state.top[r] = top;
      state.sum[r] = state.sum[r] * old_weight + more.sum[r] * weight;
      for (int64_t d = r * ld_; d < (r + 1) * ld_; d += kLanes<T>)
        store<T>(state.out + d, load(state.out + d) * old_weight + load(more.out + d) * weight);
    }
  }

  ATTN_ONE_COPY void write(int64_t head, const OnlineSoftmax<T>& state) const {
    for (int64_t r = 0; r < rows_; r += p_.len_q) {
      state.write(p_, o_, head / p_.heads_kv, head_of(head % p_.heads_kv, r), 0, r, p_.len_q);
    }
  }

  const AttentionParams& p_;
  const ForwardOutput& o_;
  const int64_t rows_, room_,
      ld_;  // query rows of a group; numbers in a row of maxima or sums; of an output row
  int64_t stretch_, stretches_;
  T* parts_ = nullptr;  // of each unit
};

}  // namespace ATTN_ISA
}  // namespace attn_ext
