// How work is cut into tiles and handed to threads, and the scratch slots that tiles live in.
namespace attn_ext {
namespace ATTN_ISA {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of a tile: `most`, or those of one row of blocks, which see the same ones.
inline int64_t tile_rows(const AttentionParams& p, int64_t most) {
  return p.block_mask.present() ? BlockMask::kSize : most;
}

// Query rows for which a unit of forward work packs K and V: `most`, or fewer where threads would be without work, of
// about equal size. Units begin with whole strips, so that what a strip meets, and with it every result, is the same
// however many threads there are.
constexpr int64_t kUnitsPerThread = 8;
inline int64_t unit_rows(const AttentionParams& p, int64_t most, int64_t strip_rows, int64_t threads) {
  if (p.block_mask.present()) return tile_rows(p, most);
  const int64_t heads = p.batch * p.heads_q, queries = max(p.len_q, 1);
  int64_t rows = most;
  while (rows / 2 >= 2 * strip_rows && heads * ceil_div(queries, rows) < kUnitsPerThread * threads) rows /= 2;
  return round_up(ceil_div(queries, ceil_div(queries, rows)), strip_rows);
}

// Multiply-adds of the two products of all visible and hidden scores; saturates where int64 would overflow.
inline int64_t score_products(const AttentionParams& p) {
  const double n =
      double(p.batch) * double(p.heads_q) * double(p.len_q) * double(p.len_k) * double(p.dim_qk + p.dim_v);
  return n < 1e18 ? int64_t(n) : int64_t(1e18);
}

// Up to this many queries take the products of few_queries.h, in forward, backward and forward mode: a score must come out the same
// bit for bit in both, for P = exp(s - lse) to be what the forward used.
constexpr int kFewQueries = 4;

// Part of a tile of the backward: its rows row .. row+rows meet its keys key .. key+keys.
struct Strip {
  int64_t row, rows, key, keys;
};

// What products that do a strip's softmax themselves must know of it: grad_tile.h, plain().
struct PlainRows {
  int64_t i0, rows, j0, keys;          // its queries and keys in the head
  const float *max, *log_sum, *delta;  // of each row, see RowState
  const char* mask;  // 1 = may attend; of the first query and key, keys side by side; or null
  int64_t mask_stride;
};

enum Slot {
  kQuery,
  kQueryPanel,
  kGradOut,
  kGradOutPanel,
  kKey,
  kKeyPanel,
  kValue,
  kScore,
  kGradScore,
  kCapSlope,
  kOutput,
  kState,
  kStrip,
  kGradKey,
  kGradValue,
  kGradQuery,
  kProbRows,
  kProbPairs,
  kGradPairs
};

template <class T>
ATTN_INLINE T* scratch(Slot slot, int64_t n) {
  return static_cast<T*>(thread_scratch(slot, size_t(max(n, 1)) * sizeof(T)));
}

// Calls body(unit) for unit = 0 .. units-1, each once; threads take the next unit when they finish one. Units write
// disjoint results, so the outcome does not depend on who takes what. `products` is the work of all units in
// multiply-adds: waking a thread costs about as much as kProductsPerThread of them (5 us), so small problems stay on
// the calling one.
constexpr int64_t kProductsPerThread = 250000;

template <class Body>
inline void for_each_unit(const Threads& threads, int64_t units, int64_t products, const Body& body) {
  if (units == 0) return;
  struct Context {
    const Body& body;
    int64_t units, next;
  } context{body, units, 0};
  const auto worker = [](void* raw, int64_t) {
    Context& c = *static_cast<Context*>(raw);
    for (int64_t unit; (unit = __atomic_fetch_add(&c.next, 1, __ATOMIC_RELAXED)) < c.units;) c.body(unit);
    release_large_thread_scratch();
  };
  const int64_t workers = min(min(threads.count, units), products / kProductsPerThread);
  if (workers <= 1) {
    worker(&context, 0);
  } else {
    threads.run(workers, worker, &context);
  }
}

}  // namespace ATTN_ISA
}  // namespace attn_ext
