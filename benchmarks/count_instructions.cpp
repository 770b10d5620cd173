// How many instructions a fixed forward and backward of the CPU kernels take: the same number on every run, also on machines
// whose times move, so that a regression is seen. Linux; one instruction set at a time:
//
//   cmake -B build/cmake && cmake --build build/cmake --target count_instructions
//   ATTN_EXT_CPU_ISA=avx2 build/cmake/count_instructions
//
// The problem: B 1, H 1, Nq = Nk = 256, D 64, causal, one thread. The call is made once before it is counted; then a debugger's
// single steps count it, a few million of them.
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "cpu/half.h"
#include "cpu/kernels.h"

namespace {

using namespace attn_ext;

constexpr int64_t kLength = 256, kHeadDim = 64;

// (1, 1, kLength, columns) and its memory.
struct Tensor {
  std::vector<uint64_t> memory;
  StridedView view;

  explicit Tensor(DType dtype, int64_t columns = kHeadDim, std::mt19937* generator = nullptr)
      : memory(kLength * columns) {
    view.data = memory.data();
    view.dtype = dtype;
    view.stride[0] = view.stride[1] = kLength * columns;
    view.stride[2] = columns;
    view.stride[3] = 1;
    view.present = true;
    std::normal_distribution<float> normal;
    for (int64_t i = 0; generator != nullptr && i < kLength * columns; i++) {
      const float x = normal(*generator);
      if (dtype == DType::kFloat32) {
        static_cast<float*>(view.data)[i] = x;
      } else {
        static_cast<uint16_t*>(view.data)[i] =
            dtype == DType::kBFloat16 ? bfloat16_from_float(x) : float16_from_float(x);
      }
    }
  }
};

// The instructions of `call`, a second time around; -1 where processes may not be traced.
int64_t count(const std::function<void()>& call) {
  const pid_t child = fork();
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(1);
    call();
    raise(SIGSTOP);
    call();
    raise(SIGSTOP);
    _exit(0);
  }
  int status = 0;
  int64_t steps = -1;
  while (waitpid(child, &status, 0) == child && WIFSTOPPED(status)) {
    const int signal = WSTOPSIG(status);
    if (signal != SIGTRAP && signal != SIGSTOP) break;
    if (signal == SIGSTOP && steps >= 0) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      return steps;
    }
    steps++;  // the first stop starts the count at 0
    if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0) break;
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return -1;
}

}  // namespace

int main() {
  const CpuKernels& kernels = cpu_kernels();
  const int64_t nothing = count([] {});  // of the two stops
  if (nothing < 0) {
    std::printf("this system does not let a process trace its child\n");
    return 1;
  }
  std::printf("%-8s %-9s %10s %10s\n", "isa", "dtype", "forward", "backward");
  const struct {
    DType dtype;
    const char* name;
  } types[] = {{DType::kFloat32, "float32"}, {DType::kBFloat16, "bfloat16"}, {DType::kFloat16, "float16"}};
  for (const auto& type : types) {
    std::mt19937 generator(0);
    Tensor q(type.dtype, kHeadDim, &generator), k(type.dtype, kHeadDim, &generator),
        v(type.dtype, kHeadDim, &generator), grad_out(type.dtype, kHeadDim, &generator);
    Tensor out(type.dtype), lse(DType::kFloat32, 1), lse_parts(DType::kFloat32, 2), grad_q(type.dtype),
        grad_k(type.dtype), grad_v(type.dtype);
    AttentionParams p;
    p.batch = p.heads_q = p.heads_kv = 1;
    p.len_q = p.len_k = kLength;
    p.dim_qk = p.dim_v = kHeadDim;
    p.q = q.view;
    p.k = k.view;
    p.v = v.view;
    p.scale = 1 / std::sqrt(double(kHeadDim));
    p.causal = Causal::kLowerRight;
    const ForwardOutput results = {out.view, lse.view, lse_parts.view};
    BackwardIO io;
    io.grad_out = grad_out.view;
    io.out = out.view;
    io.lse_parts = lse_parts.view;
    io.grad_q = grad_q.view;
    io.grad_k = grad_k.view;
    io.grad_v = grad_v.view;
    std::vector<uint64_t> workspace(size_t(backward_workspace_bytes(p)) / 8 + 8);
    void* start = workspace.data();
    size_t room = workspace.size() * 8;
    io.workspace = std::align(64, room - 64, start, room);
    const Threads one;
    kernels.forward(p, results, one);  // what the backward reads
    const int64_t forward = count([&] { kernels.forward(p, results, one); }) - nothing;
    const int64_t backward = count([&] { kernels.backward(p, io, one); }) - nothing;
    std::printf("%-8s %-9s %10lld %10lld\n", kernels.name, type.name, (long long)forward,
                (long long)backward);
  }
  return 0;
}
