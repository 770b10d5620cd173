"""From torch.nn.MultiheadAttention to MultiHeadAttention and back."""

from torch import nn


def torch_arguments(module: nn.Module) -> dict[str, object]:
    """The constructor arguments that both have, to rebuild `module` on the meta device, without values."""
    return {
        "embed_dim": module.embed_dim,
        "num_heads": module.num_heads,
        "dropout": module.dropout,
        "bias": module.in_proj_bias is not None,
        "add_bias_kv": module.bias_k is not None,
        "add_zero_attn": module.add_zero_attn,
        "kdim": module.kdim,
        "vdim": module.vdim,
        "batch_first": module.batch_first,
        "device": "meta",
    }


def copy_parameters(source: nn.Module, target: nn.Module) -> nn.Module:
    """Give `target`, on the meta device, copies of the parameters of `source`, and its mode; returns it."""
    target.load_state_dict({name: x.clone() for name, x in source.state_dict().items()}, assign=True)
    for name, parameter in source.named_parameters():
        target.get_parameter(name).requires_grad_(parameter.requires_grad)
    return target.train(source.training)


def used_extras(module: nn.Module) -> list[str]:
    """Names of the arguments in use that torch.nn.MultiheadAttention does not have."""
    extras = {
        "num_kv_heads": module.num_kv_heads != module.num_heads,
        "head_dim": module.head_dim * module.num_heads != module.embed_dim,
        **{name: getattr(module, name) is not None for name in ("window", "softcap", "qk_norm", "position")},
    }
    return [name for name, used in extras.items() if used]
