// Plans for a Hopper of problems that a test cannot hold in memory, or whose tensors torch's side would have copied:
// the kernels of forward and backward, or why there is none.
#include <cstdio>
#include <stdexcept>
#include <string>

#include "cuda/launch_plan.h"

using namespace attn_ext;

namespace {

constexpr int64_t kLength = 17;  // one more than is decoded: one tile of queries and of keys a head
constexpr cuda::Target kTarget{90, 132, /* sm90_kernels */ true};

StridedView rows(uintptr_t address, int64_t heads) {
  return {
      reinterpret_cast<void*>(address), DType::kFloat16, {heads * kLength * 64, kLength * 64, 64, 1}, true};
}

struct Problem {
  AttentionParams p;
  BackwardIO io;

  explicit Problem(int64_t batch = 2, int64_t heads = 2) {
    p.batch = batch;
    p.heads_q = p.heads_kv = heads;
    p.len_q = p.len_k = kLength;
    p.dim_qk = p.dim_v = 64;
    p.q = rows(0x10000, heads);
    p.k = rows(0x20000, heads);
    p.v = rows(0x30000, heads);
    io.grad_out = rows(0x40000, heads);
    io.grad_q.present = io.grad_k.present = true;
  }
};

template <class MakePlan>
std::string kernels(MakePlan plan) {
  try {
    std::string names;
    for (const cuda::Launch& launch : plan()) names += (names.empty() ? "" : " ") + launch.kernel;
    return names;
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

void print(const char* name, const Problem& problem) {
  char workspace[1];  // nobody reads it
  const std::string forward =
      kernels([&] { return cuda::plan_forward(problem.p, ForwardOutput{}, nullptr, kTarget); });
  const std::string backward =
      kernels([&] { return cuda::plan_backward(problem.p, problem.io, workspace, kTarget); });
  std::printf("%s|%s|%s\n", name, forward.c_str(), backward.c_str());
}

void print(const char* name, void (*change)(Problem&)) {
  Problem problem;
  change(problem);
  print(name, problem);
}

}  // namespace

int main() {
  constexpr int64_t kCounted = int64_t(1) << 31, kRounds = 2 * kTarget.multiprocessors;
  print("nothing special", Problem());
  print("the last tile that is counted", Problem(kCounted - kRounds - 1, 1));
  print("a tile more", Problem(kCounted - kRounds, 1));
  print("more than a grid", Problem(kCounted, 1));

  print("q at 8 bytes", [](Problem& x) { x.p.q = rows(0x10008, 2); });
  print("dO at 8 bytes", [](Problem& x) { x.io.grad_out = rows(0x40008, 2); });
  print("rows of k 8 bytes on", [](Problem& x) { x.p.k.stride[2] = 68; });
  print("heads of v 0 bytes on", [](Problem& x) { x.p.v.stride[1] = 0; });
  print("batches of q 2^40 bytes on", [](Problem& x) { x.p.q.stride[0] = int64_t(1) << 39; });
  print("batches of q 16 bytes less on", [](Problem& x) { x.p.q.stride[0] = (int64_t(1) << 39) - 8; });
  print("heads of k, which is one, anywhere", [](Problem& x) {
    x.p.heads_kv = 1;
    x.p.k.stride[1] = 0;
  });
  print("no keys", [](Problem& x) { x.p.len_k = 0; });
}
