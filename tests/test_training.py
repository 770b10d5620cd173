"""What models are trained with: two processes that share gradients or parameters, data loaders, threads."""

import re
import threading

import pytest
import torch
from attended import Attended
from other_python import start_python

import attn_ext

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import attn_ext

KIND, RENDEZVOUS, RANK, SIZE = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = attn_ext.MultiHeadAttention(16, 4, batch_first=True, num_kv_heads=2, window=(5, 0))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0])

torch.set_num_threads(1)
torch.manual_seed(0)
model, data = Model(), torch.randn(5, 4, 11, 16)
target = torch.randn(5, 4, 11, 3)
if SIZE > 1:
    dist.init_process_group("gloo", init_method="file://" + RENDEZVOUS, rank=RANK, world_size=SIZE)
    if KIND == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard
        mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
        fully_shard(model.attention, mesh=mesh)
        fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
for x, y in zip(data, target):
    share = slice(RANK * 4 // SIZE, (RANK + 1) * 4 // SIZE)
    loss = (model(x[share]) - y[share]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if SIZE > 1:
        loss = loss.detach()
        dist.all_reduce(loss)
    print("loss", loss.item() / SIZE, flush=True)
if SIZE > 1:
    dist.destroy_process_group()
"""


def losses(kind, tmp_path, size):
    arguments = ("-c", SCRIPT, kind, tmp_path / "store")
    processes = [start_python(*arguments, rank, size, GLOO_SOCKET_IFNAME="lo") for rank in range(size)]
    try:
        ended = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size, [error for _, error in ended]
    printed = [[float(x) for x in re.findall("^loss (.*)$", out.decode(), re.M)] for out, _ in ended]
    assert all(p == printed[0] for p in printed)
    return printed[0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_as_one_does(kind, tmp_path):
    """The gradients are averaged, or parameters, gradients and optimizer sharded: the losses are the same."""
    one, two = losses("", tmp_path, 1), losses(kind, tmp_path, 2)
    assert len(one) == 5
    assert abs(one[-1] - one[0]) > 0.05  # it does train
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_data_loader_workers(start):
    data = Attended()
    want = torch.stack([data[n] for n in range(4)])
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=start)
    assert torch.equal(next(iter(loader)), want)


def test_training_in_many_threads():
    """Each with a graph, a dropout generator and lengths of its own."""

    def work(seed, results):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(2, 3, n, 16, generator=generator, requires_grad=True) for n in (40, 50, 50))
        for _ in range(5):
            out = attn_ext.attention(q, k, v, dropout_p=0.2, generator=generator, key_lengths=[50, seed])
            grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        results[seed] = (out.detach(), *grads)

    alone, together = {}, {}
    for seed in range(6):
        work(seed, alone)
    threads = [threading.Thread(target=work, args=(seed, together)) for seed in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for seed in range(6):
        for a, b in zip(alone[seed], together[seed], strict=True):
            assert torch.equal(a, b)
