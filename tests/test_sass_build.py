"""benchmarks/sass on kernels compiled here, whose loops, spills and bank conflicts are known. Needs nvcc."""

import pytest

pytest.importorskip("cuxray", reason="benchmarks/sass reads machine code with cuxray (pip install '.[dev]')")

from sass import build, gates
from sass.disassembly import ToolError, find_tool, run_tool
from sass.gpus import A100, GPUS

try:
    for tool in ("nvcc", "nvdisasm", "cuobjdump"):
        find_tool(tool)
except ToolError as error:
    pytest.skip(str(error), allow_module_level=True)

PRODUCTS, EXPONENTIALS = 16, 8
# Two loops like an attention kernel's: one with a mask, then one without. PITCH is the bytes between rows of
# the tile that ldmatrix reads: 128 puts all rows into the same banks, 144 does not.
TOY = r"""
#include <cstdint>
constexpr int N = 16, E = 8;
extern "C" __global__ void __launch_bounds__(128) toy(float* out, const uint4* in, int masked, int n) {
  extern __shared__ uint4 tile[];
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  uint32_t row = static_cast<uint32_t>(__cvta_generic_to_shared(tile)) + (threadIdx.x % 16) * PITCH;
  float c[N][4] = {}, sum = 0;
  auto step = [&](bool mask, int i) {
    uint32_t a[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(row));
#pragma unroll
    for (int k = 0; k < N; ++k) {
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
                   " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                   : "+f"(c[k][0]), "+f"(c[k][1]), "+f"(c[k][2]), "+f"(c[k][3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[1]), "r"(a[2]));
      if (mask) for (int j = 0; j < 4; ++j) if (i * 4 + j > (int)threadIdx.x) c[k][j] = -1e30f;
    }
#pragma unroll
    for (int e = 0; e < E; ++e) {
      float x;
      asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(c[e][e & 3]));
      sum += x;
    }
  };
#pragma unroll 1
  for (int i = 0; i < masked; ++i) step(true, i);
#pragma unroll 1
  for (int i = 0; i < n; ++i) step(false, i);
  for (int k = 0; k < N; ++k) for (int j = 0; j < 4; ++j) sum += c[k][j];
  out[blockIdx.x * 128 + threadIdx.x] = sum;
}
"""
SPILLS = r"""
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* p, int n) {
  float x[64];
  for (int i = 0; i < 64; ++i) x[i] = p[i * 1024 + threadIdx.x];
  for (int k = 0; k < n; ++k)
    for (int i = 0; i < 64; ++i) x[i] = x[i] * x[(i + 7) % 64] + p[k];
  for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = x[i];
}
"""
INDEXED = r"""
extern "C" __global__ void __launch_bounds__(128) indexed(float* p, const int* at, int n) {
  float x[32];
  for (int i = 0; i < 32; ++i) x[i] = p[i];
  for (int i = 0; i < n; ++i) x[at[i]] += p[i];
  p[threadIdx.x] = x[at[0]];
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """compiled(text, gpu=A100) -> the one kernel of this source."""
    folder = tmp_path_factory.mktemp("sass")

    def compile_(text, gpu=A100):
        source = folder / "source.cu"
        source.write_text(text)
        (kernel,) = build.read(build.build(source, gpu.arch, cache=folder, include=folder), gpu, {})
        return kernel

    return compile_


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.arch)
def test_the_loop_without_a_mask_is_found_and_counted(compiled, gpu):
    kernel = compiled(TOY.replace("PITCH", "144"), gpu)
    loop = kernel.main_loop
    assert loop.costs.tensor == PRODUCTS
    assert loop.costs.counts["HMMA"] == PRODUCTS
    assert loop.costs.counts["MUFU"] == EXPONENTIALS
    assert "FSEL" not in loop.costs.counts
    assert len(kernel.other_loops) == 1
    # A warp alone needs at least the tensor core's own time, and the load's latency on top.
    assert loop.latency_cycles >= PRODUCTS * gpu.tensor_cycles
    assert loop.latency_cycles >= loop.costs.stall_cycles
    assert kernel.resources.threads == 128
    assert gates.faults(kernel) == []
    assert kernel.blocks_per_sm("sm_80") == min(
        2048 // 128, 65536 // (128 * -(-kernel.resources.registers // 8) * 8)
    )


def test_bank_conflicts_of_the_loops_are_found(compiled):
    for pitch, ways in ((144, ""), (128, "8-way"), (160, "2-way"), (64, "4-way")):
        loop = compiled(TOY.replace("PITCH", str(pitch))).main_loop
        assert loop.accesses == 2  # one ldmatrix in each loop
        assert loop.not_analysed == ()
        assert len(loop.conflicts) == (2 if ways else 0)
        assert all(ways in text and "source.cu" in text for text in loop.conflicts)


def test_spills_and_indexed_arrays_are_faults(compiled):
    spills, indexed = compiled(SPILLS), compiled(INDEXED)
    for kernel in (spills, indexed):
        assert [rule for rule, _ in gates.faults(kernel)] == ["local memory"]
        assert kernel.local_store_bytes > 0
        assert kernel.local_load_bytes > 0
    assert indexed.resources.stack_bytes == 32 * 4


def test_a_source_that_does_not_compile_says_why(compiled):
    with pytest.raises(ToolError, match="undefined_thing"):
        compiled("undefined_thing;")


def test_the_code_in_a_library_reads_as_what_is_compiled_anew(compiled, tmp_path):
    """As `sass_report.py --installed` reads it, of a library with code for two architectures."""
    source, library = tmp_path / "source.cu", tmp_path / "library.so"
    source.write_text(TOY.replace("PITCH", "160"))
    codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in (80, 90)]
    flags = (*build.FLAGS, "-shared", "-Xcompiler", "-fPIC", *codes)
    run_tool("nvcc", *flags, "-o", library, source)
    build.extract(library, tmp_path)
    for gpu in (GPUS["A100"], GPUS["H100"]):
        (kernel,) = build.read_source(source, gpu, {}, tmp_path)
        assert kernel == compiled(TOY.replace("PITCH", "160"), gpu)
    with pytest.raises(ToolError, match="sm_89"):
        build.read_source(source, GPUS["RTX 4090"], {}, tmp_path)
