// What the machine could do: loops that do nothing but multiply and add, or read. Compiled and called by cpu_limits.py, one
// call a thread at a time; they return seconds.
#include <chrono>
#include <cstdint>
#include <cstring>

namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec16 __attribute__((vector_size(64)));

// Twelve sums that do not wait for each other: more than two units with a latency of four cycles can keep busy.
template <class Vec>
inline __attribute__((always_inline)) double multiply_and_add(int64_t rounds, float* sink) {
  Vec sums[12], factor = Vec{} + 0.999f, addend = Vec{} + 1e-4f;
  for (int i = 0; i < 12; i++) sums[i] = Vec{} + 0.1f * float(i);
  const auto start = Clock::now();
  for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) sums[i] = sums[i] * factor + addend;
    asm volatile("" : "+x"(factor));  // not to be computed at compile time
  }
  const double seconds = since(start);
  for (int i = 0; i < 12; i++) *sink += sums[i][0];
  return seconds;
}

}  // namespace

extern "C" {

// Multiply-adds of a round, each two floating point operations.
int64_t fma_per_round(int vector_bytes) { return 12 * vector_bytes / 4; }

__attribute__((target("avx2,fma"))) double fma_avx2(int64_t rounds, float* sink) {
  return multiply_and_add<Vec8>(rounds, sink);
}
__attribute__((target("avx512f"))) double fma_avx512(int64_t rounds, float* sink) {
  return multiply_and_add<Vec16>(rounds, sink);
}

// Reads `bytes` from `data`, a multiple of 256.
__attribute__((target("avx2"))) double read_memory(const char* data, int64_t bytes, int64_t* sink) {
  typedef int64_t Vec __attribute__((vector_size(32)));
  Vec sums[8] = {};
  const auto start = Clock::now();
  for (int64_t i = 0; i < bytes; i += 256) {
#pragma GCC unroll 8
    for (int x = 0; x < 8; x++) {
      Vec v;
      std::memcpy(&v, data + i + 32 * x, 32);
      sums[x] += v;
    }
  }
  const double seconds = since(start);
  for (int x = 0; x < 8; x++) *sink += sums[x][0];
  return seconds;
}
}
