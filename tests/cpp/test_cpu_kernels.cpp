// The CPU kernels without torch: one instruction set (argv[1], forced by ATTN_EXT_CPU_ISA), forward against a
// naive loop in double, in float32 and bfloat16. Python's tests cover every option; this one shows that the C++ half stands alone.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "cpu/half.h"
#include "cpu/kernels.h"

namespace {

using attn_ext::AttentionParams;
using attn_ext::DType;
using attn_ext::StridedView;

constexpr int kSkipped = 77;  // ctest's SKIP_RETURN_CODE in CMakeLists.txt

// The workers one after another: what a caller without a thread pool passes.
void run_in_turn(int64_t n, void (*body)(void* context, int64_t worker), void* context) {
  for (int64_t worker = 0; worker < n; ++worker) body(context, worker);
}

// A contiguous (B, H, N, D) tensor: float32, of which a view in bfloat16 can be had.
struct Tensor {
  int64_t size[4];
  std::vector<float> values;
  std::vector<uint16_t> halves;

  Tensor(int64_t b, int64_t h, int64_t n, int64_t d) : size{b, h, n, d}, values(b * h * n * d) {}

  float& at(int64_t b, int64_t h, int64_t i, int64_t j) {
    return values[((b * size[1] + h) * size[2] + i) * size[3] + j];
  }

  void fill_normal(std::mt19937& generator) {
    std::normal_distribution<float> normal;
    for (float& value : values) value = normal(generator);
  }

  // bfloat16: rounds the values, too.
  StridedView view(DType dtype = DType::kFloat32) {
    StridedView view;
    view.data = values.data();
    view.dtype = dtype;
    if (dtype == DType::kBFloat16) {
      for (float value : values) halves.push_back(attn_ext::bfloat16_from_float(value));
      read_halves();
      view.data = halves.data();
    }
    view.stride[0] = size[1] * size[2] * size[3];
    view.stride[1] = size[2] * size[3];
    view.stride[2] = size[3];
    view.stride[3] = 1;
    view.present = true;
    return view;
  }

