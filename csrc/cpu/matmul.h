// The one matrix product that attention is made of, on tiles:  C[m][n] (+)= sum_k A(m, k) * B[k][n].
//
//   S  = Q K^T     A = Q rows,        B = K^T panels        dP = dO V^T    A = dO rows,       B = V^T panels
//   O += P V       A = P rows,        B = V panels          dQ += dS K     A = dS rows,       B = K panels
//   dV += P^T dO   A = P transposed,  B = dO panels         dK += dS^T Q   A = dS transposed, B = Q panels
//
// A register block of kBlockRows x kPanelVectors accumulators stays in registers over the whole depth; each step loads
// one row of the B panel and broadcasts one element of A per row. The block is sized so that accumulators, the B row
// and one broadcast fill the register file: 6 x 2 + 2 + 1 of 16 registers, 6 x 4 + 4 + 1 of AVX-512's 32. The depth
// is taken in slices whose part of a panel stays in the L1 cache while all rows pass over it. Each element of C is
// summed over k in ascending order, whatever the block it falls in, so results do not depend on how the work was cut.
namespace attn_ext {
namespace ATTN_ISA {

constexpr int kBlockRows = 6;
constexpr int64_t kSliceBytes = 16384;  // of a panel: half of the smallest L1 cache

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

// All rows of one panel: blocks of kBlockRows, then one block of what is left.
template <class T, int vectors, bool transposed_a, int rows = kBlockRows>
inline void panel_product(int64_t m, int64_t depth, const T* a, int64_t lda, const T* b, int64_t ldb,
                          bool accumulate, T* c, int64_t ldc) {
  int64_t i = 0;
  for (; i + rows <= m; i += rows) {
    register_block<T, rows, vectors, transposed_a>(depth, transposed_a ? a + i : a + i * lda, lda, b, ldb,
                                                   accumulate, c + i * ldc, ldc);
  }
  if constexpr (rows > 1) {
    if (i < m) {
      panel_product<T, vectors, transposed_a, rows - 1>(m - i, depth, transposed_a ? a + i : a + i * lda, lda,
                                                        b, ldb, accumulate, c + i * ldc, ldc);
    }
  }
}

// All rows of one panel, slice after slice of its depth.
template <class T, int vectors, bool transposed_a>
inline void sliced_product(int64_t m, int64_t depth, const T* a, int64_t lda, const T* b, int64_t ldb,
                           bool accumulate, T* c, int64_t ldc) {
  constexpr int64_t slice = kSliceBytes / (kPanel<T> * int64_t(sizeof(T)));
  for (int64_t k = 0; k < max(depth, 1); k += slice) {
    panel_product<T, vectors, transposed_a>(m, min(slice, depth - k), transposed_a ? a + k * lda : a + k, lda,
                                            b + k * ldb, ldb, accumulate || k > 0, c, ldc);
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
                   bool accumulate, T* c, int64_t ldc) {
  const T* panel = b.data;
  for (int64_t j = 0; j < n; j += kPanel<T>) {
    const int64_t width = padded<T>(min(kPanel<T>, b.columns - j)), ldb = b.pitch > 0 ? b.pitch : width;
    const T* first = panel + b.begin * ldb;
    switch (padded<T>(min(kPanel<T>, n - j)) / kLanes<T>) {
      case 1: sliced_product<T, 1, transposed_a>(m, depth, a, lda, first, ldb, accumulate, c + j, ldc); break;
      case 2: sliced_product<T, 2, transposed_a>(m, depth, a, lda, first, ldb, accumulate, c + j, ldc); break;
      case 3:
        if constexpr (kPanelVectors >= 3)
          sliced_product<T, 3, transposed_a>(m, depth, a, lda, first, ldb, accumulate, c + j, ldc);
        break;
      case 4:
        if constexpr (kPanelVectors >= 4)
          sliced_product<T, 4, transposed_a>(m, depth, a, lda, first, ldb, accumulate, c + j, ldc);
        break;
    }
    panel += b.pitch > 0 ? width : b.rows * width;
  }
}

}  // namespace ATTN_ISA
}  // namespace attn_ext
