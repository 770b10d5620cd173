"""Train a small GPT-style character model on the documentation strings of Python's standard library.

    python examples/train_char_lm.py                    two minutes on two cores; prints losses and a sample
    python examples/train_char_lm.py --compare torch    the same run again with torch.nn.MultiheadAttention
    python examples/train_char_lm.py --position rope    other positions: also learned, alibi, t5
    python examples/train_char_lm.py --pattern window   each character sees the last 16, itself included, or
                                                        those of --window; longformer: the first one too
    python examples/train_char_lm.py --amp              in mixed precision

The text is read from the Python installation that runs this: nothing is downloaded, and its order is fixed,
so that a seed gives the same run again. The model is the usual one: embedded characters plus positional
encoding, blocks of causal self-attention and a feed-forward network, each behind a layer norm, and a linear
layer that predicts the next character. Only one line is new: the attention is `attn_ext.MultiHeadAttention`.
"""

import argparse
import ast
import functools
import string
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from training import fit, loss_of, option_parser

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
    """Endless random pieces of the text: (inputs (batch, context),) and targets, one character later."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(codes) - context, (batch, 1), generator=generator)
        pieces = codes[starts + torch.arange(context + 1)]
        yield (pieces[:, :-1],), pieces[:, 1:]


# ---- the model ----


def inside_attention(args: argparse.Namespace) -> dict:
    """What `--position` gives to attn_ext.MultiHeadAttention, as keyword arguments."""
    positions = {
        "rope": lambda: attn_ext.RotaryEmbedding(args.width // args.heads),
        "alibi": lambda: attn_ext.ALiBi(args.heads),
        "t5": lambda: attn_ext.T5RelativePositionBias(args.heads, bidirectional=False),
    }
    return {"position": positions[args.position]()} if args.position in positions else {}


def added_to_input(args: argparse.Namespace) -> nn.Module:
    """What `--position` adds to the embedded characters (batch, length, width)."""
    if args.position == "sinusoidal":
        return attn_ext.SinusoidalPositionalEncoding(args.width, batch_first=True)
    if args.position == "learned":
        return attn_ext.LearnedPositionalEncoding(args.width, args.context, batch_first=True)
    return nn.Identity()


@functools.cache  # one for each length: the pieces all have the same, only text that is being drawn grows
def block_mask(pattern: str, window: int, length: int, device: torch.device) -> attn_ext.BlockMask | None:
    """Which characters each one sees besides what causality hides; None: all."""
    if pattern == "window":
        return attn_ext.masks.sliding_window(length, window - 1, 0, device=device)
    if pattern == "longformer":  # its window is that of both sides together
        return attn_ext.masks.longformer(length, 2 * (window - 1), global_tokens=[0], device=device)
    return None


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, attention: type[nn.Module]):
        super().__init__()
        width, dropout = args.width, args.dropout
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention(
            width, args.heads, dropout=dropout, batch_first=True, **inside_attention(args)
        )
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor, mask: dict) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False, is_causal=True, **mask)[0]
        return x + self.feed_forward(self.norm2(x))


class CharModel(nn.Module):
    """Character codes (batch, length) -> logits of the next character (batch, length, characters)."""

    def __init__(self, args: argparse.Namespace, attention: str):
        super().__init__()
        self.context, self.pattern, self.window = args.context, args.pattern, args.window
        self.characters = nn.Embedding(len(CHARACTERS), args.width)
        self.position = added_to_input(args)
        self.blocks = nn.ModuleList(Block(args, ATTENTION[attention]) for _ in range(args.depth))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, len(CHARACTERS))
        # torch.nn.MultiheadAttention demands the mask that is_causal=True describes; attn_ext needs none
        causal = torch.ones(args.context, args.context, dtype=torch.bool).triu(1)
        self.register_buffer("causal", causal if attention == "torch" else None, persistent=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        length = codes.shape[1]
        x = self.position(self.characters(codes))
        if self.causal is None:
            mask = {"block_mask": block_mask(self.pattern, self.window, length, codes.device)}
        else:
            mask = {"attn_mask": self.causal[:length, :length]}
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


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


def train(attention: str, text: dict[str, torch.Tensor], args: argparse.Namespace):
    """Train from args.seed; returns the model and {"train": loss, "validation": loss, "seconds": time}."""
    torch.manual_seed(args.seed)  # both kinds of attention draw the same initial parameters
    model = CharModel(args, attention).to(args.device)
    if args.load:
        model.load_state_dict(torch.load(args.load, map_location=args.device, weights_only=True))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{attention}: {parameters:,} parameters, {len(text['train']):,} characters of text")
    print(f"  validation loss before training  {evaluate(model, text['validation'], args):.4f}")

    seconds = fit(model, batches(text["train"], args.batch, args.context, args.seed), args)

    result = {name: evaluate(model, text[name], args) for name in ("train", "validation")}
    print(f"  validation loss after {args.steps} steps  {result['validation']:.4f}", flush=True)
    return model, {**result, "seconds": seconds}


def parse_arguments() -> argparse.Namespace:
    threads = torch.get_num_threads()
    parser = option_parser(__doc__.splitlines()[0], steps=600, batch=32, lr=2e-3, threads=threads)
    add = parser.add_argument
    add("--compare", choices=["torch"], help="train again with torch's attention and print both results")
    positions = ["sinusoidal", "learned", "rope", "alibi", "t5"]
    add("--position", choices=positions, default=positions[0], help="how the model knows places")
    add(
        "--pattern",
        choices=["full", "window", "longformer"],
        help="what each sees of the characters before it",
    )
    add(
        "--window",
        type=int,
        help="characters that the sparse patterns see, the last their own; by default 16",
    )
    add("--context", type=int, default=64, help="characters a piece")
    add("--width", type=int, default=128, help="features")
    add("--heads", type=int, default=4, help="attention heads")
    add("--depth", type=int, default=4, help="blocks")
    add("--dropout", type=float, default=0.0, help="dropout of attention and feed-forward")
    add("--evaluation-batches", type=int, default=20, help="batches a loss is averaged over")
    add("--sample", type=int, default=400, help="characters of text to generate at the end")
    add("--save", type=Path, help="file for the trained parameters")
    add("--load", type=Path, help="file of parameters to start from; with --steps 0 only to sample")
    args = parser.parse_args()
    if args.pattern == "full" and args.window is not None:
        parser.error("--window needs --pattern window or longformer")
    args.pattern = args.pattern or ("full" if args.window is None else "window")
    args.window = 16 if args.window is None else args.window
    if args.window < 1:
        parser.error(f"--window must be at least 1, got {args.window}")
    if args.compare and (inside_attention(args) or args.pattern != "full"):
        parser.error("--compare torch: torch's attention has no patterns and no rope, alibi or t5 positions")
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
