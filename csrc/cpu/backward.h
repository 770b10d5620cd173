// Backward: gradients of q, k, v, ALiBi slopes, sinks, and of a bias that has every query, key and head; bias_backward.h
// has the other biases.
//
// dK and dV of a key block add up over queries; dQ of a query tile adds up over keys. One pass over all tiles serves
// both when a thread owns a whole KV head: five products a tile. With fewer KV heads than threads, dK/dV and dQ take
// a pass each (seven products) whose units are key blocks and query tiles. Both ways add the same numbers in the same
// order, so the result does not depend on the number of threads, and no atomics are needed.
namespace attn_ext {
namespace ATTN_ISA {

template <class T, class Products>
class Backward {
  using Tile = GradTile<T, Products>;
  static constexpr int64_t kRowsOfUnit = 192;  // of a unit that makes dQ, for which it packs K and V once
  static_assert(kRowsOfUnit % Products::kRows == 0 && kRowsOfUnit % BlockMask::kSize == 0,
                "both routes have the same tiles");

 public:
  Backward(const AttentionParams& p, const BackwardIO& io, const RowState<T>& state, double* alibi_parts)
      : p_(p), io_(io), state_(state), alibi_parts_(alibi_parts),
        key_blocks_(ceil_div(p.len_k, Products::kKeys)), rows_of_tile_(tile_rows(p, Products::kRows)),
        want_q_(io.grad_q.present), want_k_(io.grad_k.present), want_v_(io.grad_v.present),
        want_alibi_(io.grad_alibi_slopes.present) {
    add_bias(io.grad_bias, io.bias_size);
    add_bias(io.grad_float_mask, io.float_mask_size);
  }

  // Whether a bias takes its gradient from the tiles as they come: each dS belongs to one element of it, or to one of
  // each sample. Then it costs no product of its own.
  static bool takes_tiles(const AttentionParams& p, const int64_t (&size)[4]) {
    return p.batch > 0 && (size[0] == p.batch || size[0] == 1) && size[1] == p.heads_q &&
           size[2] == p.len_q && size[3] == p.len_k;
  }

  void run(const Threads& threads) {
    const bool want_keys = want_k_ || want_v_ || want_alibi_ || biases_ > 0;
    if (!want_keys && !want_q_) return;
    // A unit has one sample, or all of them in turn, where a bias adds up over samples.
    const int64_t samples = shared_bias_ ? p_.batch : 1, batches = p_.batch / max(samples, 1);
    const int64_t kv_heads = batches * p_.heads_kv, products = score_products(p_);
    if (want_keys && want_q_ && kv_heads >= threads.count) {
      for_each_unit(threads, kv_heads, products, [&](int64_t unit) {
        for (int64_t s = 0; s < samples; s++) whole_head(unit / p_.heads_kv + s, unit % p_.heads_kv);
      });
      return;
    }
    if (want_keys) {
      // First key blocks first: under a causal mask they are the longest.
      for_each_unit(threads, key_blocks_ * kv_heads, products, [&](int64_t unit) {
        Tile tile(p_, io_, state_);
        const int64_t head = unit % kv_heads;
        for (int64_t s = 0; s < samples; s++) {
          key_block(tile, head / p_.heads_kv + s, head % p_.heads_kv, unit / kv_heads, nullptr, 0, 0);
        }
      });
    }
    if (want_q_) {
      const int64_t heads = p_.batch * p_.heads_q, tiles = ceil_div(p_.len_q, kRowsOfUnit);
      for_each_unit(threads, tiles * heads, products, [&](int64_t unit) {
        const int64_t i0 = (tiles - 1 - unit / heads) * kRowsOfUnit, head = unit % heads;
        query_rows(head / p_.heads_q, head % p_.heads_q, i0, min(kRowsOfUnit, p_.len_q - i0));
      });
    }
  }

