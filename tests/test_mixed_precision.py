"""Mixed precision as people train: autocast and GradScaler in float16 and bfloat16, every module of ours."""

import pytest
import torch
from torch import nn

import attn_ext

N, L, E, H = 2, 12, 64, 2


class Model(nn.Module):
    """An encoder and a decoder with an encoding on the inputs and positions in the self-attentions."""

    def __init__(self, position, **extras):
        super().__init__()
        self.encode = attn_ext.SinusoidalPositionalEncoding(E, batch_first=True)
        self.learn = attn_ext.LearnedPositionalEncoding(E, L, batch_first=True)
        self.first = attn_ext.SelfAttention(E, H, causal=True, batch_first=True, **extras)
        self.cross = attn_ext.CrossAttention(E, H, batch_first=True, **extras)
        self.transformer = attn_ext.Transformer(
            E, H, 1, 1, 128, batch_first=True, norm_first=True, position=position, **extras
        )

    def forward(self, src, tgt, padding):
        src = self.encode(src)
        tgt = self.first(self.learn(tgt))
        tgt = tgt + self.cross(tgt, src, padding)
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding, "tgt_is_causal": True}
        return self.transformer(src, tgt, **masks)


POSITIONS = {
    "none": (lambda: None, {}),
    "rotary": (lambda: attn_ext.RotaryEmbedding(32), {"qk_norm": "rms"}),
    "alibi": (lambda: attn_ext.ALiBi(H), {"qk_norm": "layer", "num_kv_heads": 1}),
    "t5": (lambda: attn_ext.T5RelativePositionBias(H), {"softcap": 20.0}),
    "swin": (lambda: attn_ext.RelativePositionBias2D(H, (3, 4)), {}),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", POSITIONS)
def test_train_steps(name, dtype):
    """Every gradient finite in every step, none of the steps skipped by the scaler, and the loss falls."""
    torch.manual_seed(0)
    position, extras = POSITIONS[name]
    model = Model(position(), **extras)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=2.0**10)
    src, tgt = torch.randn(2, N, L, E).unbind()
    padding = torch.arange(L).expand(N, L) >= torch.tensor([[L], [L - 3]])
    target = torch.randn(N, L, E)
    losses = []
    for _ in range(8):
        with torch.autocast("cpu", dtype):
            out = model(src, tgt, padding)
        loss = (out.float() - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for parameter_name, p in model.named_parameters():
            assert p.grad is not None, parameter_name
            assert p.grad.isfinite().all(), parameter_name
            assert p.dtype == p.grad.dtype == torch.float32
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() in (1.0, 2.0**10)  # it halves where it skips a step; 1: not in use
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", POSITIONS)
def test_a_model_cast_to_a_half_type(name, dtype):
    """Near to the same model in float32: 60 times the type's unit in the last place of results of order 1."""
    torch.manual_seed(0)
    position, extras = POSITIONS[name]
    model = Model(position(), **extras).eval()
    inputs = torch.randn(2, N, L, E).unbind()
    padding = torch.zeros(N, L, dtype=torch.bool)
    expected = model(*inputs, padding)
    out = model.to(dtype)(*(x.to(dtype) for x in inputs), padding)
    assert out.dtype == dtype
    assert (out.float() - expected).abs().max() < 60 * torch.finfo(dtype).eps / 2
