"""What ranks do differently is found, and ranks that do the same are not accused."""

import functools
import json
import os
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
import rank_workers
import torch
from rank_workers import FAULTS
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler

import dxdy_nb as dx
from dxdy_nb.cli import main
from dxdy_nb.diagnosis import ranks
from dxdy_nb.diagnosis.comm import RULES, doing, repeated
from dxdy_nb.ranks.digest import checksum, checksums, sketch
from dxdy_nb.ranks.log import logged, read
from dxdy_nb.ranks.scribe import Scribe
from dxdy_nb.ranks.verify import Ranks

QUICK = {"module", "raises"}


def diagnosed(fault):
    return dx.diagnose_ranks(functools.partial(rank_workers.train, fault=fault), time_limit=20)


def test_ranks_that_train_as_they_should_raise_no_error():
    report = diagnosed("")
    assert report.findings == (), str(report)
    assert report.saw["updates"] == "8, 8"
    assert report.unchecked == ()


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[] if f in QUICK else pytest.mark.slow) for f in FAULTS])
def test_a_fault_between_ranks_has_its_cause(fault):
    report = diagnosed(fault)
    assert report.errors[0].cause == FAULTS[fault], str(report)
    if fault == "raises":
        assert "rank 1 raised ValueError: a bad record" in report.errors[0].evidence
        assert report.errors[0].where.startswith("rank_workers.py:")
    if fault == "only":
        assert "rank 0 waits in all_reduce" in report.errors[0].evidence


def test_a_worker_that_is_none_and_a_lone_rank_are_refused():
    with pytest.raises(dx.DxdyError, match="expected worker"):
        dx.diagnose_ranks(3)
    with pytest.raises(dx.DxdyError, match="2 or more"):
        dx.diagnose_ranks(rank_workers.train, world_size=1)


def test_a_script_is_run_on_ranks_and_compared(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "torch.manual_seed(int(os.environ['RANK']))\n"
        "net = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for _ in range(2):\n"
        "    optimizer.zero_grad()\n"
        "    net(torch.ones(4, 2)).pow(2).mean().backward()\n"
        "    for p in net.parameters():\n"
        "        dist.all_reduce(p.grad)\n"
        "        p.grad /= dist.get_world_size()\n"
        "    optimizer.step()\n"
        "print('argument', sys.argv[1])\n"
        "dist.destroy_process_group()\n"
    )
    code = main(["watch", "--nproc-per-node", "2", "--json", str(tmp_path / "report.json"), str(script), "x"])
    out, err = capfd.readouterr()
    assert code == 1
    assert "argument x" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["findings"][0]["cause"] == "different-init-manual-allreduce", err


LEAVES = """
import os, sys, psutil, torch, torch.distributed as dist
dist.init_process_group('gloo', init_method='tcp://127.0.0.1:29500')
dist.all_reduce(torch.ones(2))
own, parent = (psutil.Process(pid).net_connections('inet') for pid in (os.getpid(), os.getppid()))
print('hears', {one.laddr.ip for one in own}, len(parent))
if dist.get_rank() == 1:
    sys.exit(5)
dist.barrier()
"""


def test_a_script_that_exits_on_one_rank_keeps_nobody_waiting_and_is_on_loopback_only(tmp_path, capfd):
    (tmp_path / "train.py").write_text(LEAVES)
    before = len(psutil.Process().net_connections("inet"))
    began = time.monotonic()
    code = main(["watch", "--nproc-per-node", "2", str(tmp_path / "train.py")])
    assert time.monotonic() - began < ranks.TIME
    assert code == 5
    out, err = capfd.readouterr()
    assert sorted(line for line in out.splitlines() if "hears" in line) == [
        f"[rank {rank}] hears {{'127.0.0.1'}} {before}" for rank in (0, 1)
    ]
    assert "rank 1 raised SystemExit: 5" in err and "train.py:8" in err


def test_a_watch_on_ranks_keeps_no_run(capsys):
    assert main(["watch", "--nproc-per-node", "2", "--steps", "3", "train.py"]) == 2
    assert main(["watch", "--nproc-per-node", "2", "missing.py"]) == 2
    assert "no such script" in capsys.readouterr().err


