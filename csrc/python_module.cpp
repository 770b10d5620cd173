// attn_ext._C: what Python asks the build and the machine. The ops are registered by torch_ops.cpp, which is
// linked into the same module; no torch type crosses this file.
#include "pybind.h"

#include "cpu/kernels.h"
#include "cuda/backend.h"

namespace py = pybind11;

namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#elif defined(__GNUC__)
constexpr const char* kCompiler = "g++ " __VERSION__;
#else
constexpr const char* kCompiler = "unknown";
#endif

// No date and no path, so that two builds of one source are the same bytes.
py::dict build_info() {
  py::dict info;
  info["version"] = ATTN_EXT_VERSION;
  info["torch"] = ATTN_EXT_BUILD_TORCH_VERSION;
  info["compiler"] = kCompiler;
  info["cuda"] = static_cast<bool>(ATTN_EXT_WITH_CUDA);
  info["cuda_detail"] = ATTN_EXT_BUILD_CUDA;  // the version of the toolkit, or why there is none
  return info;
}

// The capsule comes from attn_ext._C_cuda.backend() and points to static memory.
void set_cuda_backend(const py::capsule& capsule) {
  attn_ext::cuda::backend() = capsule.get_pointer<const attn_ext::cuda::Backend>();
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "attn_ext: CPU kernels and torch ops";
  m.def("build_info", &build_info,
        "What this module was built from: version, torch, compiler, cuda, cuda_detail.");
  m.def("cpu_isa", &attn_ext::cpu_isa, "The instruction set in use; ATTN_EXT_CPU_ISA forces one.");
  m.def("cpu_isas", &attn_ext::cpu_isas, "The instruction sets this machine can run.");
  m.def("set_cuda_backend", &set_cuda_backend,
        "Hands over the CUDA kernels: what _C_cuda.backend() returned.");
}
