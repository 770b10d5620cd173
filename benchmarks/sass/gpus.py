"""Datasheet figures of the GPUs that predictions are made for."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class GPU:
    """Rates are per clock; a multiprocessor (SM) has four sub-partitions, each with a warp scheduler."""

    name: str
    arch: str
    sms: int
    ghz: float  # boost clock, at which the datasheet states its peak
    tensor_fma: int  # dense f16/bf16 with float32 sums, per sub-partition
    fma_lanes: int  # float32 lanes of a sub-partition
    double_lanes: float  # float64 lanes of a sub-partition
    dram_gbytes: float  # per second

    # The same on all of these. CUDA C++ Programming Guide, table "Throughput of Native Arithmetic
    # Instructions", a quarter of its figures for an SM: integer and logic 64, special functions 16.
    alu_lanes = 16
    mufu_lanes = 4

    @property
    def peak_tflops(self) -> float:
        return 2e-3 * self.sms * 4 * self.tensor_fma * self.ghz

    @property
    def tensor_cycles(self) -> float:
        """For which one m16n8k16 (2048 multiply-adds) keeps its sub-partition's tensor core busy."""
        return 2048 / self.tensor_fma


GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA A100 Tensor Core GPU datasheet (SXM, 80 GB): 312 TFLOP/s f16, 2039 GB/s; A100 architecture
        # white paper, table 1: 108 SMs, 1410 MHz, 1024 FMA per SM and clock; 64 float32, 32 float64 lanes.
        GPU("A100", "sm_80", 108, 1.410, 256, 16, 8, 2039),
        # NVIDIA H100 Tensor Core GPU datasheet (SXM5): 989.4 TFLOP/s f16 dense, 3.35 TB/s; H100 architecture
        # white paper: 132 SMs, 2048 FMA per SM and clock, 1830 MHz for tensor work; 128 float32, 64 float64
        # lanes per SM.
        GPU("H100", "sm_90", 132, 1.830, 512, 32, 16, 3350),
        # NVIDIA Ada GPU architecture white paper, RTX 4090: 165.2 TFLOP/s f16 with float32 sums, 1008 GB/s,
        # 128 SMs, 2520 MHz; 128 float32, 2 float64 lanes per SM; 165.2e12 / (128 x 4 x 2.52e9 x 2) = 64.
        GPU("RTX 4090", "sm_89", 128, 2.520, 64, 32, 0.5, 1008),
    )
}
A100, HOPPER = GPUS["A100"], GPUS["H100"]