def test_logs_without_a_step_are_not_said_to_be_equal(tmp_path):
    (tmp_path / "ranks").mkdir()
    logs = [tmp_path / "ranks" / f"rank{rank}.jsonl" for rank in (0, 1)]
    for log in logs:
        log.touch()
    with pytest.raises(dx.DxdyError, match="the logs hold no step of any rank"):
        dx.verify_ranks(tmp_path)
    for log in logs:
        log.write_text(json.dumps({"event": "forward", "device": "cpu", "samples": 8, "grad": True}) + "\n")
    verdicts = dx.verify_ranks(tmp_path)["verdict"]
    assert (verdicts["gradients"], verdicts["parameters"], verdicts["batch"]) == ("not seen", "not seen", "equal")
    for log, bits in zip(logs, (1, 2), strict=True):
        update = {"event": "update", "lr": [0.1], "all_gradients": 0, "all_parameters": 0}
        end = {"event": "end", "parameters": {"weight": bits}, "buffers": {}, "rng": 0}
        log.write_text("".join(json.dumps(e) + "\n" for e in (json.loads(log.read_text()), update, end)))
    told = dx.verify_ranks(tmp_path).loc["parameters"]
    assert (told["verdict"], told["seen"]) == ("different", "bit-identical at 1 of 1 update, not alike at the end")


def test_a_diagnosis_of_ranks_has_a_limit_in_seconds():
    for limit in (None, "x", 0, float("inf")):
        with pytest.raises(dx.DxdyError, match=r"expected (time_limit|timeout|stall) in seconds"):
            dx.diagnose_ranks(rank_workers.train, time_limit=limit)


