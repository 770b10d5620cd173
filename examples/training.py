"""What the examples share: options, a progress bar, and training in full or mixed precision."""

import argparse
import math
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def option_parser(
    description: str, steps: int, batch: int, lr: float, threads: int
) -> argparse.ArgumentParser:
    """A parser with the options that every example has; these are their defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    dtypes = ["bfloat16", "float16"]
    add("--amp", choices=dtypes, nargs="?", const=dtypes[0], help="autocast, and for float16 a GradScaler")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", type=torch.device, default=device, help="where to run")
    add("--threads", type=int, default=threads, help="CPU threads")
    add("--seed", type=int, default=0, help="of everything that is random")
    add("--steps", type=int, default=steps, help="optimiser steps")
    add("--batch", type=int, default=batch, help="samples a step")
    add("--lr", type=float, default=lr, help="highest learning rate")
    return parser


def autocast(args: argparse.Namespace) -> torch.autocast:
    dtype = getattr(torch, args.amp) if args.amp else None
    return torch.autocast(args.device.type, dtype, enabled=args.amp is not None)


def loss_of(
    model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor, args: argparse.Namespace
) -> Tensor:
    """Mean cross-entropy, in nats, of the logits model(*inputs) (..., classes) for targets (...)."""
    with autocast(args):
        logits = model(*(x.to(args.device) for x in inputs))
    return F.cross_entropy(logits.float().flatten(0, -2), targets.to(args.device).flatten())


def fit(model: nn.Module, batches: Iterator[tuple[tuple[Tensor, ...], Tensor]], args: argparse.Namespace):
    """Train for args.steps steps, each on one (inputs, targets) of batches; returns the seconds it took."""
    torch.set_num_threads(args.threads)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    # float16 gradients underflow without scaling; bfloat16 has the range of float32 and needs none
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.amp == "float16")
    progress = Progress(args.steps)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = loss_of(model, *next(batches), args)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        progress.show(step + 1, loss.item())
    return time.perf_counter() - progress.start


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over the first twentieth, then half a cosine down to a tenth."""
    warm_up = max(1, args.steps // 20)
    if step < warm_up:
        return args.lr * (step + 1) / warm_up
    done = (step - warm_up) / max(1, args.steps - warm_up)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class Progress:
    """One line on stderr that is written over; where stderr is no terminal, ten lines in all."""

    def __init__(self, steps: int):
        self.steps, self.start, self.terminal = steps, time.perf_counter(), sys.stderr.isatty()

    def show(self, step: int, loss: float) -> None:
        if not self.terminal and step % max(1, self.steps // 10):
            return
        elapsed = time.perf_counter() - self.start
        left = elapsed / step * (self.steps - step)
        filled = 30 * step // self.steps
        bar = f"[{'#' * filled}{'.' * (30 - filled)}]"
        line = f"{bar} {step}/{self.steps}  loss {loss:.3f}  {elapsed:.0f} s, {left:.0f} s left "
        end = "\r" if self.terminal and step < self.steps else "\n"
        print(line, end=end, file=sys.stderr, flush=True)
