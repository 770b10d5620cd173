"""Control flow of a kernel: basic blocks, natural loops, and the trips round a loop."""

import dataclasses
import itertools
import re
from collections.abc import Callable

from .disassembly import Function, Instruction, ToolError

BRANCHES = {"BRA", "JMP", "BRX", "JMX", "CALL"}
ENDS = {"EXIT", "RET", "KILL", "BPT"}


@dataclasses.dataclass
class Graph:
    instructions: list[list[Instruction]]  # by block
    successors: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Loop:
    header: int  # the block that every trip starts with
    blocks: frozenset[int]
    label: str  # the header's, as nvdisasm names it


def control_flow(function: Function) -> Graph:
    """Blocks split at branches and at the labels that are branched to.

    CALL to a label inside the kernel is how ptxas leaves a loop for a distant place: a jump. CALL to a
    subroutine of its own (division) returns, and is no branch here.
    """
    code, last = function.instructions, len(function.instructions) - 1
    targets: dict[int, list[int]] = {}  # branch -> where to
    joins: dict[str, list[int]] = {}  # barrier register of BSSY -> where its BSYNC goes on
    for at, instruction in enumerate(code):
        to = [function.labels[label] for label in re.findall(r"\.L_[\w$]+", instruction.operands)
              if function.labels.get(label, last + 1) <= last]  # fmt: skip
        if instruction.name == "BSSY":
            joins.setdefault(_first_operand(instruction), []).extend(to)
        elif instruction.name in BRANCHES and (to or instruction.name != "CALL"):
            if not to:
                where = f"{function.name}, {instruction.address:#x}"
                raise ToolError(f"{where}: {instruction.opcode} {instruction.operands} cannot be followed")
            targets[at] = to
    starts = {0, *(t for to in (*targets.values(), *joins.values()) for t in to)}
    breaks = ENDS | {"BSYNC", "BREAK"}
    starts |= {at + 1 for at, i in enumerate(code) if at < last and (at in targets or i.name in breaks)}
    bounds = [*sorted(starts), last + 1]
    block_at = {start: block for block, start in enumerate(bounds[:-1])}
    successors = []
    for end in bounds[1:]:
        at, instruction = end - 1, code[end - 1]
        following = {block_at[t] for t in targets.get(at, ())}
        falls_through = at not in targets and instruction.name not in ENDS
        if (falls_through or _is_conditional(instruction, at in targets)) and end in block_at:
            following.add(block_at[end])
        if instruction.name == "BSYNC":
            ahead = [t for t in joins.get(_first_operand(instruction), []) if t > at]
            following |= {block_at[min(ahead)]} if ahead else set()
        successors.append(sorted(following))
    return Graph([code[a:b] for a, b in itertools.pairwise(bounds)], successors)


def _first_operand(instruction: Instruction) -> str:
    return instruction.operands.split(",")[0].strip()


def _is_conditional(instruction: Instruction, branches: bool) -> bool:
    """By its predicate, or by a first operand in front of the target, as in `BRA.DIV UR4, target`."""
    before_target = instruction.operands.split("`")[0]
    return instruction.predicate != "" or (
        branches and "," in before_target and _first_operand(instruction).lstrip("!") != "PT"
    )


def find_loops(graph: Graph, labels: dict[str, int]) -> list[Loop]:
    """The natural loops: a jump back to a block that dominates it, and all blocks on a way to that jump."""
    order = reverse_postorder(0, graph.successors.__getitem__)
    predecessors: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for successor in graph.successors[block]:
            predecessors[successor].append(block)
    everything = (1 << len(graph.successors)) - 1
    dominators = dict.fromkeys(order, everything)  # bit sets
    dominators[order[0]] = 1 << order[0]
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            common = everything
            for predecessor in predecessors[block]:
                common &= dominators[predecessor]
            if (new := common | 1 << block) != dominators[block]:
                dominators[block], changed = new, True
    bodies: dict[int, set[int]] = {}
    for block in order:
        for header in graph.successors[block]:
            if dominators[block] >> header & 1:
                body, reached = bodies.setdefault(header, {header}), [block]
                while reached:
                    if (inside := reached.pop()) not in body:
                        body.add(inside)
                        reached += predecessors[inside]
    starts, start = [], 0
    for instructions in graph.instructions:
        starts.append(start)
        start += len(instructions)
    names = {index: label for label, index in labels.items()}
    return [
        Loop(
            header, frozenset(body), names.get(starts[header], f"@{graph.instructions[header][0].address:#x}")
        )
        for header, body in sorted(bodies.items())
    ]


def body(graph: Graph, loop: Loop) -> list[Instruction]:
    """Every instruction of the loop, its alternatives too."""
    return [instruction for block in sorted(loop.blocks) for instruction in graph.instructions[block]]


def trip(
    graph: Graph, loop: Loop, inner: list[Loop], work: Callable[[Instruction], float], *, dearest: bool
) -> list[Instruction]:
    """The instructions of one trip round the loop, in order: of the trips that do the most `work`, the one
    with the most stall cycles, or the fewest. A loop inside the body is passed through once."""
    sign = 1 if dearest else -1
    back = {(block, nested.header) for nested in inner for block in nested.blocks}
    best: dict[int, tuple[float, int, list[int]]] = {}  # block -> work, signed stalls, blocks to the end

    def following(block: int) -> list[int]:
        return [
            s for s in graph.successors[block]
            if s in loop.blocks and s != loop.header and (block, s) not in back
        ]  # fmt: skip

    for block in reversed(reverse_postorder(loop.header, following)):
        ends = [(0.0, 0, [])] if loop.header in graph.successors[block] else []
        ways = ends + [best[s] for s in following(block) if s in best]
        if ways:
            most = max(ways, key=lambda way: way[:2])
            here = graph.instructions[block]
            best[block] = (
                most[0] + sum(map(work, here)), most[1] + sign * sum(i.stall for i in here), [block, *most[2]]
            )  # fmt: skip
    return [instruction for block in best[loop.header][2] for instruction in graph.instructions[block]]


def reverse_postorder(start: int, following: Callable[[int], list[int]]) -> list[int]:
    """Every block that is reached from `start`, each before those it leads to (back edges aside)."""
    order, seen, stack = [], {start}, [(start, iter(following(start)))]
    while stack:
        block, rest = stack[-1]
        for successor in rest:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(following(successor))))
                break
        else:
            order.append(block)
            stack.pop()
    return order[::-1]