@pytest.mark.parametrize(("end", "code"), [("-1", 255), ("3", 3), ("None", 0), ("'no data'", 1)])
def test_an_exit_code_of_a_script_is_what_a_shell_sees(tmp_path, monkeypatch, end, code):
    monkeypatch.setattr(sys, "argv", ["dxdy"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "script.py").write_text(f"import sys; sys.exit({end})")
    assert ranks._run(0, 2, "", str(tmp_path / "script.py"), [], False) == code


def test_a_run_on_ranks_that_never_begins_says_why_and_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = dx.RunConfig(data="spirals", model="mlp", world_size=2, accumulation_steps=10**6, device="cpu")
    with pytest.raises(dx.DxdyError, match="expected world_size from 1 to"):
        dx.train(config.override({"world_size": 4096}))
    with pytest.raises(dx.DxdyError, match="accumulation_steps: an epoch has"):
        dx.train(config)
    assert list((tmp_path / "runs").iterdir()) == []


def test_checksums_are_of_bits_and_sketches_of_values():
    a = torch.randn(1000)
    assert checksum([a]) == checksum([a.clone()])
    for place in (0, 999):
        other = a.clone()
        other[place] = torch.nextafter(other[place], torch.tensor(9.0))
        assert checksum([a]) != checksum([other])
    assert checksum([a, a[:3]]) != checksum([a])
    large, other = torch.zeros(80_001), torch.zeros(80_001)
    other[50_000] = 1e-30
    seen = [checksum([large], turn) != checksum([other], turn) for turn in range(8)]
    assert seen == [False, False, True, False] * 2  # a lone number is in one of four parts
    assert checksum([a], 1) == checksum([a])
    spread, sparse = torch.stack([a, a], 1)[:, 0], a.relu().to_sparse()
    nested = torch.nested.nested_tensor([a, a[:3]], layout=torch.jagged)
    assert checksum([spread]) == checksum([a])
    assert checksum([sparse]) == checksum([a.relu()])
    assert checksum([nested]) == checksum([torch.cat([a, a[:3]])])
    assert checksums([a, nested, sparse], 2) == [0, 0]
    (norm, projection), (norm2, projection2), (_, total) = sketch(a), sketch(-2 * a), sketch(a - 2 * a)
    assert norm == pytest.approx(a.double().norm().item())
    assert (norm2, projection2) == pytest.approx((2 * norm, -2 * projection))
    assert total == pytest.approx(projection + projection2)


def test_a_log_tells_what_a_loop_did_and_a_torn_line_is_left_out(tmp_path):
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with logged(tmp_path / "rank0.jsonl", 0):
        (net(torch.ones(3, 2)) ** 2).mean().div(4).backward()
        optimizer.step()
    events = read(tmp_path / "rank0.jsonl")
    names = [e["event"] for e in events]
    assert names == ["begin", "forward", "backward", "backwarded", "update", "updated", "end"]
    backward, update = events[2], events[4]
    assert (backward["reduction"], backward["scaled"], backward["counted"]) == ("mean", True, 3)
    assert update["lr"] == [0.5]
    assert update["gradients"]["weight"][1] == pytest.approx(net.weight.grad.double().norm().item())
    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write('{"event": "upd')
    assert read(tmp_path / "rank0.jsonl") == events


class Endless(Dataset):
    """A data set that knows its items, and not how many."""

    def __getitem__(self, index):
        return torch.zeros(2)


def test_a_loader_with_batches_of_ones_own_and_a_column_of_a_table_is_logged(tmp_path):
    table = torch.arange(24.0).reshape(8, 3)
    loaders = [
        DataLoader(Endless(), batch_sampler=BatchSampler(range(6), 4, drop_last=False)),
        DataLoader(table, 4, collate_fn=lambda rows: torch.stack(rows)[:, -1]),
        DataLoader(table, 4, collate_fn=lambda rows: torch.stack(rows).to_sparse()),
    ]
    with logged(tmp_path / "rank0.jsonl", 0):
        assert [len(list(loader)) for loader in loaders] == [2, 2, 2]
    passes = [event for event in read(tmp_path / "rank0.jsonl") if event["event"] == "pass"]
    assert [(one["sampler"], one["batches"], one["whole"]) for one in passes] == [
        ("range", 2, 0),
        *[("SequentialSampler", 2, 8)] * 2,
    ]


def test_who_waits_for_whom_is_told_from_the_last_events():
    reduced = {"event": "backward", "reduces": True, "line": ["t.py", 3], "value": 1.0}
    barrier = {"event": "collective", "name": "barrier", "line": ["t.py", 9], "world": True, "size": 0}
    logs = ([reduced, {"event": "backwarded"}, barrier], [reduced, {"event": "backwarded"}, reduced])
    assert [doing(log) for log in logs] == ["waits in barrier (t.py:9)", "waits in its backward number 2"]
    findings = list(RULES[0](Ranks(logs, {0: "was ended"})))
    assert [f.cause for f in findings] == ["uneven-inputs-hang"]


def stepping(*passes, left=True, **last):
    """Return the log of a rank that made so many steps in each pass, of so many batches, and what it did at last."""
    log = []
    for steps, batches in passes:
        log.append({"event": "pass", "batches": batches})
        log += [{"event": "backward", "reduces": True, "line": ["t.py", 3]}, {"event": "backwarded"}] * steps
    return [*log, {"event": "passed"}, *([last] if last else []), {"event": "end" if left else "raised"}]


MEETS = {"event": "collective", "name": "all_reduce", "world": True, "size": 2, "line": ["t.py", 9]}
FORWARD = {"event": "forward", "ddp": True, "grad": True, "sync": True}


@pytest.mark.parametrize(
    ("logs", "cause", "told"),
    [
        (
            (stepping((6, 6), (2, 6)), stepping((4, 4), (4, 4))),
            "collective-mismatch",
            "rank 0 has left, after 8 backwards",
        ),
        (
            (stepping((6, 6), (3, 6)), stepping((4, 4), (4, 4))),
            "uneven-inputs-hang",
            "rank 0 6 of 6 batches, rank 1 4 of",
        ),
        (
            (stepping((4, 6), left=False, **FORWARD), stepping((4, 4), left=False, **MEETS)),
            "uneven-inputs-hang",
            "0 5 of",
        ),
        ((stepping((4, None), left=False, **FORWARD), stepping((4, None))), "uneven-inputs-hang", "rank 0 5, rank 1 4"),
        ((stepping((4, 4), (1, 4)), stepping((4, 4), left=False, **MEETS)), "collective-mismatch", "rank 0 backward"),
        ((stepping((5, 8)), stepping((4, 8), left=False, **MEETS)), "collective-mismatch", "rank 1 all_reduce of 2"),
        (
            (stepping((4, 4), left=False, **{**FORWARD, "grad": False}), stepping((4, 4))),
            "collective-mismatch",
            "forward",
        ),
    ],
)
def test_a_rank_with_fewer_batches_is_told_from_one_that_calls_another_collective(logs, cause, told):
    log = [{**e, "all": "Connection closed"} if e["event"] == "raised" else e for e in logs[0]]
    other = [{**e, "all": "Connection closed"} if e["event"] == "raised" else e for e in logs[1]]
    (finding,) = RULES[0](Ranks((log, other), {0: "rank 0 of 2 was ended."}))
    assert finding.cause == cause, finding
    assert told in finding.evidence


def split(data, rank):
    return torch.utils.data.Subset(data, range(32 * rank, 32 * rank + 32))


DRAWN = torch.utils.data.WeightedRandomSampler(torch.ones(64), 64)
SHARED = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.arange(64) % 4)
FEW = torch.utils.data.TensorDataset(torch.arange(64) % 8)  # samples that are alike


