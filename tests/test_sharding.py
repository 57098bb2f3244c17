"""What lesson 09 claims of sharding: what a rank holds, that the training is the same, that files fit any ranks."""

import os

import fsdp_worker
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.functional import cross_entropy

import dxdy_nb as dx

WAYS = ("DDP", "ZeRO", "FSDP2")


def ranked(job, *args):
    with dx.session(device="cpu") as s:
        return job(s.rank, s.world_size, *args)


def launched(job, *args, world_size=2):
    return dx.launch(ranked, job, *args, world_size=world_size)


def gradients(rank, world_size, how):
    """Return the whole gradients of the first step, and the whole weights after it."""
    model, optimizer = fsdp_worker.prepare(how, fsdp_worker.build(0))
    fsdp_worker.train(model, optimizer, rank, world_size, [0])
    return [(fsdp_worker.full(p.grad), fsdp_worker.full(p.detach())) for p in model.parameters()]


def totals_of_one_file(folder, path):
    """Return what ``fsdp_worker.totals`` says, from the ordinary file that torch makes of a sharded folder."""
    dcp_to_torch_save(folder, path)
    file = torch.load(path, weights_only=True)
    kinds = {"weights": list(file["model"].values())}
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        kinds[kind] = [file["optimizer"]["state"][name][kind] for name in file["model"]]
    return {kind: sum(t.double().sum().item() for t in tensors) for kind, tensors in kinds.items()}


def test_each_rank_holds_its_share_of_what_its_way_shards():
    P = sum(p.numel() for p in fsdp_worker.build(0).parameters())
    held = {how: [sizes for sizes, _ in launched(fsdp_worker.measured, how, 0, 1)] for how in WAYS}
    for sizes in held["DDP"]:
        assert sizes == {"weights": 4 * P, "gradients": 4 * P, "Adam": 8 * P}
    for sizes in held["ZeRO"]:
        assert sizes["weights"] == sizes["gradients"] == 4 * P
    assert sum(sizes["Adam"] for sizes in held["ZeRO"]) == 8 * P
    for sizes in held["FSDP2"]:
        assert sum(sizes.values()) <= 0.55 * 16 * P
    assert sum(sum(sizes.values()) for sizes in held["FSDP2"]) == 16 * P  # nothing is there twice


def test_sharded_gradients_and_weights_are_those_of_one_process():
    net = fsdp_worker.build(0)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    x, y = fsdp_worker.share(0, 0, 1)
    cross_entropy(net(x), y).backward()
    optimizer.step()
    for how in WAYS:
        for rank in launched(gradients, how):
            for (gradient, weight), p in zip(rank, net.parameters(), strict=True):
                assert (gradient - p.grad).norm() < 1e-5 * p.grad.norm()
                assert (weight - p).norm() < 1e-4 * p.norm() + 1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:launch. 3 ranks share")
def test_a_sharded_checkpoint_goes_from_two_ranks_to_one_to_three(tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    _, first, left = launched(fsdp_worker.leg, 0, range(3), None, a)[0]
    assert sorted(os.listdir(a)) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert totals_of_one_file(a, tmp_path / "a.pt") == left
    found, second, left_by_one = launched(fsdp_worker.leg, 1, range(3, 6), a, b, world_size=1)[0]
    assert found == left != left_by_one
    found, third, _ = launched(fsdp_worker.leg, 2, range(6, 9), b, None, world_size=3)[0]
    assert found == left_by_one
    _, alone = launched(fsdp_worker.measured, "FSDP2", 0, 9, world_size=1)[0]
    assert torch.allclose(torch.tensor([*first, *second, *third]), torch.tensor(alone), atol=1e-3)
