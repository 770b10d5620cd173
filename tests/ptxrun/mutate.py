"""PTX with one synchronisation left out: does the sanitizer, or a wrong result, show that it is needed?"""

import re

SYNCHRONISATION = re.compile(
    r"^\s*(?:@!?%?\w+\s+)?("
    r"bar(?:\.warp)?\.(?:cta\.)?(?:sync|arrive|red)|barrier[.\w:]*|fence|membar"
    r"|cp\.async\.(?:bulk\.)?(?:commit_group|wait_group|wait_all)"
    r"|wgmma\.(?:fence|commit_group|wait_group)"
    r"|mbarrier\.(?:init|arrive|try_wait)"
    r")[.\w:]*"
)


def synchronisations(text, lines=None):
    """[(PTX line, instruction)] of the barriers, waits, commits and fences, among `lines` only if given."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if SYNCHRONISATION.match(line) and (lines is None or number in lines):
            found.append((number, line.strip().rstrip(";")))
    return found


def without(text, number):
    """The PTX with that line emptied; the numbers of the others stay.

    A wait for an mbarrier is a loop round a question: without it the answer is yes.
    """
    lines = text.splitlines(keepends=True)
    question = re.match(r"\s*mbarrier\.try_wait\S*\s+(%?\w+),", lines[number - 1])
    lines[number - 1] = f"setp.eq.u32 {question[1]}, 0, 0;\n" if question else "\n"
    return "".join(lines)
