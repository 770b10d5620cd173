"""Pictures of attention: who looks at whom, what a mask lets through, what a position encoding says.

    maps = attn_ext.viz.capture_attention(model, tokens)  # nothing in the model changes
    attn_ext.viz.plot_attention(maps)                     # a row for each layer, a column for each head
    attn_ext.viz.plot_attention(maps["encoder.layers.0.self_attn"].weights(3)[0], words)

The plots need matplotlib, `pip install attn_ext[viz]`; capturing does not.
"""

from .capture import AttentionMap, capture_attention
from .plots import plot_attention, plot_mask, plot_positions

__all__ = ["AttentionMap", "capture_attention", "plot_attention", "plot_mask", "plot_positions"]
