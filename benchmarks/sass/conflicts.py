"""Bank conflicts of shared-memory accesses, proven for every lane by cuxray's dataflow over addresses."""

import re
import struct

from cuxray.analyze.access import analyze_accesses
from cuxray.parse import sass as cuxray_sass

from .costs import SHARED_MEMORY
from .disassembly import Function, Instruction, ToolError
from .loops import Graph, reverse_postorder

Line = tuple[int, str, str, str]  # address, opcode, operands, predicate
ONE_RESULT = {"IADD3", "IMAD", "LEA", "LOP3", "MOV", "SEL", "SHF"}
# Opcodes that write several registers.
FOUR = re.compile(r"HMMA|LDSM|.*\.128")
TWO = re.compile(r"\w+\.WIDE|CS2R|DADD|DMUL|DFMA|F2I.*64|I2F.*F64|F2F.*F64|.*\.64")
# What ptxas writes to set a register to a constant without the integer pipes: halves of 0 x 0 + constant.
CONSTANT = re.compile(r"(R\d+), -RZ, RZ, (\S+), (\S+)")
BOTH = re.compile(r"(P\d), (R\d+, .*)")  # LOP3's operands where it writes a predicate and a register
ZEROS = re.compile(r"CS2R R(\d+), SRZ")  # a pair of registers becomes 0: cuxray does not see it


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
    order = reverse_postorder(0, graph.successors.__getitem__)  # in which its few rounds suffice
    blocks: dict[int, list[Line]] = {}
    for block in order:
        lines: list[Line] = []
        for i in graph.instructions[block]:
            if i.name in ("BRA", "JMP", "BRX", "CALL", "BSSY", "BSYNC"):
                # A subroutine's results may be anything, as those of a matrix load.
                lines += [(-1, "LDSM.16.M88", f"{r}, [RZ]", "") for r in written_by_subroutine(function, i)]
                lines.append((i.address, "NOP", "", ""))
            elif i.name == "HFMA2" and (constant := CONSTANT.fullmatch(i.operands)):
                low, high = (struct.pack("<e", float(constant[n])) for n in (3, 2))
                value = int.from_bytes(low + high, "little")
                lines.append((i.address, "MOV", f"{constant[1]}, {value:#x}", i.predicate))
            elif i.name == "LOP3" and (both := BOTH.fullmatch(i.operands)):
                lines.append((i.address, i.opcode, both[2], i.predicate))
                lines.append((-1, "ISETP", f"{both[1]}, PT, RZ, RZ, PT", i.predicate))
            elif zeros := ZEROS.fullmatch(f"{i.opcode} {i.operands}"):
                pair = registers_from(int(zeros[1]), i.opcode)
                lines += [(i.address, "MOV", f"{register}, RZ", i.predicate) for register in pair]
            else:
                lines.append((i.address, i.opcode, i.operands, i.predicate))
        blocks[block] = with_shadows(lines)
    code = []
    for block, lines in addresses_alone(blocks, graph.successors).items():
        label, ends = f".L_{block}", graph.successors[block]
        jumps = [(-1, "BRA", f"`(.L_{to})", "@P0" if n < len(ends) - 1 else "") for n, to in enumerate(ends)]
        for address, opcode, operands, predicate in lines + (jumps or [(-1, "EXIT", "", "")]):
            code.append(cuxray_sass.Instruction(address, opcode, operands, predicate or None, block=label))
    return cuxray_sass.Function(".L_0", code)


def with_shadows(lines: list[Line]) -> list[Line]:
    """A block's lines, in which what a predicate guards is kept apart.

    After `@P0 IADD3 R5, ...` R5 may hold the old or the new value, but `@P0 LDGSTS [R5]` uses the new one.
    So the new one also goes to a register of its own, R5's shadow, for instructions with the same predicate.
    """
    result: list[Line] = []
    shadows: dict[str, str] = {}  # register that has a shadow -> predicate it is valid under
    for address, opcode, operands, predicate in lines:
        target, comma, sources = operands.partition(", ")
        written = re.fullmatch(r"R(\d+)", target)
        if not written:  # a store: its first operand is an address
            target = to_shadows(target, shadows, predicate)
        sources = to_shadows(sources, shadows, predicate)
        # Predicates that it writes stand first, or right after the register that it writes.
        changed = re.findall(r"P\d", re.match(r"(?:U?R\w+, )?((?:P\w, )*)", operands)[1])
        for register, guard in list(shadows.items()):
            if guard.lstrip("@!") in changed or opcode == "R2P":
                del shadows[register]
        if written:
            for register in registers_from(int(written[1]), opcode):
                shadows.pop(register, None)
            if predicate and not changed and opcode.partition(".")[0] in ONE_RESULT and "WIDE" not in opcode:
                result.append((-1, opcode, f"{shadow(written)}, {sources}", ""))
                shadows[target] = predicate
        result.append((address, opcode, f"{target}{comma}{sources}", predicate))
    return result


def addresses_alone(blocks: dict[int, list[Line]], successors: list[list[int]]) -> dict[int, list[Line]]:
    """The blocks without what no address in shared memory depends on: most of a kernel, and cuxray is slow.

    An instruction stays if one that stays may read, on some way from it, a register that it may write. Only
    the first register that one without a predicate names is taken to be overwritten for certain.
    """
    needed: dict[int, set[str]] = {block: set() for block in blocks}  # registers, where the block begins
    while True:
        kept = {block: [] for block in blocks}
        before = dict(needed)
        for block in reversed(blocks):
            live = set().union(*(needed[to] for to in successors[block]))
            for line in reversed(blocks[block]):
                _, opcode, operands, predicate = line
                target, _, sources = operands.partition(",")
                written = re.fullmatch(r"(U?R)(\d+)", target)
                results = registers_from(int(written[2]), opcode, written[1]) if written else []
                shared = opcode.partition(".")[0] in SHARED_MEMORY
                if shared or not live.isdisjoint(results):
                    kept[block].insert(0, line)
                    if not predicate:
                        live.discard(target)
                    address = re.search(r"\[[^]]*\]", operands)  # in shared memory, the first of LDGSTS's two
                    live.update(re.findall(r"\bU?R\d+\b", address[0] if shared else sources))
            needed[block] = live
        if needed == before:  # no block needs more of those before it
            return kept


def to_shadows(operands: str, shadows: dict[str, str], predicate: str) -> str:
    registers = [register for register, guard in shadows.items() if guard == predicate]
    for register in registers:
        operands = re.sub(rf"\bR({register[1:]})\b", shadow, operands)
    return operands


def shadow(register: re.Match) -> str:
    return f"R{int(register[1]) + 1000}"  # no kernel has as many


def registers_from(first: int, opcode: str, kind: str = "R") -> list[str]:
    """Those that an instruction writes whose first operand is R<first>, or UR<first>."""
    count = 4 if FOUR.match(opcode) else 2 if TWO.match(opcode) else 1
    return [f"{kind}{first + n}" for n in range(count)]


def written_by_subroutine(function: Function, call: Instruction) -> list[str]:
    """The registers that the subroutine writes which this CALL goes to; none if it is no such CALL."""
    label = re.search(r"`\((\$[\w$]+)\)", call.operands)
    if call.name != "CALL" or label is None:
        return []
    found = set()
    for i in function.instructions[function.labels[label[1]] :]:
        if match := re.match(r"R(\d+)\b", i.operands):
            found.update(registers_from(int(match[1]), i.opcode))
        if i.name == "RET":
            return sorted(found)
    raise ToolError(f"{function.name}: the subroutine {label[1]} does not return")
