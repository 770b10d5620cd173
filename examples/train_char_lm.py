"""Train a small GPT-style character model on the documentation strings of Python's standard library.

    python examples/train_char_lm.py                    two minutes on two cores; prints losses and a sample
    python examples/train_char_lm.py --compare torch    the same run again with torch.nn.MultiheadAttention
    python examples/train_char_lm.py --amp              in mixed precision

The text is read from the Python installation that runs this: nothing is downloaded, and its order is fixed,
so that a seed gives the same run again. The model is the usual one: embedded characters plus positional
encoding, blocks of causal self-attention and a feed-forward network, each behind a layer norm, and a linear
layer that predicts the next character. Only one line is new: the attention is `attn_ext.MultiHeadAttention`.
"""

import argparse
import ast
import math
import string
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import attn_ext

ATTENTION = {"attn_ext": attn_ext.MultiHeadAttention, "torch": nn.MultiheadAttention}
CHARACTERS = string.printable  # 100 characters; others are left out of the text
VALIDATION_EVERY = 10  # each tenth docstring is kept for validation


# ---- the text ----


def docstrings() -> list[str]:
    """The documentation strings of the standard library's top-level modules, by file and place in it."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(ast.get_docstring(node) or "")
    return [text for text in found if text]


def encode(text: str) -> torch.Tensor:
    index = {character: i for i, character in enumerate(CHARACTERS)}
    return torch.tensor([index[c] for c in text if c in index])


def decode(codes: torch.Tensor) -> str:
    return "".join(CHARACTERS[i] for i in codes.tolist())


def load_text() -> dict[str, torch.Tensor]:
    """The text as character codes: {"train": (characters,), "validation": (characters,)}."""
    texts = docstrings()
    validation = texts[::VALIDATION_EVERY]
    train = [text for i, text in enumerate(texts) if i % VALIDATION_EVERY]
    return {"train": encode("\n\n".join(train)), "validation": encode("\n\n".join(validation))}


def batches(codes: torch.Tensor, batch: int, context: int, seed: int):
    """Endless random pieces of the text: inputs (batch, context) and targets, one character later."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(codes) - context, (batch, 1), generator=generator)
        pieces = codes[starts + torch.arange(context + 1)]
        yield pieces[:, :-1], pieces[:, 1:]


# ---- the model ----


def positional_encoding(length: int, width: int) -> torch.Tensor:
    """Sines and cosines of the position (length, width), "Attention Is All You Need", section 3.5."""
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, attention: type[nn.Module]):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention(width, heads, dropout=dropout, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor, causal_mask: torch.Tensor | None) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False, attn_mask=causal_mask, is_causal=True)[0]
        return x + self.feed_forward(self.norm2(x))


class CharModel(nn.Module):
    """Character codes (batch, length) -> logits of the next character (batch, length, characters)."""

    def __init__(self, args: argparse.Namespace, attention: str):
        super().__init__()
        self.context = args.context
        self.characters = nn.Embedding(len(CHARACTERS), args.width)
        self.register_buffer("positions", positional_encoding(args.context, args.width), persistent=False)
        self.blocks = nn.ModuleList(
            Block(args.width, args.heads, args.dropout, ATTENTION[attention]) for _ in range(args.depth)
        )
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, len(CHARACTERS))
        # torch.nn.MultiheadAttention demands the mask that is_causal=True describes; attn_ext needs none
        causal = torch.ones(args.context, args.context, dtype=torch.bool).triu(1)
        self.register_buffer("causal", causal if attention == "torch" else None, persistent=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        length = codes.shape[1]
        x = self.characters(codes) + self.positions[:length]
        mask = None if self.causal is None else self.causal[:length, :length]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, args: argparse.Namespace):
    """Mean cross-entropy of a batch, in nats a character."""
    with torch.autocast(args.device.type, args.amp, enabled=args.amp is not None):
        logits = model(inputs.to(args.device))
    return F.cross_entropy(logits.float().flatten(0, 1), targets.to(args.device).flatten())


@torch.no_grad()
def evaluate(model: nn.Module, codes: torch.Tensor, args: argparse.Namespace) -> float:
    model.eval()
    source = batches(codes, args.batch, args.context, seed=args.seed + 1)
    total = sum(loss_of(model, *next(source), args).item() for _ in range(args.evaluation_batches))
    model.train()
    return total / args.evaluation_batches