@pytest.mark.parametrize(
    ("loader", "batches", "severity"),
    [
        (lambda rank: DataLoader(SHARED, 8, shuffle=True), 8, "error"),
        (lambda rank: DataLoader(SHARED, 8, shuffle=True), 4, "hint"),
        (lambda rank: DataLoader(SHARED, 8, shuffle=True), 1, ""),
        (lambda rank: DataLoader(split(SHARED, rank), 8, shuffle=True), 4, ""),
        (lambda rank: DataLoader(split(FEW, rank), 8, shuffle=True), 4, ""),
        (lambda rank: DataLoader(SHARED, 8, sampler=DistributedSampler(SHARED, 2, rank)), 4, ""),
        (lambda rank: DataLoader(SHARED, 8, sampler=RandomSampler(SHARED, replacement=True)), 8, ""),
        (lambda rank: DataLoader(SHARED, 8, sampler=DRAWN), 8, ""),
        (lambda rank: DataLoader(SHARED, 8, sampler=RandomSampler(SHARED, num_samples=32)), 4, ""),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_ranks_that_go_over_the_same_samples_each_in_its_own_order(tmp_path, loader, batches, severity, trains):
    logs = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        weight, taken = torch.ones(1, requires_grad=True), iter(range(batches))
        with logged(tmp_path / f"rank{rank}.jsonl", rank):
            weight.sum().backward()
            mine = loader(rank)
            for _ in mine if batches == len(mine) else zip(taken, mine, strict=False):
                if trains:
                    weight.sum().backward()
        logs.append([{**e, "reduces": True} for e in read(tmp_path / f"rank{rank}.jsonl")])
    findings = [(f.cause, f.severity) for f in repeated(Ranks(tuple(logs), {}))]
    assert findings == ([("no-distributed-sampler", severity)] if severity and trains else [])


def config(**changes):
    base = dx.RunConfig(data="spirals", model="mlp", max_steps=6, batch_size=32, world_size=2, device="cpu", lr=0.1)
    return base.override(changes)


def test_two_ranks_train_as_one_process_does_on_both_their_batches(tmp_path, capsys):
    two = dx.train(config(), out=tmp_path / "runs" / "two")
    assert "There is no run on one device to compare with" in capsys.readouterr().out
    one = dx.train(config(world_size=1, batch_size=64), out=tmp_path / "runs" / "one")
    weights = [torch.cat([p.detach().flatten() for p in run.model.parameters()]) for run in (one, two)]
    assert (weights[0] - weights[1]).norm() <= 1e-6 * weights[0].norm()
    assert two.steps["effective_batch"].tolist() == one.steps["effective_batch"].tolist() == [64] * 6
    assert two.steps["loss"].tolist() == pytest.approx(one.steps["loss"].tolist(), rel=1e-5)
    assert two.steps["grad_norm"].tolist() == pytest.approx(one.steps["grad_norm"].tolist(), rel=1e-5)
    table = dx.verify_ranks(two)
    assert isinstance(table, pd.DataFrame)
    assert table["verdict"][["updates", "gradients", "parameters", "loss", "rate"]].tolist() == ["equal"] * 5
    assert table["verdict"]["samples"] == "apart"
    with pytest.raises(dx.DxdyError, match="no logs of several ranks"):
        dx.verify_ranks(one)
    capsys.readouterr()
    again = dx.train(config(), out=tmp_path / "runs" / "again")
    assert "to compare with" not in capsys.readouterr().out
    assert torch.equal(torch.cat([p.detach().flatten() for p in again.model.parameters()]), weights[1])
    accumulated = dx.train(config(accumulation_steps=2, batch_size=16), out=tmp_path / "runs" / "accumulated")
    assert accumulated.steps["effective_batch"].tolist() == [64] * 6


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a device that is always full")
def test_a_full_disk_ends_the_log_and_no_training():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = "No space left on device. The ranks go on"
    with pytest.warns(RuntimeWarning, match=text) as said, logged(Path("/dev/full"), 0):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert len(said) == 1


def test_a_log_that_was_cut_off_is_not_written_on(tmp_path):
    class Full:
        """A file on a disk that is full for a moment: half a line goes in, later ones would."""

        name, lines = "rank0.jsonl", 0

        def __init__(self, file):
            self.file = file

        def write(self, line):
            self.lines += 1
            return self.file.write(line[: len(line) // 2] if self.lines == 2 else line)

    with (tmp_path / "rank0.jsonl").open("ab", buffering=0) as file:
        scribe = Scribe(Full(file), 0, 1)
        with pytest.warns(RuntimeWarning, match="No space left"):
            scribe.write("first", more="text")
        scribe.write("second")
    assert [event["event"] for event in read(tmp_path / "rank0.jsonl")] == ["begin"]


@pytest.mark.parametrize("text", ['{"event": "a", "at{"event": "b"}\n', "\udcff{}\n"])
def test_a_damaged_log_is_an_error_in_words(tmp_path, text):
    (tmp_path / "rank0.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(dx.DxdyError, match=r"rank0\.jsonl: is no log of a rank"):
        read(tmp_path / "rank0.jsonl")


def test_a_report_that_cannot_be_written_is_refused_before_the_ranks_start(tmp_path, capsys):
    (tmp_path / "train.py").write_text("raise SystemExit('ran')")
    options = ["--nproc-per-node", "2", "--json", str(tmp_path), str(tmp_path / "train.py")]
    assert main(["watch", *options]) == 2
    assert "cannot be written" in capsys.readouterr().err
