// The one matrix product that attention is made of, on tiles:  C[m][n] (+)= sum_k A(m, k) * B[k][n].
//
//   S  = Q K^T     A = Q rows,        B = K^T panels        dP = dO V^T    A = dO rows,       B = V^T panels
//   O += P V       A = P rows,        B = V panels          dQ += dS K     A = dS rows,       B = K panels
//   dV += P^T dO   A = P transposed,  B = dO panels         dK += dS^T Q   A = dS transposed, B = Q panels
//
// A register block of kBlockRows x kPanelVectors accumulators stays in registers over the whole depth; each step loads
// one row of the B panel and broadcasts one element of A per row. The block is sized so that accumulators, the B row
// and one broadcast fill the register file: 6 x 2 + 2 + 1 of 16 registers, 6 x 4 + 4 + 1 of AVX-512's 32. The depth
// is taken in slices whose part of a panel stays close to the L1 cache while all rows pass over it. Each element of C is
// summed over k in ascending order, whatever the block it falls in, so results do not depend on how the work was cut.
namespace attn_ext {
namespace ATTN_ISA {

constexpr int kBlockRows = 6;
// Of a panel: as large as the smallest L1 cache. Its rows come in order, so that they stream from L2 where they do not fit;
// with half of it AVX-512's accumulators go to memory and back so often that products take 1 to 8% longer.
constexpr int64_t kSliceBytes = 32768;

template <class T, int rows, int vectors, bool transposed_a>
inline void register_block(int64_t depth, const T* a, int64_t lda, const T* b, int64_t ldb, bool accumulate,
                           T* c, int64_t ldc) {
  constexpr int lanes = kLanes<T>;
  Vec<T> sum[rows][vectors];
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) sum[i][j] = accumulate ? load(c + i * ldc + j * lanes) : Vec<T>{};
  }
#pragma GCC unroll 4  // or else the loop's own instructions take a tenth of the time
  for (int64_t k = 0; k < depth; k++, b += ldb) {
    Vec<T> row[vectors];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) row[j] = load(b + j * lanes);
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
      const Vec<T> x = splat<T>(transposed_a ? a[k * lda + i] : a[i * lda + k]);
#pragma GCC unroll 4
      for (int j = 0; j < vectors; j++) sum[i][j] += x * row[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) store<T>(c + i * ldc + j * lanes, sum[i][j]);
  }
}

// Memory with an element for each of C that is read once C is done: a bias. Every register block asks for its own part,
// since what is asked for while the core multiplies costs next to nothing; all at once it would wait for memory. Asked for
// in L2: the strip's part is as large as L1.
struct Companion {
  const char* at = nullptr;  // of the first element, or null
  int64_t row_bytes = 0, element_bytes = 0;

  ATTN_INLINE void ask_for(int64_t i, int64_t rows, int64_t columns) const {
    if (at == nullptr) return;
    for (int64_t r = i; r < i + rows; r++) {
      for (int64_t x = 0; x < columns * element_bytes; x += 64)
        __builtin_prefetch(at + r * row_bytes + x, 0, 2);
    }
  }
  ATTN_INLINE Companion from(int64_t i, int64_t j) const {
    return {at == nullptr ? at : at + i * row_bytes + j * element_bytes, row_bytes, element_bytes};
  }
};

// All rows of one panel: blocks of kBlockRows, then one block of what is left.
template <class T, int vectors, bool transposed_a, int rows = kBlockRows>
inline void panel_product(int64_t m, int64_t depth, const T* a, int64_t lda, const T* b, int64_t ldb,
                          bool accumulate, T* c, int64_t ldc, const Companion& companion) {
  int64_t i = 0;
  for (; i + rows <= m; i += rows) {
    companion.ask_for(i, rows, vectors * kLanes<T>);
    register_block<T, rows, vectors, transposed_a>(depth, transposed_a ? a + i : a + i * lda, lda, b, ldb,
                                                   accumulate, c + i * ldc, ldc);
  }
  if constexpr (rows > 1) {
    if (i < m) {
      panel_product<T, vectors, transposed_a, rows - 1>(m - i, depth, transposed_a ? a + i : a + i * lda, lda,
                                                        b, ldb, accumulate, c + i * ldc, ldc,
                                                        companion.from(i, 0));
    }
  }
}

// All rows of one panel, slice after slice of its depth.
template <class T, int vectors, bool transposed_a>
inline void sliced_product(int64_t m, int64_t depth, const T* a, int64_t lda, const T* b, int64_t ldb,
                           bool accumulate, T* c, int64_t ldc, const Companion& companion) {
  constexpr int64_t slice = kSliceBytes / (kPanel<T> * int64_t(sizeof(T)));
  for (int64_t k = 0; k < max(depth, 1); k += slice) {
    panel_product<T, vectors, transposed_a>(m, min(slice, depth - k), transposed_a ? a + k * lda : a + k, lda,
                                            b + k * ldb, ldb, accumulate || k > 0, c, ldc,
                                            k == 0 ? companion : Companion{});
  }
}

// The right operand of a product: panels [panel][rows][w] as pack.h makes them of so many columns, or with `pitch`
// elements from row to row a matrix as it lies, of columns that fill whole vectors. Rows begin .. begin+depth are
// multiplied.
template <class T>
struct Panels {
  const T* data;
  int64_t columns, rows, begin = 0, pitch = 0;
};

// The first n columns of C, which needs padded(n) columns of room.
template <class T, bool transposed_a>
inline void matmul(int64_t m, int64_t n, int64_t depth, const T* a, int64_t lda, const Panels<T>& b,
                   bool accumulate, T* c, int64_t ldc, const Companion& companion = {}) {
  const T* panel = b.data;
  for (int64_t j = 0; j < n; j += kPanel<T>) {
    const int64_t width = padded<T>(min(kPanel<T>, b.columns - j)), ldb = b.pitch > 0 ? b.pitch : width;
    const T* first = panel + b.begin * ldb;
    const Companion part = companion.from(0, j);
    switch (padded<T>(min(kPanel<T>, n - j)) / kLanes<T>) {
      case 1:
        sliced_product<T, 1, transposed_a>(m, depth, a, lda, first, ldb, accumulate, c + j, ldc, part);
        break;
      case 2:
        sliced_product<T, 2, transposed_a>(m, depth, a, lda, first, ldb, accumulate, c + j, ldc, part);
        break;
      case 3:
        if constexpr (kPanelVectors >= 3)
          sliced_product<T, 3, transposed_a>(m, depth, a, lda, first, ldb, accumulate, c + j, ldc, part);
        break;
      case 4:
        if constexpr (kPanelVectors >= 4)
          sliced_product<T, 4, transposed_a>(m, depth, a, lda, first, ldb, accumulate, c + j, ldc, part);
        break;
    }
    panel += b.pitch > 0 ? width : b.rows * width;
  }
}

}  // namespace ATTN_ISA
}  // namespace attn_ext