  void read_halves() {
    for (size_t x = 0; x < halves.size(); ++x) values[x] = attn_ext::float_from_bfloat16(halves[x]);
  }
};

struct Case {
  const char* name;
  int64_t batch, heads_q, heads_kv, len_q, len_k, dim_qk, dim_v;
  attn_ext::Causal causal;
};

// The largest difference between the kernel and the naive loop, over out and lse.
double largest_error(const Case& c, DType dtype) {
  std::mt19937 generator(0);
  Tensor q(c.batch, c.heads_q, c.len_q, c.dim_qk), k(c.batch, c.heads_kv, c.len_k, c.dim_qk);
  Tensor v(c.batch, c.heads_kv, c.len_k, c.dim_v), bias(c.batch, c.heads_q, c.len_q, c.len_k);
  Tensor out(c.batch, c.heads_q, c.len_q, c.dim_v), lse(c.batch, c.heads_q, c.len_q, 1);
  for (Tensor* tensor : {&q, &k, &v, &bias}) tensor->fill_normal(generator);

  AttentionParams params;
  params.batch = c.batch;
  params.heads_q = c.heads_q;
  params.heads_kv = c.heads_kv;
  params.len_q = c.len_q;
  params.len_k = c.len_k;
  params.dim_qk = c.dim_qk;
  params.dim_v = c.dim_v;
  params.q = q.view(dtype);
  params.k = k.view(dtype);
  params.v = v.view(dtype);
  params.bias = bias.view();
  params.scale = 1.0 / std::sqrt(static_cast<double>(c.dim_qk));
  params.causal = c.causal;
  Tensor lse_parts(c.batch, c.heads_q, c.len_q, 2);
  attn_ext::cpu_kernels().forward(params, {out.view(dtype), lse.view(), lse_parts.view()}, {2, run_in_turn});
  out.read_halves();

  double error = 0;
  std::vector<double> scores(c.len_k);
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads_q; ++h) {
      const int64_t h_kv = h / params.group();
      for (int64_t i = 0; i < c.len_q; ++i) {
        const bool causal = c.causal != attn_ext::Causal::kNone;
        const int64_t visible = std::clamp<int64_t>(causal ? i + params.offset() + 1 : c.len_k, 0, c.len_k);
        double maximum = -std::numeric_limits<double>::infinity(), sum = 0;
        for (int64_t j = 0; j < visible; ++j) {
          double dot = 0;
          for (int64_t d = 0; d < c.dim_qk; ++d) dot += double(q.at(b, h, i, d)) * k.at(b, h_kv, j, d);
          scores[j] = params.scale * dot + bias.at(b, h, i, j);
          maximum = std::max(maximum, scores[j]);
        }
        for (int64_t j = 0; j < visible; ++j) sum += std::exp(scores[j] - maximum);
        for (int64_t d = 0; d < c.dim_v; ++d) {
          double expected = 0;  // a row that sees no key gives 0
          for (int64_t j = 0; j < visible; ++j) {
            expected += std::exp(scores[j] - maximum) / sum * v.at(b, h_kv, j, d);
          }
          error = std::max(error, std::abs(out.at(b, h, i, d) - expected));
        }
        const float actual = lse.at(b, h, i, 0);
        if (visible == 0) {
          if (actual != -std::numeric_limits<float>::infinity()) return INFINITY;
        } else {
          error = std::max(error, std::abs(actual - (maximum + std::log(sum))));
        }
      }
    }
  }
  return std::isnan(error) ? INFINITY : error;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: ATTN_EXT_CPU_ISA=NAME %s NAME\n", argv[0]);
    return 2;
  }
  const std::string isa = argv[1];
  const std::vector<std::string> available = attn_ext::cpu_isas();
  if (std::find(available.begin(), available.end(), isa) == available.end()) {
    try {
      attn_ext::cpu_isa();
    } catch (const std::runtime_error& error) {
      std::printf("refused as it should be: %s\n", error.what());
      return kSkipped;
    }
    std::printf("FAILED: %s was forced on a machine that cannot run it\n", isa.c_str());
    return 1;
  }
  if (attn_ext::cpu_isa() != isa) {
    std::printf("FAILED: %s was forced, %s is in use\n", isa.c_str(), attn_ext::cpu_isa().c_str());
    return 1;
  }

  using attn_ext::Causal;
  const Case cases[] = {
      {"one element", 1, 1, 1, 1, 1, 1, 1, Causal::kNone},
      {"odd sizes, grouped heads, Dv != D", 2, 4, 2, 5, 7, 3, 5, Causal::kNone},
      {"causal, fewer keys than queries: empty rows", 1, 2, 1, 9, 6, 8, 8, Causal::kLowerRight},
      {"causal, upper left", 1, 2, 2, 33, 65, 16, 16, Causal::kUpperLeft},
      {"several tiles", 1, 2, 2, 203, 613, 64, 72, Causal::kLowerRight},
  };
  // float32 holds 24 bits: sums of a few hundred terms near 1 lose about 1e-6. bfloat16 holds 8: a result, and the
  // probabilities that it is made of, are off by up to 2^-9 of values up to about 4. An indexing error costs about 1.
  const struct {
    DType dtype;
    const char* name;
    double tolerance;
  } types[] = {{DType::kFloat32, "float32", 2e-5}, {DType::kBFloat16, "bfloat16", 3e-2}};
  int failures = 0;
  for (const Case& c : cases) {
    for (const auto& type : types) {
      const double error = largest_error(c, type.dtype);
      const bool good = error <= type.tolerance;
      failures += !good;
      std::printf("%s %s %s: %s, largest error %.1e\n", good ? "ok    " : "FAILED", isa.c_str(), type.name,
                  c.name, error);
    }
  }
  return failures != 0;
}
