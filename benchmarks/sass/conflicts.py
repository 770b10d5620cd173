"""Bank conflicts of shared-memory accesses, proven for every lane by cuxray's dataflow over addresses."""

import re
import struct

from cuxray.analyze.access import analyze_accesses
from cuxray.parse import sass as cuxray_sass

from .disassembly import Function, Instruction, ToolError
from .loops import Graph, reverse_postorder

# What ptxas writes to set a register to a constant without the integer pipes: halves of 0 x 0 + constant.
CONSTANT = re.compile(r"(R\d+), -RZ, RZ, (\S+), (\S+)")


def shared_accesses(
    function: Function, graph: Graph, threads: int, addresses: set[int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the instructions at these addresses: those with bank conflicts, those that could not be followed.

    An access whose address cannot be followed through the code is not known to be free of conflicts.
    """
    found = analyze_accesses(for_cuxray(function, graph), (threads, 1, 1))
    code = {i.address: i for block in graph.instructions for i in block}
    if not found["dataflow_converged"]:
        return (), tuple(describe(code[a], "the dataflow did not converge") for a in sorted(addresses))
    ways = {a["addr"]: a["conflict_ways"] for a in found["accesses"] if a["space"] == "shared"}
    reasons = {a["addr"]: a["reason"] for a in found["unanalyzed"] if a.get("space") == "shared"}
    conflicts = tuple(describe(code[a], f"{ways[a]}-way") for a in sorted(addresses) if ways.get(a, 1) > 1)
    unknown = tuple(
        describe(code[a], reasons.get(a, "not looked at")) for a in sorted(addresses) if a not in ways
    )
    return conflicts, unknown


def describe(instruction: Instruction, what: str) -> str:
    source = f" ({instruction.source})" if instruction.source else ""
    return f"{instruction.opcode} at {instruction.address:#x}{source}: {what}"


def for_cuxray(function: Function, graph: Graph) -> cuxray_sass.Function:
    """The kernel with every edge of its control flow spelled out as a branch at the end of a block.

    cuxray's own blocks begin at labels alone: what a register holds at a branch in the middle of one would be
    taken for what it holds at its end. And it takes no notice of what a subroutine writes.
    """
    code = []

    def add(address: int, opcode: str, operands: str, predicate: str | None = None) -> None:
        code.append(cuxray_sass.Instruction(address, opcode, operands, predicate, block=label))

    for block in reverse_postorder(0, graph.successors.__getitem__):  # in which its few rounds suffice
        label = f".L_{block}"
        for i in graph.instructions[block]:
            opcode, operands = i.opcode, i.operands
            if i.name in ("BRA", "JMP", "BRX", "CALL", "BSSY", "BSYNC"):
                for register in written_by_subroutine(function, i):
                    add(-1, "LDSM.16.M88", f"{register}, [RZ]")  # whose result may be anything
                opcode = "NOP"
            elif i.name == "HFMA2" and (constant := CONSTANT.fullmatch(operands)):
                low, high = (struct.pack("<e", float(constant[n])) for n in (3, 2))
                opcode, operands = "MOV", f"{constant[1]}, {int.from_bytes(low + high, 'little'):#x}"
            add(i.address, opcode, operands, i.predicate or None)
        ends = graph.successors[block]
        for number, successor in enumerate(ends):
            add(-1, "BRA", f"`(.L_{successor})", "@P0" if number < len(ends) - 1 else None)
        if not ends:
            add(-1, "EXIT", "")
    return cuxray_sass.Function(".L_0", code)


def written_by_subroutine(function: Function, call: Instruction) -> list[str]:
    """The registers that the subroutine writes which this CALL goes to; none if it is no such CALL."""
    label = re.search(r"`\((\$[\w$]+)\)", call.operands)
    if call.name != "CALL" or label is None:
        return []
    found = set()
    for i in function.instructions[function.labels[label[1]] :]:
        if match := re.match(r"R(\d+)\b", i.operands):
            pair = "WIDE" in i.opcode or ".64" in i.opcode or i.name in ("CS2R", "F2I", "I2F", "F2F", "MUFU")
            found |= {f"R{int(match[1]) + n}" for n in range(2 if pair else 1)}
        if i.name == "RET":
            return sorted(found)
    raise ToolError(f"{function.name}: the subroutine {label[1]} does not return")