 private:
  // All gradients of KV head h_kv and its group of query heads. dQ adds up in place where the gradient tensor is made
  // of T and its rows hold whole vectors, else in scratch (G, Nq, ld).
  void whole_head(int64_t b, int64_t h_kv) {
    Tile tile(p_, io_, state_);
    const int64_t group = p_.group(), ld_q = tile.products.ld_q;
    const bool in_place = size_of(io_.grad_q.dtype) == int64_t(sizeof(T)) && ld_q == p_.dim_qk;
    const int64_t padded_rows = round_up(p_.len_q, Products::kRows);
    T* grad_q = in_place ? reinterpret_cast<T*>(io_.grad_q.at(b, h_kv * group, 0, 0))
                         : scratch<T>(kGradQuery, group * padded_rows * ld_q);
    const int64_t head_stride = in_place ? io_.grad_q.stride[1] : padded_rows * ld_q;
    const int64_t ld = in_place ? io_.grad_q.stride[2] : ld_q;
    for (int64_t g = 0; g < group; g++) {
      for (int64_t i = 0; i < p_.len_q; i++) clear(grad_q + g * head_stride + i * ld, ld_q);
    }
    for (int64_t block = 0; block < key_blocks_; block++)
      key_block(tile, b, h_kv, block, grad_q, head_stride, ld);
    for (int64_t g = 0; g < group; g++) {
      write_scaled(io_.grad_q, b, h_kv * group + g, 0, p_.len_q, p_.dim_qk, grad_q + g * head_stride, ld,
                   T(p_.scale));
    }
  }

  // dK, dV, dBias and ALiBi's share of one key block; adds to dQ when `grad_q` is given.
  void key_block(Tile& tile, int64_t b, int64_t h_kv, int64_t block, T* grad_q, int64_t head_stride,
                 int64_t ld) {
    const int64_t j0 = block * Products::kKeys, keys = min(Products::kKeys, p_.len_k - j0);
    const int64_t n = max(0, min(keys, p_.valid_keys(b) - j0)), group = p_.group();
    Products& products = tile.products;
    T* grad_k = scratch<T>(kGradKey, Products::kKeys * products.ld_q);
    T* grad_v = scratch<T>(kGradValue, Products::kKeys * products.ld_v);
    clear(grad_k, Products::sums_of_keys(keys) * products.ld_q);
    clear(grad_v, Products::sums_of_keys(keys) * products.ld_v);
    if (n > 0) tile.set_keys(b, h_kv, j0, n, grad_q != nullptr);
    for (int64_t g = 0; g < group; g++) {
      const int64_t h = h_kv * group + g;
      const Scores<T> scores(p_, b, h);
      clear_bias(b, h, j0, keys);
      double alibi = 0;
      for (int64_t i0 = 0; n > 0 && i0 < scores.valid_queries(); i0 += rows_of_tile_) {
        const int64_t rows = min(rows_of_tile_, scores.valid_queries() - i0);
        if (!scores.meet(i0, rows, j0, n)) continue;
        tile.set_queries(b, h, i0, rows, true);
        const auto use = [&](const Strip& strip) {
          if (want_alibi_) alibi -= weighted_distance(tile, strip);
          add_to_bias(tile, b, h, strip);
        };
        tile.compute(scores, use, grad_q == nullptr ? nullptr : grad_q + g * head_stride + i0 * ld, ld);
        if (want_v_) products.add_grad_v(grad_v);
        if (want_k_) products.add_grad_k(grad_k);
      }
      if (want_alibi_) alibi_parts_[(b * p_.heads_q + h) * key_blocks_ + block] = alibi;
    }
    if (want_k_)
      write_keys(products, io_.grad_k, b, h_kv, j0, keys, p_.dim_qk, grad_k, products.ld_q, T(p_.scale));
    if (want_v_) write_keys(products, io_.grad_v, b, h_kv, j0, keys, p_.dim_v, grad_v, products.ld_v, T(1));
  }

  // dQ of rows i0 .. i0+rows of head h.
  void query_rows(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    Tile tile(p_, io_, state_);
    const Scores<T> scores(p_, b, h);
    const int64_t ld = tile.products.ld_q;
    T* grad_q = scratch<T>(kGradQuery, kRowsOfUnit * ld);
    clear(grad_q, rows * ld);
    const int64_t valid = max(0, min(rows, scores.valid_queries() - i0)), keys = p_.valid_keys(b);
    const KeyRange range = scores.visible(i0, valid);
    for (int64_t j0 = range.begin / Products::kKeys * Products::kKeys; j0 < range.end;
         j0 += Products::kKeys) {
      const int64_t n = min(Products::kKeys, keys - j0);
      if (!scores.meet(i0, valid, j0, n)) continue;
      tile.set_keys(b, h / p_.group(), j0, n, true);
      for (int64_t r0 = 0; r0 < valid; r0 += rows_of_tile_) {
        const int64_t rows_here = min(rows_of_tile_, valid - r0);
        if (!scores.meet(i0 + r0, rows_here, j0, n)) continue;
        tile.set_queries(b, h, i0 + r0, rows_here, false);
        tile.compute(scores, [](const Strip&) {}, grad_q + r0 * ld, ld);
      }
    }
    write_scaled(io_.grad_q, b, h, i0, rows, p_.dim_qk, grad_q, ld, T(p_.scale));
  }

