// attn_ext._C_cuda: loaded only where torch has CUDA. Importing it calls nothing of the CUDA runtime.
#include "pybind.h"

// The part of torch's stable C interface that only a torch with CUDA has.
#define USE_CUDA
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>
#include <string>

#include "device_query.h"
#include "launch.h"
#include "registry.h"

namespace py = pybind11;

namespace {

py::dict list_devices() {
  const attn_ext::cuda::DeviceList list = attn_ext::cuda::list_devices();
  py::list devices;
  for (const attn_ext::cuda::Device& device : list.devices) {
    py::dict entry;
    entry["name"] = device.name;
    entry["compute_capability"] = device.compute_capability;
    entry["memory_bytes"] = device.memory_bytes;
    entry["binary_architecture"] = device.binary_architecture;
    devices.append(entry);
  }
  py::dict answer;
  answer["devices"] = devices;
  answer["problem"] = list.problem;
  return answer;
}

void* current_stream(int device_index) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device_index, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("attn_ext: torch has no current stream for device " +
                             std::to_string(device_index));
  }
  return stream;
}

std::vector<std::string> kernels() {
  std::vector<std::string> names;
  for (auto* entry = attn_ext::cuda::KernelEntry::head(); entry != nullptr; entry = entry->next) {
    names.push_back(entry->name);
  }
  return names;
}

// For attn_ext._C.set_cuda_backend.
py::capsule backend() {
  static const attn_ext::cuda::Backend table = attn_ext::cuda::make_backend(&current_stream);
  return py::capsule(&table, "attn_ext.cuda.Backend");
}

}  // namespace

PYBIND11_MODULE(_C_cuda, m) {
  m.doc() = "attn_ext: CUDA kernels";
  m.def("architectures", &attn_ext::cuda::built_architectures,
        "Compute capabilities compiled for: [80, 90].");
  m.def("runtime_version", &attn_ext::cuda::runtime_version, "CUDA runtime linked in: 13000 for 13.0.");
  m.def("backend", &backend, "The kernels, for attn_ext._C.set_cuda_backend.");
  m.def("kernels", &kernels, "The names of all kernels, as launch plans use them.");
  m.def("list_devices", &list_devices,
        "{devices: [{name, compute_capability, memory_bytes, binary_architecture}], problem: str}.");
}
