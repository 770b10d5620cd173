"""Train an encoder-decoder transformer to translate dates, as people write them, to ISO's YYYY-MM-DD.

    python examples/translate_dates.py                       prints the accuracy on dates never trained on
    python examples/translate_dates.py --picture dates.png   draws what the decoder looked at for each digit
    python examples/translate_dates.py --amp                 in mixed precision

"Wednesday, March 3rd, 2021", "3/3/21" and "03.03.2021" all become 2021-03-03. This is machine translation as
in "Attention Is All You Need" (https://arxiv.org/abs/1706.03762), small: the encoder reads the characters of
the source, the decoder writes those of the target, each seeing the ones before it and, by cross-attention,
the source. The model is `attn_ext.Transformer`; the dates are made up on the fly. 99.8 % of 1000
unseen dates are translated exactly after 50 s (2 cores of a Xeon, one of them used, 2026-11-30).
"""

import argparse
import random
import string
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import autocast, fit, option_parser

import attn_ext
from attn_ext import viz

# {y} is the year's last two digits, {mm} and {dd} have two digits. Slashes mean month/day, dots day.month.
FORMATS = (
    "{month} {d}{th}, {year}",
    "{weekday}, {month} {d}, {year}",
    "{weekday:.3} {d} {month:.3} {year}",
    "the {d}{th} of {month} {year}",
    "{d} {month} {year}",
    "{month:.3} {d}, '{y}",
    "{d}-{month:.3}-{y}",
    "{m}/{d}/{y}",
    "{mm}/{dd}/{year}",
    "{dd}.{mm}.{year}",
    "{d}.{m}.{y}",
    "{year}/{m}/{d}",
    "{year}年{m}月{d}日",
)
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
]  # fmt: skip
FIRST, LAST = date(1950, 1, 1).toordinal(), date(2049, 12, 31).toordinal()  # two digits tell the century
TEST_EVERY = 10  # each tenth day is kept for the test, in every format
PICTURED = date(2021, 3, 11)  # one of these

CHARACTERS = string.digits + string.ascii_letters + " -/.,'年月日"
BLANK = len(CHARACTERS)  # one more code: padding of the source, and what the target starts from
TARGET_LENGTH = len("2021-03-03")


# ---- the dates ----


def written(day: date, form: str) -> str:
    """The day as people write it, in one of FORMATS."""
    ending = "th" if 11 <= day.day <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    return form.format(
        weekday=WEEKDAYS[day.weekday()], month=MONTHS[day.month - 1], year=day.year, y=f"{day.year % 100:02}",
        m=day.month, mm=f"{day.month:02}", d=day.day, dd=f"{day.day:02}", th=ending,
    )  # fmt: skip


def random_dates(count: int, rng: random.Random, test: bool) -> list[tuple[str, str]]:
    """Pairs (as people write it, ISO), of test days or of the others."""
    pairs = []
    while len(pairs) < count:
        number = rng.randint(FIRST, LAST)
        if (number % TEST_EVERY == 0) == test:
            day = date.fromordinal(number)
            text = written(day, rng.choice(FORMATS))
            pairs.append((rng.choice((str, str, str.lower, str.upper))(text), day.isoformat()))
    return pairs