  void add_bias(const StridedView& grad, const int64_t (&size)[4]) {
    if (!grad.present || !takes_tiles(p_, size)) return;
    bias_[biases_++] = &grad;
    shared_bias_ = shared_bias_ || adds_up(grad);
  }

  // A gradient that adds up over samples has batch stride 0: the first sample clears it for all.
  bool adds_up(const StridedView& bias) const { return p_.batch > 1 && bias.stride[0] == 0; }

  void clear_bias(int64_t b, int64_t h, int64_t j0, int64_t keys) const {
    for (int t = 0; t < biases_; t++) {
      if (b > 0 && adds_up(*bias_[t])) continue;
      for (int64_t i = 0; i < p_.len_q; i++)
        __builtin_memset(bias_[t]->at(b, h, i, j0), 0, size_t(keys * size_of(bias_[t]->dtype)));
    }
  }

  void add_to_bias(const Tile& tile, int64_t b, int64_t h, const Strip& s) const {
    for (int t = 0; t < biases_; t++) {
      for (int64_t r = 0; r < s.rows; r++) {
        void* row = bias_[t]->at(b, h, tile.i0 + s.row + r, tile.j0 + s.key);
        const T* grad = tile.grad + r * Products::kStripKeys;
        if (adds_up(*bias_[t])) {
          for (int64_t j = 0; j < s.keys; j++) static_cast<T*>(row)[j] += grad[j];
        } else {
          write_row<T>(row, bias_[t]->dtype, s.keys, grad);
        }
      }
    }
  }

  // sum dS * |i + Nk - Nq - j|, in double: it adds up over the whole matrix.
  double weighted_distance(const Tile& tile, const Strip& s) const {
    double sum = 0;
    for (int64_t r = 0; r < s.rows; r++) {
      const T* row = tile.grad + r * Products::kStripKeys;
      const int64_t center = tile.i0 + s.row + r + p_.len_k - p_.len_q - tile.j0 - s.key;
      for (int64_t j = 0; j < s.keys; j++) sum += double(row[j]) * double(Scores<T>::distance(center - j));
    }
    return sum;
  }

  static void clear(T* x, int64_t n) {
    for (int64_t d = 0; d < n; d++) x[d] = T(0);
  }

  // What the products have summed up for the keys of a block, in the order they like.
  static void write_keys(const Products& products, const StridedView& m, int64_t b, int64_t h, int64_t j0,
                         int64_t keys, int64_t width, T* grad, int64_t ld, T factor) {
    for (int64_t j = 0; j < keys; j += Products::kKeysWritten) {
      write_scaled(m, b, h, j0 + j, min(Products::kKeysWritten, keys - j), width,
                   products.key_rows(grad, ld, j), ld, factor);
    }
  }

  static void write_scaled(const StridedView& m, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t width,
                           T* rows, int64_t ld, T factor) {
    for (int64_t i = 0; i < n; i++) {
      T* row = rows + i * ld;
      if (factor != T(1)) {
        for (int64_t d = 0; d < width; d++) row[d] *= factor;
      }
      void* target = m.at(b, h, i0 + i, 0);
      if (target != row) write_row<T>(target, m.dtype, width, row);
    }
  }

