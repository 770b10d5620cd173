// The GPUs of this machine, and what the library holds for them. No exception and no CUDA type crosses this
// header.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace attn_ext::cuda {

struct Device {
  std::string name;
  int compute_capability;    // 10 * major + minor: 90 for Hopper
  std::size_t memory_bytes;  // all of it, not what is free
  int binary_architecture;   // the one of built_architectures() whose code it runs, in the same form; 0 if
                             // none
};

struct DeviceList {
  std::vector<Device> devices;
  std::string problem;  // why there are no devices (no driver, driver too old, ...); empty if all is well
};

// Initialises CUDA on each device, so it belongs into a report, not into an import.
DeviceList list_devices();

// What nvcc was told to compile for, in the form 10 * major + minor.
std::vector<int> built_architectures();

// The version of the statically linked CUDA runtime: 1000 * major + 10 * minor.
int runtime_version();

}  // namespace attn_ext::cuda
