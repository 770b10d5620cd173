// Carries a plan out: the only file that launches kernels.
#include "launch.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "device_query.h"
#include "registry.h"

namespace attn_ext::cuda {
namespace {

constexpr int kMaxDevices = 64;
constexpr int kStaticSharedLimit =
    48 << 10;  // more dynamic shared memory must be asked for, once a kernel and device

void* (*torch_current_stream)(int) = nullptr;

std::string description(const Launch& launch) {
  return launch.kernel + " (grid " + std::to_string(launch.grid) + ", block " + std::to_string(launch.block) +
         ", " + std::to_string(launch.shared_bytes) + " bytes of shared memory)";
}

// Clears CUDA's sticky copy of the error, which the next call of someone else would report.
void check(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error("attn_ext: " + what + ": " + cudaGetErrorString(error));
}

// Makes a device current for a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index) {
    check(cudaGetDevice(&previous_), "asking for the current device");
    if (index != previous_) check(cudaSetDevice(index), "switching to device " + std::to_string(index));
    changed_ = index != previous_;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(previous_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

const void* find_kernel(const std::string& name) {
  // Built at the first launch; the entries are there since the library was loaded.
  static const auto* const table = [] {
    auto* map = new std::unordered_map<std::string, const void*>;
    for (const KernelEntry* entry = KernelEntry::head(); entry != nullptr; entry = entry->next) {
      map->emplace(entry->name, entry->function);
    }
    return map;
  }();
  const auto found = table->find(name);
  if (found == table->end()) {
    const bool hopper = name.find("_sm90_") != std::string::npos;
    throw std::runtime_error(
        "attn_ext: this build has no kernel " + name +
        (hopper ? ": rebuild with 9.0a in TORCH_CUDA_ARCH_LIST, or unset ATTN_EXT_KERNELS" : ""));
  }
  return found->second;
}

Target query_target(int index) {
  int major = 0, minor = 0, multiprocessors = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index),
        "asking for the compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index),
        "asking for the compute capability");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, index),
        "asking for the number of multiprocessors");
  if (major < 8) {
    throw std::runtime_error(
        "attn_ext: the CUDA kernels need compute capability 8.0 (Ampere) or newer, device " +
        std::to_string(index) + " has " + std::to_string(major) + "." + std::to_string(minor));
  }
  return {10 * major + minor, multiprocessors};
}

// A device's answers do not change, and an attribute costs as much as a launch.
Target target(int index) {
  static std::atomic<uint64_t> known[kMaxDevices];
  if (index < 0 || index >= kMaxDevices) return query_target(index);
  uint64_t packed = known[index].load(std::memory_order_relaxed);
  if (packed == 0) {
    const Target found = query_target(index);
    packed = uint64_t(found.architecture) << 32 | uint32_t(found.multiprocessors);
    known[index].store(packed, std::memory_order_relaxed);
  }
  return {int(packed >> 32), int(packed & 0xffffffffu)};
}

std::string build_hint(cudaError_t error, int index) {
  if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction &&
      error != cudaErrorUnsupportedPtxVersion) {
    return "";
  }
  const int architecture = target(index).architecture;
  std::string built;
  for (const int a : built_architectures()) built += (built.empty() ? "sm_" : ", sm_") + std::to_string(a);
  return " (built for " + built + "; rebuild with TORCH_CUDA_ARCH_LIST=" + std::to_string(architecture / 10) +
         "." + std::to_string(architecture % 10) + ")";
}

// Allows `function` on the current device as much dynamic shared memory as any launch has asked for so far.
void allow_shared_memory(const void* function, const Launch& launch, int index) {
  if (launch.shared_bytes <= kStaticSharedLimit) return;
  static std::mutex mutex;
  static std::unordered_map<const void*, int> allowed[kMaxDevices];
  const std::lock_guard<std::mutex> lock(mutex);
  int* granted = index < kMaxDevices ? &allowed[index][function] : nullptr;
  if (granted != nullptr && *granted >= launch.shared_bytes) return;
  const cudaError_t error =
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared_bytes);
  check(error, "no shared memory for " + description(launch) + build_hint(error, index));
  if (granted != nullptr) *granted = launch.shared_bytes;
}

void launch(const Plan& plan, int index) {
  const CurrentDevice current(index);
  const auto stream = static_cast<cudaStream_t>(torch_current_stream(index));
  for (const Launch& step : plan) {
    const void* function = find_kernel(step.kernel);
    allow_shared_memory(function, step, index);
    std::vector<char> encoded;
    if (!step.tensor_maps.empty()) encoded = params_with_tensor_maps(step);
    void* arguments[] = {encoded.empty() ? const_cast<char*>(step.params.data()) : encoded.data()};
    const cudaError_t error =
        cudaLaunchKernel(function, dim3(uint32_t(step.grid)), dim3(uint32_t(step.block)), arguments,
                         size_t(step.shared_bytes), stream);
    check(error, "cannot launch " + description(step) + build_hint(error, index));
  }
}

}  // namespace

Backend make_backend(void* (*current_stream)(int)) {
  torch_current_stream = current_stream;
  return {&target, &launch};
}

}  // namespace attn_ext::cuda