  const AttentionParams& p_;
  const BackwardIO& io_;
  const RowState<T>& state_;
  double* const alibi_parts_;
  const int64_t key_blocks_, rows_of_tile_;
  const bool want_q_, want_k_, want_v_, want_alibi_;
  const StridedView* bias_[2] = {};  // gradients that take tiles, last stride 1; in T where they add up
  int biases_ = 0;
  bool shared_bias_ = false;
};

// lse and delta of every row; the sinks' gradient falls out on the way:
// d(sink) = -sum_i exp(sink - lse_i) * delta_i, since the sink's own value is 0.
template <class T>
void prepare_rows(const AttentionParams& p, const BackwardIO& io, const RowState<T>& state,
                  double* sink_parts, const Threads& threads) {
  for_each_unit(threads, p.batch * p.heads_q, p.batch * p.heads_q * p.len_q * p.dim_v, [&](int64_t unit) {
    const int64_t b = unit / p.heads_q, h = unit % p.heads_q, valid = p.valid_queries(b);
    const int64_t ld = padded<T>(p.dim_v);
    T *o = scratch<T>(kOutput, 2 * ld), *g = o + ld;
    const T sink = p.sinks.present ? read_one<T>(p.sinks.at(0, h, 0, 0), p.sinks.dtype) : -infinity<T>();
    double sink_grad = 0;
    for (int64_t i = 0; i < p.len_q; i++) {
      const T* parts = reinterpret_cast<const T*>(io.lse_parts.at(b, h, i, 0));
      const bool empty = parts[0] == -infinity<T>();
      T delta = 0;
      if (i < valid && !empty) {
        pack_rows<T>(io.out, b, h, i, 1, p.dim_v, T(1), o, ld);
        pack_rows<T>(io.grad_out, b, h, i, 1, p.dim_v, T(1), g, ld);
        Vec<T> sum = {}, nonzero = {};
        for (int64_t d = 0; d < ld; d += kLanes<T>) {
          const Vec<T> out = load(o + d);
          sum += out * load(g + d);
          nonzero = out != Vec<T>{} ? Vec<T>{} + T(1) : nonzero;
        }
        // out 0: a sink and no key, say. The row's gradient does not matter then, not even NaN.
        if (reduce_add<T>(nonzero) != T(0)) delta = reduce_add<T>(sum);
      }
      if (io.grad_lse.present) delta -= read_one<T>(io.grad_lse.at(b, h, i, 0), io.grad_lse.dtype);
      const int64_t row = unit * p.len_q + i;
      state.max[row] = empty ? infinity<T>() : parts[0];
      state.log_sum[row] = parts[1];
      state.delta[row] = delta;
      if (delta - delta != T(0)) __atomic_store_n(state.in_range, false, __ATOMIC_RELAXED);
      if (sink != -infinity<T>()) {
        sink_grad -= double(exp<T>(splat<T>(sink - parts[0] - parts[1]))[0]) * double(delta);
      }
    }
    sink_parts[unit] = sink_grad;
  });
}

// False if some number is out of the products' range: the results are then worth nothing.
template <class T, class Products>
bool backward(const AttentionParams& p, const BackwardIO& io, const Threads& threads) {
  const int64_t heads = p.batch * p.heads_q, key_blocks = ceil_div(p.len_k, Products::kKeys);
  double* sink_parts = static_cast<double*>(io.workspace);
  double* alibi_parts = sink_parts + heads;
  T* rows = reinterpret_cast<T*>(alibi_parts + heads * key_blocks);
  bool in_range = true;
  const RowState<T> state{rows, rows + heads * p.len_q, rows + 2 * heads * p.len_q, &in_range};

  prepare_rows<T>(p, io, state, sink_parts, threads);
  using AllTiles = Backward<T, Products>;
  AllTiles(p, io, state, alibi_parts).run(threads);
  if (io.grad_bias.present && !AllTiles::takes_tiles(p, io.bias_size)) {
    bias_backward<T, Products>(p, io, state, io.grad_bias, io.bias_size, threads);
  }
  if (io.grad_float_mask.present && !AllTiles::takes_tiles(p, io.float_mask_size)) {
    bias_backward<T, Products>(p, io, state, io.grad_float_mask, io.float_mask_size, threads);
  }

  if (io.grad_sinks.present) {
    for (int64_t h = 0; h < p.heads_q; h++) {
      double sum = 0;
      for (int64_t b = 0; b < p.batch; b++) sum += sink_parts[b * p.heads_q + h];
      const T value = T(sum);
      write_row<T>(io.grad_sinks.at(0, h, 0, 0), io.grad_sinks.dtype, 1, &value);
    }
  }
  if (io.grad_alibi_slopes.present) {
    for (int64_t b = 0; b < io.alibi_batch; b++) {
      for (int64_t h = 0; h < p.heads_q; h++) {
        double sum = 0;
        for (int64_t bb = b; bb < p.batch; bb += io.alibi_batch) {
          for (int64_t block = 0; block < key_blocks; block++)
            sum += alibi_parts[(bb * p.heads_q + h) * key_blocks + block];
        }
        const T value = T(sum);
        write_row<T>(io.grad_alibi_slopes.at(b, h, 0, 0), io.grad_alibi_slopes.dtype, 1, &value);
      }
    }
  }
  return in_range;
}

}  // namespace ATTN_ISA
}  // namespace attn_ext
