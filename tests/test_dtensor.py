"""Known faults with DTensors: "no sharding strategy registered", "mixed torch.Tensor and DTensor".

pytorch#134050, torchtitan#875, NeMo-RL#1051. There are no sharding rules: the error says what to do, that
works, and under patch_sdpa() the call stays torch's.
"""

import pytest
import torch
import torch.distributed as dist
from oracle import qkv, randn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_ext
from attn_ext.integrations.flash_attn import flash_attn_func

if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.experimental import local_map


@pytest.fixture
def mesh(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh, axis, **sizes):
    return [distribute_tensor(t, mesh, [Shard(axis)]).requires_grad_() for t in qkv(**sizes)]


def test_the_error_names_the_argument_and_the_way_out(mesh):
    q, k, v = sharded(mesh, 1)
    plain = [t.to_local() for t in (q, k, v)]
    bias = distribute_tensor(torch.zeros(5, 7, dtype=torch.float64), mesh, [Replicate()])
    module = distribute_module(attn_ext.MultiHeadAttention(8, 2, batch_first=True, dtype=torch.float64), mesh)
    for name, call in {
        "q": lambda: attn_ext.attention(q, k, v, causal=True),
        "k": lambda: attn_ext.attention(plain[0], k, v),
        "bias": lambda: attn_ext.attention(*plain, bias=bias),
        "query": lambda: attn_ext.scaled_dot_product_attention(q, k, v),
        "value": lambda: attn_ext.scaled_dot_product_attention(*plain[:2], v),
        "q ": lambda: flash_attn_func(q, q, q),
        "q  ": lambda: module(q[:, 0], q[:, 0], q[:, 0]),
    }.items():
        with pytest.raises(TypeError, match=rf"^{name.strip()} must be .*to_local\(\)"):
            call()


@pytest.mark.parametrize("axis", [0, 1])
def test_the_way_out_has_gradients(mesh, axis):
    inputs = sharded(mesh, axis, heads=4, heads_kv=2)
    place = [Shard(axis)]
    run = local_map(
        lambda *x: attn_ext.attention(*x, causal=True), place, (place, place, place), device_mesh=mesh
    )
    by_hand = DTensor.from_local(
        attn_ext.attention(*(t.to_local() for t in inputs), causal=True), mesh, place
    )
    plain = [t.to_local().detach().requires_grad_() for t in inputs]
    want = attn_ext.attention(*plain, causal=True)
    weight = randn(*want.shape, seed=9)
    grads = torch.autograd.grad(want, plain, weight)
    for out in (run(*inputs), by_hand):
        assert torch.equal(out.full_tensor(), want)
        got = torch.autograd.grad(out, inputs, distribute_tensor(weight, mesh, place))
        assert all(torch.equal(a.full_tensor(), b) for a, b in zip(got, grads, strict=True))


def test_under_patch_sdpa_it_stays_torchs(mesh):
    inputs = [t.detach() for t in sharded(mesh, 1)]
    with sdpa_kernel(SDPBackend.MATH):  # torch takes 20 s to find out how to shard its fused CPU kernel
        want = F.scaled_dot_product_attention(*inputs).full_tensor()
        with (
            attn_ext.patch_sdpa(),
            pytest.warns(UserWarning, match="left to torch, an argument of .*DTensor"),
        ):
            out = F.scaled_dot_product_attention(*inputs)
    assert torch.equal(out.full_tensor(), want)
