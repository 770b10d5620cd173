// The kernels, in reading order. isa_default.cpp, isa_avx2.cpp, isa_avx512.cpp and isa_amx.cpp each include this once,
// after choosing the target, the vector width ATTN_VECTOR_BYTES and the namespace ATTN_ISA. No file after this one includes
// anything: see simd.h.
#include "simd.h"
#include "pack.h"
#include "matmul.h"
#include "scores.h"
#include "tiles.h"
#include "few_queries.h"
#include "online_softmax.h"
#include "products.h"
#ifdef ATTN_AMX
#include "amx.h"
#include "amx_strips.h"
#include "amx_products.h"
#endif
#include "forward.h"
#include "decode.h"
#include "grad_tile.h"
#include "bias_backward.h"
#include "backward.h"
#include "jvp.h"

namespace attn_ext {
namespace ATTN_ISA {

template <class T>
inline void forward(const AttentionParams& p, const ForwardOutput& o, const Threads& threads) {
  if (p.batch * p.heads_q * p.len_q == 0) return;
  if (p.len_q <= kFewQueries) {
    Decode<T>(p, o).run(threads);
  } else {
    forward<T, ForwardProducts<T>>(p, o, threads);
  }
}

#ifndef ATTN_AMX  // isa_amx.cpp has its own
// float64 computes in double, the other types in float.
inline void run_forward(const AttentionParams& p, const ForwardOutput& o, const Threads& threads) {
  if (p.q.dtype == DType::kFloat64) {
    forward<double>(p, o, threads);
  } else {
    forward<float>(p, o, threads);
  }
}

inline void run_backward(const AttentionParams& p, const BackwardIO& io, const Threads& threads) {
  if (p.q.dtype == DType::kFloat64) {
    backward<double, GradProducts<double>>(p, io, threads);
  } else {
    backward<float, GradProducts<float>>(p, io, threads);
  }
}

inline void run_jvp(const AttentionParams& p, const JvpIO& io, const Threads& threads) {
  p.q.dtype == DType::kFloat64 ? jvp<double>(p, io, threads) : jvp<float>(p, io, threads);
}

#endif

}  // namespace ATTN_ISA
}  // namespace attn_ext