@torch.no_grad()
def sample(model: CharModel, length: int, args: argparse.Namespace, start: str = "Return") -> str:
    """Text drawn from the model a character at a time; temperature 0.8 favours the likely ones a little."""
    model.eval()
    generator = torch.Generator(args.device).manual_seed(args.seed)
    codes = encode(start).to(args.device)[None]
    for _ in range(length):
        logits = model(codes[:, -model.context :])[:, -1].float()
        choice = torch.multinomial(F.softmax(logits / 0.8, -1), 1, generator=generator)
        codes = torch.cat([codes, choice], 1)
    return decode(codes[0])


# ---- training ----


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


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over the first twentieth, then half a cosine down to a tenth."""
    warm_up = max(1, args.steps // 20)
    if step < warm_up:
        return args.lr * (step + 1) / warm_up
    done = (step - warm_up) / max(1, args.steps - warm_up)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(attention: str, text: dict[str, torch.Tensor], args: argparse.Namespace):
    """Train from args.seed; returns the model and {"train": loss, "validation": loss, "seconds": time}."""
    torch.manual_seed(args.seed)  # both kinds of attention draw the same initial parameters
    model = CharModel(args, attention).to(args.device)
    if args.load:
        model.load_state_dict(torch.load(args.load, map_location=args.device, weights_only=True))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{attention}: {parameters:,} parameters, {len(text['train']):,} characters of text")
    print(f"  validation loss before training  {evaluate(model, text['validation'], args):.4f}")

    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    # float16 gradients underflow without scaling; bfloat16 has the range of float32 and needs none
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.amp == torch.float16)
    source = batches(text["train"], args.batch, args.context, args.seed)
    progress = Progress(args.steps)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = loss_of(model, *next(source), args)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        progress.show(step + 1, loss.item())
    seconds = time.perf_counter() - progress.start

    result = {name: evaluate(model, text[name], args) for name in ("train", "validation")}
    print(f"  validation loss after {args.steps} steps  {result['validation']:.4f}", flush=True)
    return model, {**result, "seconds": seconds}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--compare", choices=["torch"], help="train again with torch's attention and print both results")
    dtypes = ["bfloat16", "float16"]
    add("--amp", choices=dtypes, nargs="?", const=dtypes[0], help="autocast, and for float16 a GradScaler")
    add(
        "--device",
        type=torch.device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where to run",
    )
    add("--steps", type=int, default=600, help="optimiser steps")
    add("--batch", type=int, default=32, help="pieces of text a step")
    add("--context", type=int, default=64, help="characters a piece")
    add("--width", type=int, default=128, help="features")
    add("--heads", type=int, default=4, help="attention heads")
    add("--depth", type=int, default=4, help="blocks")
    add("--dropout", type=float, default=0.0, help="dropout of attention and feed-forward")
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--evaluation-batches", type=int, default=20, help="batches a loss is averaged over")
    add("--seed", type=int, default=0, help="of parameters, batches, dropout and sample")
    add("--sample", type=int, default=400, help="characters of text to generate at the end")
    add("--save", type=Path, help="file for the trained parameters")
    add("--load", type=Path, help="file of parameters to start from; with --steps 0 only to sample")
    args = parser.parse_args()
    args.amp = getattr(torch, args.amp) if args.amp else None
    return args


def main() -> None:
    args = parse_arguments()
    text = load_text()
    model, result = train("attn_ext", text, args)
    if args.save:
        torch.save(model.state_dict(), args.save)
    if args.sample:
        print(f"\n--- sample ---\n{sample(model, args.sample, args)}\n--------------")
    if args.compare:
        print()
        results = {"attn_ext": result, args.compare: train(args.compare, text, args)[1]}
        print(f"\n{'attention':<12}{'train loss':>12}{'validation loss':>18}{'seconds':>10}")
        for name, r in results.items():
            print(f"{name:<12}{r['train']:>12.4f}{r['validation']:>18.4f}{r['seconds']:>10.1f}")
        difference = abs(results["attn_ext"]["validation"] - results[args.compare]["validation"])
        print(f"validation losses differ by {difference:.1e}")


if __name__ == "__main__":
    main()
