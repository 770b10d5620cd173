// The table of kernels by name, filled by the instantiation files when the library is loaded: the planner names
// kernels, launch.cu finds them here.
#pragma once

namespace attn_ext::cuda {

struct KernelEntry {
  const char* name;
  const void* function;  // what cudaLaunchKernel takes
  const KernelEntry* next;

  KernelEntry(const char* kernel_name, const void* kernel)
      : name(kernel_name), function(kernel), next(head()) {
    head() = this;
  }

  // The latest entry; the list runs through `next`. A function, so that it exists before any entry does.
  static const KernelEntry*& head() {
    static const KernelEntry* first = nullptr;
    return first;
  }
};

}  // namespace attn_ext::cuda

#define ATTN_REGISTER_KERNEL(kernel) \
  static const attn_ext::cuda::KernelEntry entry_of_##kernel(#kernel, reinterpret_cast<const void*>(kernel));
