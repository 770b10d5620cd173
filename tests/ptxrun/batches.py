"""Plans how a stretch of straight-line code runs as few numpy calls: which like instructions run together.

An interpreted instruction costs its Python and numpy overhead, whatever its few hundred lanes do.
Unrolled GPU code is full of like instructions that do not depend on each other (the 64 FMAs of a softmax
tile), so they are moved together, as far as registers and memory allow:

* Register instructions move freely between the definitions of their operands and the next writes of their
  registers.
* Whatever touches memory, or orders it, is a link of one chain that keeps its order.  Neighbours in it of
  one kind may run together.  lanes.py goes back to one at a time where the sanitizer has a doubt.
* A warp collective on registers (mma, shfl) also orders its warp's memory accesses: its place in the chain is
  taken by a "sync" link, while its arithmetic moves like a register instruction.
* Anything else (wgmma, mbarrier, TMA, ...) is a fence: nothing moves across it.

Only groups of whole warps run by plan, so no instruction of a plan can find part of its warp missing.
"""

import heapq
from typing import NamedTuple

import numpy as np

from .instr import Imm, Mem, Reg, Special, Sym, Vec

PURE = frozenset(
    (
        *("add", "div", "fma", "mad", "max", "min", "mul", "rem", "sub"),
        *("abs", "copysign", "dp4a", "neg", "sad"),
        *("cos", "ex2", "lg2", "rcp", "rsqrt", "sin", "sqrt", "tanh"),
        *("and", "bfe", "bfi", "bfind", "brev", "clz", "cnot", "lop3", "not", "or", "popc", "prmt"),
        *("shf", "shl", "shr", "xor"),
        *("cvt", "cvta", "isspacep", "mov", "selp", "set", "setp", "slct", "testp"),
    )
)
SPLIT = frozenset(("mma", "shfl"))  # collectives on registers of whole warps: a sync link, and arithmetic
LINKS = frozenset(
    (
        *("atom", "cp", "ld", "ldmatrix", "ldu", "red", "st", "stmatrix"),
        *("activemask", "bar", "barrier", "elect", "match", "movmatrix", "redux", "shfl", "vote"),
        *("addc", "madc"),  # they read the carry flag
    )
)
STORES = frozenset(("st", "red", "cp", "stmatrix", "bar", "barrier"))  # their first operand is no result
SYNCING = frozenset(("ldmatrix", "stmatrix"))  # links that order their warp's accesses themselves
FULL_WARP = 0xFFFFFFFF
# Immediate operands that may differ within a batch: they become one more array operand.
VARYING = frozenset(
    ("add", "and", "fma", "mad", "max", "min", "mov", "mul", "or", "selp", "setp", "sub", "xor")
)


class Step(NamedTuple):
    kind: str  # "one" instruction, a "batch" of like ones, or the "sync" of a collective
    instrs: list


def constants(code):
    """{register: value} of the registers that one instruction alone defines, by an immediate value."""
    definitions = {}
    for ins in code:
        for r in ins.registers(0) if ins.op not in STORES else ():
            definitions[r.key] = None if r.key in definitions else ins
    return {
        key: ins.args[1].value
        for key, ins in definitions.items()
        if ins and ins.op == "mov" and not ins.guard and isinstance(ins.args[1], Imm)
    }


def plan(code, constant=None):
    """[Step] for a list of Instr without control flow.  constant: constants() of the whole kernel."""
    constant = constant or {}
    steps, part = [], []
    for ins in code:
        kind = _kind(ins, constant)
        if kind == "fence":
            steps += _segment(part)
            steps.append(Step("one", [ins]))
            part = []
        else:
            part.append(_Node(ins, kind))
    return steps + _segment(part)


def _kind(ins, constant):
    """'pure', 'split', 'link' or 'fence'."""
    if ins.op in PURE:
        return "link" if ins.has("cc") else "pure"  # the carry flag is state besides the registers
    if ins.op == "mma":
        return "fence" if ins.guard else "split"
    if ins.op == "shfl":
        mask = ins.args[-1]
        members = mask.value if isinstance(mask, Imm) else constant.get(getattr(mask, "key", None), 0)
        return "split" if members & FULL_WARP == FULL_WARP and not ins.guard else "link"
    if ins.op == "ld" and _parameter(ins):
        return "pure"
    if ins.op == "cp" and ins.has("bulk", "mbarrier"):
        return "fence"
    return "link" if ins.op in LINKS else "fence"


def _parameter(ins):
    """Does it load a launch parameter, which nothing can change?"""
    return ins.has("param") and isinstance(ins.args[1].base, Sym) and ins.args[1].base.var.space == "kparam"


def _batch_key(ins, kind):
    """Instructions with equal keys can run together, unless they depend on each other.  None: only alone."""
    if ins.guard or (ins.op == "ld" and ins.has("param", "local", "const")):
        return None
    if kind == "link" and ins.op not in ("ld", "st", "ldmatrix", "cp"):
        return None
    if ins.op in ("ld", "st") and not any(m.split("::")[0] in ("shared", "global") for m in ins.mods):
        return None  # generic addresses
    if ins.op == "cp" and len(ins.args) < 3:
        return None  # commit and wait
    try:
        return (ins.op, *ins.mods, *(_shape(a, ins.op in VARYING) for a in ins.args))
    except _Alone:
        return None


