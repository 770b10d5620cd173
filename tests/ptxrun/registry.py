"""What the handlers of instructions and the machine that runs them agree on."""

RUN, EXITED, BLOCKED, PARKED = 0, 1, 2, 3  # status of a thread
SMEM_BASE = 1024  # first shared address, as on hardware with reserved shared memory

STRAIGHT, CONTROL = {}, {}  # opcode -> handler(machine, instr) -> closure
BATCHED = {}  # opcode -> the part of a straight-line handler that also works on the lanes of a batch


def op(names, *, batched=False):
    """Registers a handler of the straight-line instructions with these opcodes (words of one string).

    batched: it may be given a lanes.Lanes for the machine, to run many like instructions at once.
    """

    def deco(f):
        for n in names.split():
            STRAIGHT[n] = f
            if batched:
                BATCHED[n] = f
        return f

    return deco


def control(names):
    """Registers a handler of the control instructions with these opcodes."""

    def deco(f):
        for n in names.split():
            CONTROL[n] = f
        return f

    return deco


def batched(name):
    """Registers the part of a straight-line handler that may be given a lanes.Lanes."""

    def deco(f):
        BATCHED[name] = f
        return f

    return deco


class Park(Exception):
    """Raised by a warp-collective whose members have not all arrived; carries the thread mask."""


def short(text):
    """The text of an instruction, cut in the middle where it is long."""
    return text if len(text) < 140 else text[:70] + " ... " + text[-60:]