def encode(texts: list[str]) -> Tensor:
    """Codes (batch, longest length), padded with BLANK."""
    rows = [torch.tensor([CHARACTERS.index(c) for c in text]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=BLANK)


def decode(codes: Tensor) -> list[str]:
    return ["".join((CHARACTERS + "_")[n] for n in row) for row in codes.tolist()]


def shifted(target: Tensor) -> Tensor:
    """What the decoder has read when it writes each character of target: BLANK and the characters before."""
    return F.pad(target[:, :-1], (1, 0), value=BLANK)


def batches(batch: int, seed: int):
    """Endless training batches: (source, shifted target) and target."""
    rng = random.Random(seed)
    while True:
        source, target = map(encode, zip(*random_dates(batch, rng, test=False), strict=True))
        yield (source, shifted(target)), target


# ---- the model ----


class Translator(nn.Module):
    """Source codes (batch, S), shifted target codes (batch, T) -> logits of the target (batch, T, codes)."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS) + 1, args.width)
        self.position = attn_ext.SinusoidalPositionalEncoding(args.width, batch_first=True)
        self.transformer = attn_ext.Transformer(
            args.width, args.heads, args.depth, args.depth, 4 * args.width, args.dropout, F.gelu,
            batch_first=True, norm_first=True,
        )  # fmt: skip
        self.head = nn.Linear(args.width, len(CHARACTERS) + 1)

    def embed(self, codes: Tensor) -> Tensor:
        return self.position(self.characters(codes))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = source == BLANK
        x = self.transformer(
            self.embed(source), self.embed(target), src_key_padding_mask=padding,
            memory_key_padding_mask=padding, tgt_is_causal=True,
        )  # fmt: skip
        return self.head(x)

    @torch.no_grad()
    def translate(self, source: Tensor) -> Tensor:
        """Source codes (batch, S) -> target codes (batch, 10), greedily: always the likeliest character."""
        padding = source == BLANK
        memory = self.transformer.encoder(self.embed(source), src_key_padding_mask=padding)
        target = source.new_full((len(source), 1), BLANK)
        for _ in range(TARGET_LENGTH):
            x = self.transformer.decoder(
                self.embed(target), memory, memory_key_padding_mask=padding, tgt_is_causal=True
            )
            target = torch.cat([target, self.head(x[:, -1:]).argmax(-1)], 1)
        return target[:, 1:]


def translate(model: Translator, texts: list[str], args: argparse.Namespace) -> list[str]:
    model.eval()
    with autocast(args):
        return decode(model.translate(encode(texts).to(args.device)))


def draw(model: Translator, path: Path, args: argparse.Namespace) -> None:
    """The last layer's cross-attention, mean of its heads: which source characters each digit came from."""
    source = written(PICTURED, FORMATS[1])
    (target,) = translate(model, [source], args)
    codes = encode([source]).to(args.device), shifted(encode([target])).to(args.device)
    maps = viz.capture_attention(model, *codes)
    attention = maps[f"transformer.decoder.layers.{args.depth - 1}.multihead_attn"].weights()[0].mean(0)
    figure = viz.plot_attention(attention, list(target), list(source), title=f"{source} → {target}")
    figure.savefig(path)


def main() -> None:
    # one thread: a model this small gains little from more, and on a busy machine they wait for each other
    parser = option_parser(__doc__.splitlines()[0], steps=800, batch=64, lr=2e-3, threads=1)
    add = parser.add_argument
    add("--width", type=int, default=64, help="features")
    add("--heads", type=int, default=2, help="attention heads")
    add("--depth", type=int, default=2, help="layers of the encoder, and of the decoder")
    add("--dropout", type=float, default=0.0, help="dropout of attention and feed-forward")
    add("--test", type=int, default=1000, help="unseen dates to test with")
    add("--picture", type=Path, help="file for a picture of one alignment (needs matplotlib)")
    args = parser.parse_args()
    if args.picture:
        import matplotlib  # noqa: F401  where it is missing, say so before the training

    torch.manual_seed(args.seed)
    model = Translator(args).to(args.device)
    seconds = fit(model, batches(args.batch, args.seed), args)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, trained in {seconds:.0f} s")

    sources, targets = zip(*random_dates(args.test, random.Random(args.seed + 1), test=True), strict=True)
    answers = translate(model, sources, args)
    right = [answer == target for answer, target in zip(answers, targets, strict=True)]
    print(f"{100 * sum(right) / len(right):.1f} % of {len(right)} unseen dates translated exactly\n")
    for n in sorted(range(len(right)), key=right.__getitem__)[:8]:  # mistakes first
        print(f"{sources[n]:<32}{answers[n]}" + ("" if right[n] else f"  wrong, it is {targets[n]}"))
    if args.picture:
        draw(model, args.picture, args)


if __name__ == "__main__":
    main()
