// attn_ext._C_cuda: loaded only where torch has CUDA. Importing it calls nothing of the CUDA runtime.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "device_query.h"

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

}  // namespace

PYBIND11_MODULE(_C_cuda, m) {
  m.doc() = "attn_ext: CUDA kernels";
  m.def("architectures", &attn_ext::cuda::built_architectures,
        "Compute capabilities compiled for: [80, 90].");
  m.def("runtime_version", &attn_ext::cuda::runtime_version, "CUDA runtime linked in: 13000 for 13.0.");
  m.def("list_devices", &list_devices,
        "{devices: [{name, compute_capability, memory_bytes, binary_architecture}], problem: str}.");
}
