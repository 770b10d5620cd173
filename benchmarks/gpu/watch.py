"""Runs what may hang or crash in processes of its own, for a limited time."""

import contextlib
import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO
from xml.etree import ElementTree

from .cases import Case

SILENCE = 60  # seconds for one case; cuDNN may plan for some of them
START = 60  # seconds for a process to import torch and reach the GPU


def watch(
    command: list[str],
    todo: list[Case],
    deadline: float,
    take: Callable[[dict], None],
    silence: float = SILENCE,
    start: float = START,
) -> list[Case]:
    """Runs `command`, which reads cases from its input and prints one line of JSON for each, to `deadline`.

    Where it ends early or says nothing for `silence` seconds, the case that it was at is taken as failed, and
    a new process goes on with the next. Returns the cases that time did not reach.
    """
    todo = list(todo)
    while todo and time.monotonic() < deadline:
        with tempfile.TemporaryFile("w+") as errors:
            worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            try:
                problem = _follow(worker, todo, deadline, take, silence, start)
            finally:  # on Ctrl-C, too
                worker.kill()
                worker.wait()
            if problem:
                errors.seek(0)
                last = (errors.read().strip().splitlines() or ["it said nothing"])[-1]
                take({"case": list(todo.pop(0)), "failed": f"{problem}: {last[:300]}"})
    return todo


def _follow(
    worker: subprocess.Popen,
    todo: list[Case],
    deadline: float,
    take: Callable[[dict], None],
    silence: float,
    start: float,
) -> str:
    """Takes results off `todo` until none is left or the deadline has come: ""; else what went wrong."""
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(worker.stdout, lines), daemon=True).start()
    with contextlib.suppress(BrokenPipeError), worker.stdin as stream:  # a dead worker shows below
        stream.write(json.dumps([list(case) for case in todo]))
    patience = start + silence
    while todo:
        try:
            line = lines.get(timeout=max(min(patience, deadline - time.monotonic()), 0))
        except queue.Empty:
            late = time.monotonic() >= deadline
            return "" if late else f"no answer in {patience:.0f} s"
        if not line:
            return f"its process ended with status {worker.wait()}"
        take(json.loads(line))
        todo.pop(0)
        patience = silence
    return ""


def _read(stream: TextIO, lines: queue.Queue[str]) -> None:
    for line in stream:
        if line.startswith("{"):  # libraries print other things
            lines.put(line)
    lines.put("")  # the end


def run_tests(arguments: tuple[str, ...], folder: Path, seconds: float) -> dict:
    """pytest in `folder`: {"passed": whether some test passed and none failed, "says", "output"}."""
    with tempfile.TemporaryDirectory() as made:
        xml = Path(made) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--maxfail=20", f"--junitxml={xml}", *arguments]
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A shell lets its background jobs ignore it, and they their children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            output, stopped = process.communicate(timeout=seconds)[0], ""
        except subprocess.TimeoutExpired:
            stopped = f", stopped after {seconds:.0f} s"
            process.send_signal(signal.SIGINT)  # pytest then still writes what it has
            try:
                output = process.communicate(timeout=10)[0]
            except subprocess.TimeoutExpired:  # a kernel that hangs
                process.kill()
                output = process.communicate()[0]
        if not xml.exists():
            return {"passed": False, "says": f"no result{stopped}", "output": output[-20000:]}
        suite = ElementTree.parse(xml).getroot().find("testsuite")
    tests, failures, errors, skipped = (
        int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")
    )
    bad, passed = failures + errors, tests - failures - errors - skipped
    says = f"{passed} passed, {bad} failed, {skipped} skipped in {float(suite.get('time')):.0f} s{stopped}"
    return {"passed": passed > 0 and bad == 0, "says": says, "output": output[-20000:] if bad else ""}
