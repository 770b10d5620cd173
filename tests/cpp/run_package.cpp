// An exported model with attn_ext's ops in a process without Python: run_package LIBATTN_EXT_OPS DIRECTORY
// export_package.py has written the directory.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

static at::Tensor read(const std::string& path, int64_t length) {
  at::Tensor t = at::empty({2, length, 16});
  std::ifstream file(path, std::ios::binary);
  const std::streamsize bytes = std::streamsize(t.nbytes());
  if (!file.read(static_cast<char*>(t.data_ptr()), bytes)) {
    std::fprintf(stderr, "cannot read %ld bytes of %s\n", long(bytes), path.c_str());
    std::exit(1);
  }
  return t;
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string directory = argv[2];
  if (dlopen(argv[1], RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  torch::inductor::AOTIModelPackageLoader model(directory + "/model.pt2");
  for (const int64_t length : {9, 30}) {
    const std::string suffix = "_" + std::to_string(length) + ".bin";
    const at::Tensor want = read(directory + "/y" + suffix, length);
    const at::Tensor got = model.run({read(directory + "/x" + suffix, length)}).at(0);
    const double error = (got - want).abs().max().item<double>();
    std::printf("length %ld: largest difference %.2g\n", long(length), error);
    if (!(error < 1e-5)) return 1;
  }
  return 0;
}
