"""The mask that goes through a model of Hugging Face transformers: rules in place of N x N pairs."""

import torch

NAME = "attn_ext"  # of the implementation, as in attn_implementation="attn_ext"

_COMPUTES = (
    "a model computes with its attention mask, instead of handing it to the attention function that "
    f'attn_implementation="{NAME}" names. Either this model does not support other attention functions in '
    "this version of transformers, or it does with the mask what attn_ext does not know: use "
    '"eager"'
)


class AttentionMask:
    """Which keys each query may see, by rules: query i sees key j if

        i + offset - left <= j <= i + offset + right  and  j < key_lengths[b]  and  visible[b, h, i, j]

    as far as each is given. A causal mask has right = 0 and left = None.

    It goes through a model as the mask of one forward pass and stands for the boolean tensor (B, 1, Nq, Nk),
    True = may attend. Models may cut and combine it; what they get is an AttentionMask again, of the tensor.
    It refuses to become numbers: a model that does not call the registered attention function, but adds its
    mask to logits of its own, would add 1 where a key is visible and go on with a wrong result.

    Attributes:
        sizes: (B, Nq, Nk).
        device: of the tensor it stands for.
        window: (left, right), each an integer or None (no limit).
        offset: where the diagonal lies: query i is at the position of key i + offset.
        visible: bool, broadcasts to (B, Hq, Nq, Nk), or None; for padding (B, 1, 1, Nk).
        key_lengths: int64 (B,) or None: padding's form where all of it is at the right.
    """

    dtype = torch.bool
    ndim = 4

    def __init__(self, sizes, device, window=(None, None), offset=0, visible=None, key_lengths=None):
        self.sizes, self.device, self.window, self.offset = sizes, device, window, offset
        self.visible, self.key_lengths = visible, key_lengths

    @classmethod
    def of_tensor(cls, visible):
        """The mask that a boolean tensor (B, 1 or Hq, Nq, Nk) is."""
        return cls((visible.shape[0], *visible.shape[2:]), visible.device, visible=visible)

    def size(self, dim=None):
        return torch.empty(self.sizes[0], 1, *self.sizes[1:], device="meta").size(dim)

    shape = property(size)

    def dim(self):
        return 4

    def contiguous(self):
        return self

    def dense(self):
        """The boolean tensor (B, 1, Nq, Nk) that it stands for, with a head axis if ``visible`` has one."""
        batch, len_q, len_k = self.sizes
        ahead = torch.arange(len_k, device=self.device) - self.offset
        ahead = (
            ahead - torch.arange(len_q, device=self.device)[:, None]
        )  # how far a key lies ahead of a query
        left, right = self.window
        seen = torch.ones(batch, 1, len_q, len_k, dtype=torch.bool, device=self.device)
        if left is not None:
            seen = seen & (ahead >= -left)
        if right is not None:
            seen = seen & (ahead <= right)
        if self.key_lengths is not None:
            seen = seen & (torch.arange(len_k, device=self.device) < self.key_lengths[:, None, None, None])
        return seen if self.visible is None else seen & self.visible

    def keys_in_reach(self):
        """How many keys, from the first on, any query may see. A causal diagonal then ends at their last."""
        _, len_q, len_k = self.sizes
        return len_q + self.offset if self.window[1] == 0 else len_k

    def options(self):
        """The same rules as keyword arguments of :func:`attn_ext.attention`, for the keys in reach."""
        left, right = self.window
        return {
            "causal": right == 0,
            "window": None if left is None and right in (0, None) else (left, right),
            "mask": None if self.visible is None else self.visible[..., : self.keys_in_reach()],
            "key_lengths": self.key_lengths,
        }

    def to(self, *args, **kwargs):
        """On another device."""
        like = torch.empty(0, dtype=torch.bool, device=self.device).to(*args, **kwargs)
        if like.dtype != torch.bool:
            raise TypeError(_COMPUTES)
        visible, lengths = (t if t is None else t.to(like.device) for t in (self.visible, self.key_lengths))
        return AttentionMask(self.sizes, like.device, self.window, self.offset, visible, lengths)

    def __getitem__(self, index):
        return _as_mask(self.dense()[index])

    def __and__(self, other):
        return _as_mask(self.dense() & _dense(other))

    def __or__(self, other):
        return _as_mask(self.dense() | _dense(other))

    def __radd__(self, scores):
        raise TypeError(_COMPUTES)

    __rand__, __ror__ = __and__, __or__

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map(_dense, (args, kwargs or {}))
        return _as_mask(function(*args, **kwargs))

    def __getattr__(self, name):
        raise AttributeError(f"{name}: {_COMPUTES}")


def _dense(x):
    return x.dense() if isinstance(x, AttentionMask) else x


def _as_mask(x):
    """What came of a computation with a mask, if it is one again."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.bool or x.dim() != 4:
        raise TypeError(_COMPUTES)
    return AttentionMask.of_tensor(x)
