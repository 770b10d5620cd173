"""What a run of instructions asks of a multiprocessor, and how long one warp takes for it."""

import collections
import dataclasses
import math
import re

from .disassembly import Instruction
from .gpus import GPU

# Multiply-adds of one warp by the shape in the opcode (HMMA.16816 is m16n8k16).
TENSOR_SHAPES = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "884": 8 * 8 * 4}
TENSOR_UNIT = 16 * 8 * 16

# Which unit executes what. Integer multiplies and float32 share the FMA pipe.
FMA_PIPE = {"FFMA", "FMUL", "FADD", "FFMA32I", "FMUL32I", "FADD32I", "IMAD", "IMUL", "IDP"}
DOUBLE_PIPE = {"DFMA", "DADD", "DMUL", "DSETP"}
ALU_PIPE = {
    *("IADD3", "IADD", "VIADD", "LEA", "IABS", "IMNMX", "VIMNMX", "VABSDIFF", "ISETP", "SEL", "CSEL", "I2FP"),
    *("LOP3", "LOP32I", "PLOP3", "SHF", "SHL", "SHR", "PRMT", "MOV", "BMSK", "SGXT", "P2R", "R2P"),
    *("FSETP", "FSET", "FSEL", "FMNMX", "F2FP", "FCHK", "HMNMX2", "HSETP2"),
}  # fmt: skip
SPECIAL_PIPE = {"MUFU", "F2F", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV"}
SHARED_MEMORY = {"LDS", "STS", "LDSM", "STSM", "LDGSTS", "ATOMS"}
LOCAL_MEMORY = {"LDL", "STL"}

# Cycles until a result arrives, for the replay below: round figures of public micro-benchmarks of Ampere and
# Hopper, not measurements of ours. What is not named takes 20.
LATENCY = collections.defaultdict(
    lambda: 20,
    LDSM=33, LDS=30, STSM=30, LDG=400, LD=400, LDL=40, LDC=40, ULDC=40, SHFL=25, S2R=30, S2UR=30,
    ATOM=600, ATOMG=600, ATOMS=60, R2UR=12, VOTEU=12, REDUX=30, SYNCS=30,
)  # fmt: skip
OPERANDS_READ = 12  # cycles until an instruction has read its registers
COPY_ARRIVES = 500  # cp.async group, from commit to arrival: an L2 hit under load


WGMMA_ARRIVES = 30  # from the end of a group's last product until its registers can be read


def wgmma_shape(instruction: Instruction) -> tuple[int, int, int] | None:
    """M, N, K of a product of a warpgroup: HGMMA.64x128x16."""
    shape = re.search(r"\.(\d+)x(\d+)x(\d+)", instruction.opcode) if instruction.name == "HGMMA" else None
    return tuple(map(int, shape.groups())) if shape else None


def tensor_units(instruction: Instruction) -> float:
    """Tensor-core time, in units of one f16 m16n8k16. TF32 runs at half the rate of f16."""
    if shape := wgmma_shape(instruction):
        return math.prod(shape) / 4 / TENSOR_UNIT  # each of the four warps has a quarter of the rows
    if instruction.name != "HMMA":
        return 0.0
    fma = next((TENSOR_SHAPES[p] for p in instruction.opcode.split(".") if p in TENSOR_SHAPES), TENSOR_UNIT)
    return fma / TENSOR_UNIT * (2 if ".TF32" in instruction.opcode else 1)


def fma_work(instruction: Instruction) -> float:
    """Multiply-adds per lane, for kernels without tensor cores."""
    return float(instruction.name in ("FFMA", "DFMA"))


def shared_wavefronts(instruction: Instruction) -> float:
    """Cycles in which the SM's shared memory moves 128 bytes for this access, without bank conflicts."""
    if not instruction.runs:
        return 0.0
    if shape := wgmma_shape(
        instruction
    ):  # B once for the four warps; A, the second operand, if not in registers
        rows, columns, k = shape
        a_in_registers = re.match(r"[^,]*,\s*R\d", instruction.operands)
        return (columns + (0 if a_in_registers else rows)) * k * 2 / 128 / 4
    if instruction.name in ("LDSM", "STSM"):
        count = re.search(r"\.([124])(?:\.|$)", instruction.opcode)
        return float(count[1]) if count else 1.0
    if instruction.name in ("LDS", "STS", "LDGSTS"):
        return max(1.0, instruction.bytes / 4)
    return {"ATOMS": 2.0, "SHFL": 1.0}.get(instruction.name, 0.0)


@dataclasses.dataclass(frozen=True)
class Costs:
    """One warp's trip round a loop (or a whole kernel): exact counts, and the compiler's stall cycles."""

    instructions: int
    counts: dict[str, int]  # by name
    tensor: float  # units of one f16 m16n8k16
    stall_cycles: int
    shared_wavefronts: float
    local_bytes: int  # per thread, loads and stores of local memory: spills and indexed arrays

    def count(self, names: set[str]) -> int:
        return sum(n for name, n in self.counts.items() if name in names)

    def pipes(self, gpu: GPU) -> dict[str, float]:
        """Cycles for which each unit is busy with it, per sub-partition.

        Shared memory serves the four sub-partitions in turn, so its cycles count fourfold here.
        """
        return {
            "tensor": self.tensor * gpu.tensor_cycles,
            "issue": float(self.instructions),
            "fma": self.count(FMA_PIPE) * 32 / gpu.fma_lanes,
            "double": self.count(DOUBLE_PIPE) * 32 / gpu.double_lanes,
            "alu": self.count(ALU_PIPE) * 32 / gpu.alu_lanes,
            "mufu": self.count(SPECIAL_PIPE) * 32 / gpu.mufu_lanes,
            "shared": self.shared_wavefronts * 4,
        }


def tally(instructions: list[Instruction]) -> Costs:
    running = [i for i in instructions if i.runs]
    return Costs(
        instructions=len(instructions),
        counts=dict(collections.Counter(i.name for i in running)),
        tensor=sum(map(tensor_units, instructions)),
        stall_cycles=sum(i.stall for i in instructions),
        shared_wavefronts=sum(map(shared_wavefronts, running)),
        local_bytes=sum(i.bytes for i in running if i.name in LOCAL_MEMORY),
    )


def replay(trip: list[Instruction], gpu: GPU) -> float:
    """Cycles one warp alone needs for a trip in steady state, when results take LATENCY to arrive.

    Follows the compiler's scoreboards (who sets which, who waits for which), groups of asynchronous copies
    and of wgmma, and the tensor core's pace. One warp has the multiprocessor to itself; barriers are free.
    The stall counts alone cannot show a load that nothing hides: this does.
    """
    now, tensor_free = 0.0, 0.0
    boards = [0.0] * 6  # when each scoreboard is released
    copies: list[float] = []  # when each committed group has arrived
    products: list[float] = []  # the same of wgmma's
    starts = []
    for _ in range(4):  # three trips to settle, the fourth counts
        starts.append(now)
        for i in trip:
            now = max([now, *(boards[b] for b in range(6) if i.waits >> b & 1)])
            if i.name == "DEPBAR" and (groups := re.search(r"\bSB0\s*,\s*0x([0-9a-f]+)", i.operands)):
                arrived, copies = _split(copies, int(groups[1], 16))
                now = max([now, *arrived])
            elif i.name == "LDGDEPBAR":
                copies.append(now + COPY_ARRIVES)
            elif i.name == "WARPGROUP" and (groups := re.search(r"\bgsb0\s*,\s*0x([0-9a-f]+)", i.operands)):
                arrived, products = _split(products, int(groups[1], 16))
                now = max([now, *arrived])
            elif wgmma_shape(i):  # it does not hold up the warp
                tensor_free = max(now, tensor_free) + tensor_units(i) * gpu.tensor_cycles
                if "gsb0" in i.operands:  # the last of its group
                    products.append(tensor_free + WGMMA_ARRIVES)
            elif units := tensor_units(i):
                now = max(now, tensor_free)
                tensor_free = now + units * gpu.tensor_cycles
            if i.runs:
                if i.result_board < 6 and i.name != "LDGDEPBAR":
                    boards[i.result_board] = max(boards[i.result_board], now + LATENCY[i.name])
                if i.operand_board < 6:
                    boards[i.operand_board] = max(boards[i.operand_board], now + OPERANDS_READ)
            now += i.stall
    return now - starts[-1]


def _split(copies: list[float], pending: int) -> tuple[list[float], list[float]]:
    """The groups that `cp.async.wait_group pending` waits for, and the `pending` newest that it does not."""
    at = max(len(copies) - pending, 0)
    return copies[:at], copies[at:]
