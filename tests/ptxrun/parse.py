"""PTX text -> Program: one flat instruction list plus symbol tables.

Scopes ({...} in inline asm) are resolved here: every register operand carries a unique key,
every branch target is an instruction index.
"""

import re
import struct

from .errors import Unsupported
from .instr import SINK, SIZE, Func, Imm, Instr, Mem, Name, Not, Pair, Reg, Special, Sym, Var, Vec


class _Scope:
    def __init__(self, parent, key):
        self.parent, self.key = parent, key
        self.names, self.ranges, self.labels = {}, {}, {}
        self.targets = {}  # .branchtargets
        self.found = {}  # answers of find()
        self.operands = {}  # text -> operand

    def find(self, name):
        hit = self.found.get(name)
        if hit is None:
            hit = self._find(name)
            if hit is not None:
                self.found[name] = hit
        return hit

    def _find(self, name):
        if name in self.names:
            return self.names[name]
        if self.ranges:
            m = re.match(r"(.*?)(\d+)$", name)
            if m and m[1] in self.ranges and int(m[2]) < self.ranges[m[1]][1]:
                return Reg((self.key, name), self.ranges[m[1]][0])
        return self.parent.find(name) if self.parent else None

    def label(self, name):
        s = self
        while s:
            if name in s.labels:
                return s.labels[name]
            s = s.parent
        return None


_NUM = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?$")
_FLT = re.compile(r"0([fF])([0-9a-fA-F]{8})$|0([dD])([0-9a-fA-F]{16})$")
_DEC = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?$")
_SPACE = re.compile(r"\s*")
_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)")
_HEAD = re.compile(r"(?:\.(?:visible|extern|weak|common)\s+)*\.(entry|func)\b\s*")
_GUARD = re.compile(r"@(!?)\s*([\w$%]+)\s+")
_OPCODE = re.compile(r"([\w.:]+)\s*")


def split(s):
    """The parts between commas that stand in no brackets."""
    parts, open_part, depth = [], [], 0
    for piece in s.split(","):
        open_part.append(piece)
        depth += sum(map(piece.count, "{[(")) - sum(map(piece.count, "}])"))
        if depth == 0:
            parts.append(",".join(open_part).strip())
            open_part = []
    return [x for x in parts if x]


def number(s):
    s = s.strip()
    m = _FLT.match(s)
    if m:
        return Imm(("f", int(m[2], 16), 32) if m[1] else ("f", int(m[4], 16), 64))
    if _NUM.match(s):
        t = s.rstrip("uU") if "x" not in s.lower() else s.rstrip("U")
        neg, t = t.startswith("-"), t.lstrip("+-")
        v = int(t, 8) if len(t) > 1 and t[0] == "0" and t.isdigit() else int(t, 0)
        return Imm(-v if neg else v)
    if _DEC.match(s):
        return Imm(("f", int.from_bytes(struct.pack("<d", float(s)), "little"), 64))
    return None