class _Alone(Exception):
    """The operand binds an instruction to itself."""


def _shape(x, varying):
    if isinstance(x, Reg):
        return x.type
    if isinstance(x, Imm):
        return "imm" if varying else x.value
    if isinstance(x, Special):
        raise _Alone
    if isinstance(x, Mem):
        if not isinstance(x.base, (Reg, Sym)):
            raise _Alone
        return ("mem", _shape(x.base, False) if isinstance(x.base, Reg) else "sym", len(x.rest))
    if isinstance(x, Sym):
        return x.var.name, x.off
    if isinstance(x, Vec):
        return tuple(_shape(y, varying) for y in x.items)
    if isinstance(x, tuple) and not hasattr(x, "name"):  # Not, Pair
        return (type(x).__name__, *(_shape(y, varying) for y in x))
    return x  # Name


class _Node:
    """An instruction and what it waits for."""

    __slots__ = ("group", "ins", "key", "link", "next", "split", "waits")

    def __init__(self, ins, kind):
        self.ins, self.link, self.key = ins, kind == "link", _batch_key(ins, kind)
        self.split = kind == "split"
        self.waits, self.next, self.group = 0, [], None


def _segment(nodes):
    """Steps of instructions without a fence between them."""
    if not nodes:
        return []
    before = _depend(nodes)
    groups = _group(nodes, before)
    return _schedule(nodes, groups, _chain(nodes))


def _depend(nodes):
    """Fills in waits and next; returns for each node the indices of those it depends on by a register."""
    writer, readers, before = {}, {}, []
    for i, node in enumerate(nodes):
        ins, need = node.ins, set()
        results = () if ins.op in STORES or not ins.args else ins.registers(0)
        sources = ins.registers() if ins.op in STORES else ins.registers(1)
        keys = {r.key for r in sources}
        if ins.guard:
            keys.add(ins.guard.key)
        for k in keys:
            if k in writer:
                need.add(writer[k])
        for r in results:
            if r.key in writer:
                need.add(writer[r.key])
            need.update(readers.get(r.key, ()))
        for k in keys:
            readers.setdefault(k, []).append(i)
        for r in results:
            writer[r.key], readers[r.key] = i, []
        need.discard(i)
        before.append(need)
        node.waits = len(need)
        for j in need:
            nodes[j].next.append(node)
    return before


def _group(nodes, before):
    """Groups of nodes that may run together.  {group: number of members}

    A group has one key, and equally many nodes of that key on the longest path to each member: then no member
    depends on another."""
    column = {k: c for c, k in enumerate({n.key for n in nodes if n.key and not n.link})}
    depth = np.zeros((len(nodes), len(column)), np.int16)
    size = {}
    for i, node in enumerate(nodes):
        d = depth[i]
        for j in before[i]:
            np.maximum(d, depth[j], out=d)
        if node.link:
            continue
        if node.key is None:
            node.group = (None, i)
        else:
            c = column[node.key]
            d[c] += 1
            node.group = (c, int(d[c]))
        size[node.group] = size.get(node.group, 0) + 1
    return size


def _chain(nodes):
    """The links in order: nodes, and None for the sync of a split collective with an access before it."""
    chain = []
    for node in nodes:
        if node.link:
            if node.ins.op in SYNCING and chain and chain[-1] is None:
                chain.pop()
            chain.append(node)
        elif node.split and (not chain or chain[-1] is not None):
            chain.append(None)
    return chain


def _schedule(nodes, size, chain):
    """Greedy list scheduling: whole groups first, then the chain, then the largest part of a group."""
    at = {id(n): i for i, n in enumerate(nodes)}
    ready = {}  # group -> its nodes that wait for nothing
    full = []  # heap of (first node, group) whose members are all ready
    steps, head = [], 0

    def free(node):
        if node.link:
            return
        members = ready.setdefault(node.group, [])
        members.append(node)
        if len(members) == size[node.group]:
            heapq.heappush(full, (min(at[id(n)] for n in members), node.group))

    def run(members):
        members.sort(key=lambda n: at[id(n)])
        kind = "one" if members[0].key is None else "batch"
        steps.append(Step(kind, [n.ins for n in members]))
        for n in members:
            for later in n.next:
                later.waits -= 1
                if not later.waits:
                    free(later)

    for node in nodes:
        if not node.waits:
            free(node)
    while ready or head < len(chain):
        if full:
            _, group = heapq.heappop(full)
            del size[group]
            run(ready.pop(group))
            continue
        if head < len(chain) and chain[head] is None:
            steps.append(Step("sync", []))
            head += 1
            continue
        links = _run_of_links(chain, head)
        if links:
            head += len(links)
            run(links)
            continue
        group = max(ready, key=lambda g: (len(ready[g]) / size[g], -at[id(ready[g][0])]))
        members = ready.pop(group)
        size[group] -= len(members)
        run(members)
    return steps


def _run_of_links(chain, head):
    """The links of one kind at the head of the chain that wait for nothing."""
    links = []
    for node in chain[head:]:
        if node is None or node.waits or (links and (node.key is None or node.key != links[0].key)):
            break
        links.append(node)
    return links