class Program:
    """code: the instructions of the functions loaded so far; funcs by name; vars of every state space."""

    def __init__(self, text):
        self.code, self.funcs, self.vars = [], {}, []
        self._opcodes, self._scopes = {}, 0
        self._globals = _Scope(None, "g")
        self._text = _without_comments(text)
        self._outline()

    # -- operands -------------------------------------------------------------------------
    def _addr(self, s, sc):
        s = s.strip()
        n = number(s)
        if n:
            return n, 0
        m = re.match(r"([^+\-\s]+)\s*(?:([+-])\s*([+-]?\w+))?$", s)
        if not m:
            raise Unsupported(f"address expression {s!r}")
        off = number(m[3]).value * (-1 if m[2] == "-" else 1) if m[3] else 0
        return self._operand(m[1], sc), off

    def _operand(self, s, sc):
        found = sc.operands.get(s)
        if found is None:
            found = sc.operands[s] = self._new_operand(s.strip(), sc)
        return found

    def _new_operand(self, s, sc):
        if s == "_":
            return SINK
        c = s[0]
        if c in "{(":
            return Vec([self._operand(x, sc) for x in split(s[1:-1])])
        if c == "[":
            parts = split(s[1:-1])
            base, off = self._addr(parts[0], sc)
            return Mem(base, off, [self._operand(x, sc) for x in parts[1:]])
        if c == "!":
            return Not(self._operand(s[1:], sc))
        if "|" in s:
            a, b = s.split("|")
            return Pair(self._operand(a, sc), self._operand(b, sc))
        hit = sc.find(s)
        if hit is not None:
            return Sym(hit, 0) if isinstance(hit, Var) else hit
        n = number(s)
        if n is not None:
            return n
        if c == "%":
            return Special(s)
        m = re.match(r"([\w$%.]+)\s*\+\s*(\w+)$", s)
        if m and isinstance(sc.find(m[1]), Var):
            return Sym(sc.find(m[1]), number(m[2]).value)
        if s == "WARP_SZ":
            return Imm(32)
        return Name(s)

    # -- declarations ---------------------------------------------------------------------
    def _var(self, s, func):
        """'.extern .shared .align 16 .b8 name[12] = {...}' -> Var"""
        decl, _, init = s.partition("=")
        m = re.search(r"\.align\s+(\d+)", decl)
        toks = re.findall(r"\.(\w+)", re.sub(r"\.align\s+\d+", "", decl))
        space = next(t for t in toks if t in ("global", "const", "shared", "local", "param"))
        typ = next(t for t in toks if t in SIZE or t in ("texref", "samplerref", "surfref"))
        vec = next((int(t[1]) for t in toks if t in ("v2", "v4")), 1)
        nm = re.search(r"([\w$%]+)\s*((?:\[\s*\d*\s*\]\s*)*)$", decl.strip())
        n = vec
        for d in re.findall(r"\[\s*(\d*)\s*\]", nm[2]):
            n *= int(d or 0)
        esz = SIZE.get(typ, 8)
        v = Var(nm[1], space, typ, int(m[1]) if m else esz * vec, n * esz, func=func)
        if init:
            v.init, v.refs = self._init(init.strip().rstrip(";"), esz)
            v.size = max(v.size, len(v.init))
        return v

    @staticmethod
    def _init(s, esz):
        out, refs = b"", []
        for x in split(re.sub(r"[{}]", " ", s)):
            n = number(x)
            if n is None:
                refs.append((len(out), x))
                out += bytes(esz)
            else:
                v = n.value[1] if isinstance(n.value, tuple) else n.value
                out += (v & ((1 << 8 * esz) - 1)).to_bytes(esz, "little")
        return out, refs

    # -- main loop ------------------------------------------------------------------------
    def _outline(self):
        """Module-scope variables, and where the functions are."""
        text, pos = self._text, 0
        while True:
            pos = _SPACE.match(text, pos).end()
            if pos >= len(text):
                break
            head = _HEAD.match(text, pos)
            if head:
                pos = self._func(head)
                continue
            end = text.index(";", pos)
            self._directive(text[pos:end].strip(), self._globals, None)
            pos = end + 1

    def _func(self, head):
        text, pos = self._text, head.end()
        entry, rets, params = head[1] == "entry", [], []

        def variables(p):
            q = text.index(")", p)
            return [self._var(x, None) for x in split(text[p + 1 : q])], q + 1

        if text[pos] == "(":
            rets, pos = variables(pos)
        m = re.compile(r"\s*([\w$]+)\s*").match(text, pos)
        name, pos = m[1], m.end()
        if pos < len(text) and text[pos] == "(":
            params, pos = variables(pos)
        f = Func(name, entry, params, rets)
        m = re.compile(r"[^{;]*").match(text, pos)  # .maxntid etc.
        f.maxntid = _product(r"\.(?:maxntid|reqntid)", m[0])
        f.cluster = _product(r"\.reqnctapercluster", m[0]) or 1
        pos = m.end()
        if text[pos] == ";":  # prototype
            self.funcs.setdefault(name, f)
            return pos + 1
        f.scope = self._scope(self._globals, "f")
        for v in params + rets:
            v.func, v.space = name, "kparam" if entry else "param"
            f.scope.names[v.name] = v
            self.vars.append(v)
        depth = 0
        for brace in re.compile(r"[{}]").finditer(text, pos):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                break
        f.body = pos, brace.end()
        self.funcs[name] = f
        return brace.end()

    def _scope(self, parent, prefix=""):
        self._scopes += 1
        return _Scope(parent, f"{prefix}{self._scopes}")

    def load(self, f):
        """Parses the body of a function, once: a file may hold many kernels, and a launch needs one."""
        if f.start is not None or f.body is None:
            return
        f.start, fixups = len(self.code), []
        text, (pos, stop), sc = self._text, f.body, f.scope
        line, last = 1 + text.count("\n", 0, pos), pos
        while True:
            pos = _SPACE.match(text, pos).end()
            if pos >= stop:
                break
            line += text.count("\n", last, pos)
            last = pos
            c = text[pos]
            if c == "{" or c == "}":
                sc = self._scope(sc) if c == "{" else sc.parent
                pos += 1
                continue
            m = _LABEL.match(text, pos)
            if m:
                sc.labels[m[1]] = len(self.code)
                pos = m.end()
                continue
            end = text.index(";", pos)
            statement = text[pos:end].strip()
            if c == ".":
                self._directive(statement, sc, f)
            else:
                self._instr(statement, sc, f, line, fixups)
            pos = end + 1
        f.end = len(self.code)
        for ins, scope, names in fixups:
            found = [scope.label(x) for x in names]
            if None in found:
                raise Unsupported(f"line {ins.line}: unknown label in {ins.text!r}")
            if ins.op == "bra":
                ins.target = found[0]
            else:
                ins.targets = found

    def _directive(self, s, sc, func):
        sc.found.clear()  # it may hide an outer name
        sc.operands.clear()
        m = re.match(r"\.reg\s*\.(\w+)\s+(.*)$", s, flags=re.S)
        if m:
            for nm in split(m[2]):
                r = re.match(r"(.*)<\s*(\d+)\s*>$", nm)
                if r:
                    sc.ranges[r[1]] = (m[1], int(r[2]))
                else:
                    sc.names[nm] = Reg((sc.key, nm), m[1])
            return
        if re.match(
            r"\.(pragma|maxntid|minnctapersm|reqntid|maxnreg|noreturn|alias|explicitcluster"
            r"|reqnctapercluster|maxclusterrank|abi_preserve)",
            s,
        ):
            return
        m = re.match(r"\.(branchtargets|calltargets|callprototype)\b(.*)", s, flags=re.S)
        if m:
            lab = [k for k, v in sc.labels.items() if v == len(self.code)]
            for k in lab:
                sc.names[k] = Name(k)
                sc.targets[k] = split(m[2])
            return
        if re.search(r"\.(global|const|shared|local|param)\b", s):
            v = self._var(s, func.name if func else None)
            sc.names[v.name] = v
            self.vars.append(v)
            return
        raise Unsupported(f"directive {s!r}")

    def _instr(self, s, sc, func, line, fixups):
        ins = Instr(line, s, None, None, func=func.name, pc=len(self.code))
        self.code.append(ins)
        m = _GUARD.match(s)
        if m:
            ins.neg, ins.guard, s = bool(m[1]), sc.find(m[2]), s[m.end() :]
        m = _OPCODE.match(s)
        opcode = self._opcodes.get(m[1])
        if opcode is None:
            words = [w.replace("~", "::") for w in m[1].replace("::", "~").split(".")]
            opcode = self._opcodes[m[1]] = words[0], tuple(words[1:])
        ins.op, ins.mods = opcode
        rest = s[m.end() :]
        if ins.op == "bra":
            fixups.append((ins, sc, [rest.strip()]))
        elif ins.op == "brx":
            index, table = split(rest)
            ins.args = [self._operand(index, sc)]
            t = sc
            while t and table not in t.targets:
                t = t.parent
            fixups.append((ins, sc, t.targets[table]))
        else:
            ins.args = [self._operand(x, sc) for x in split(rest)]


def _without_comments(text):
    """The PTX with everything blanked that is no statement, its lines numbered as they were."""

    def blank(m):
        return re.sub(r"[^\n]", " ", m[0])

    text = re.sub(r"/\*.*?\*/", blank, text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"^[ \t]*\.(loc|file|version|address_size|target)\b[^\n]*", "", text, flags=re.M)
    return re.sub(r"^[ \t]*\.section\b[^{]*\{.*?\}", blank, text, flags=re.M | re.S)


def _product(directive, text):
    """The product of the one to three numbers after a directive; None where it is not there."""
    m = re.search(directive + r"\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", text)
    return int(m[1]) * int(m[2] or 1) * int(m[3] or 1) if m else None
