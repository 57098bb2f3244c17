"""What was acknowledged can be read again, whatever ended the process that wrote it."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dxdy_nb import DxdyError
from dxdy_nb.observe import trace
from dxdy_nb.observe.trace import HEADER, MAX_BAD_SAMPLES, STEP_COLUMNS, Layout, TraceWriter

LAYOUT = Layout(("0.weight", "0.bias", "Gewicht ö"), ((4, 3), (4,), ()))
SIZE = LAYOUT.record.itemsize


def values_of(step):
    return {name: step + place / 16 for place, name in enumerate(STEP_COLUMNS)}


def gradients_of(step):
    return 1000.0 * step + np.arange(18.0).reshape(3, 6)


def fill(writer, steps):
    for step in steps:
        writer.append(step, values_of(step), gradients_of(step))


@pytest.fixture
def five(tmp_path):
    """Return a folder with a trace of five steps."""
    writer = TraceWriter(LAYOUT, tmp_path)
    fill(writer, range(5))
    writer.close()
    return tmp_path


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Return a folder with a trace of six steps, and the bytes of its file."""
    folder = tmp_path_factory.mktemp("six")
    writer = TraceWriter(LAYOUT, folder)
    fill(writer, range(6))
    writer.close()
    return folder, (folder / "trace.bin").read_bytes()


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_written_is_read_back(tmp_path, on_disk):
    writer = TraceWriter(LAYOUT, tmp_path if on_disk else None)
    writer.append(0, values_of(0), gradients_of(0), np.array([0.1, np.nan, 0.3]))
    writer.append(1, values_of(1), np.full((3, 6), np.nan), skipped=True, bad_samples=[7, 3])
    writer.append(2, values_of(2) | {"loss": np.nan, "memory": 2.0**40}, gradients_of(2))
    seen = writer.read()
    writer.close()
    steps = pd.DataFrame([values_of(0), values_of(1), values_of(2)])
    steps["effective_batch"] = steps["effective_batch"].astype(int)
    steps.loc[2, ["loss", "memory"]] = [np.nan, 2.0**40]
    steps["skipped"] = [False, True, False]
    steps["bad_samples"] = [[], [7, 3], []]
    pd.testing.assert_frame_equal(seen.steps, steps.rename_axis("step"))
    expected = np.full((9, 7), np.nan)
    expected[:3, :6], expected[6:, :6] = gradients_of(0), gradients_of(2)
    expected[:3, 6] = [0.1, np.nan, 0.3]
    np.testing.assert_array_equal(seen.gradients.to_numpy(), expected)
    assert seen.gradients.index.tolist() == [(step, name) for step in range(3) for name in LAYOUT.parameters]
    assert (seen.missing_from, seen.torn_bytes) == (None, 0)


def test_names_and_shapes_are_read_back(five):
    assert trace.read(five).layout == LAYOUT
    assert trace.read(five).layout.sizes == {"0.weight": 12, "0.bias": 4, "Gewicht ö": 1}


def test_a_trace_without_steps_has_empty_tables(tmp_path):
    TraceWriter(LAYOUT, tmp_path).close()
    empty = trace.read(tmp_path)
    assert (len(empty.steps), len(empty.gradients)) == (0, 0)
    assert list(empty.steps.columns) == [*STEP_COLUMNS, "skipped", "bad_samples"]


def test_of_very_many_bad_samples_the_first_are_kept(tmp_path):
    writer = TraceWriter(LAYOUT, tmp_path)
    writer.append(0, values_of(0), gradients_of(0), bad_samples=range(1000))
    writer.append(1, values_of(1), gradients_of(1), bad_samples=[5])
    writer.close()
    assert trace.read(tmp_path).steps["bad_samples"].tolist() == [list(range(MAX_BAD_SAMPLES)), [5]]


def test_a_trace_can_be_read_while_it_grows(tmp_path):
    writer = TraceWriter(LAYOUT, tmp_path)
    for step in range(4):
        fill(writer, [step])
        assert trace.read(tmp_path).steps.index.tolist() == list(range(step + 1))
        assert writer.read().steps["loss"].tolist() == [float(s) for s in range(step + 1)]
    writer.close()


@given(length=st.integers(0, 6 * SIZE))
def test_a_file_that_ends_anywhere_gives_all_its_whole_records(six, length):
    folder, content = six
    (folder / "trace.bin").write_bytes(content[: HEADER + length])
    seen = trace.read(folder)
    assert seen.steps.index.tolist() == list(range(length // SIZE))
    assert seen.torn_bytes == length % SIZE


@given(place=st.integers(0, 6 * SIZE - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_ends_what_can_be_read(six, place, bit):
    folder, content = six
    damaged = bytearray(content)
    damaged[HEADER + place] ^= 1 << bit
    (folder / "trace.bin").write_bytes(damaged)
    with pytest.warns(RuntimeWarning, match=f"only the first {place // SIZE} can be trusted"):
        seen = trace.read(folder)
    assert seen.steps["loss"].tolist() == [float(step) for step in range(place // SIZE)]
    assert seen.torn_bytes == (6 - place // SIZE) * SIZE


def test_an_existing_trace_is_not_overwritten(five):
    before = {path.name: path.read_bytes() for path in five.iterdir()}
    with pytest.raises(DxdyError, match="already holds a trace"):
        TraceWriter(LAYOUT, five)
    assert {path.name: path.read_bytes() for path in five.iterdir()} == before


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "a_file").write_text("")
    with pytest.raises(DxdyError, match=f"^{tmp_path}/a_file/trace: cannot be written"):
        TraceWriter(LAYOUT, tmp_path / "a_file" / "trace")


@pytest.mark.parametrize(
    "content", [None, b"", b"\xff\xfe", b"[]", b"{}", b"3", b'{"parameters": 3}', b'{"parameters": [3]}']
)
def test_a_damaged_description_is_named(five, content):
    (five / "trace.json").unlink()
    if content is not None:
        (five / "trace.json").write_bytes(content)
    with pytest.raises(DxdyError, match=f"^{five}/trace.json: "):
        trace.read(five)


def test_a_trace_with_records_of_another_size_is_refused(five):
    described = json.loads((five / "trace.json").read_text())
    (five / "trace.json").write_text(json.dumps(described | {"record_bytes": SIZE + 8}))
    with pytest.raises(DxdyError, match=f"^{five}/trace.json: written by another version"):
        trace.read(five)


@pytest.mark.parametrize("content", [None, b"", b"dxdy", b"not a trace at all"])
def test_a_file_that_is_no_trace_is_named(five, content):
    (five / "trace.bin").unlink()
    if content is not None:
        (five / "trace.bin").write_bytes(content)
    with pytest.raises(DxdyError, match=f"^{five}/trace.bin: "):
        trace.read(five)


def test_a_killed_process_loses_no_acknowledged_step(tmp_path):
    code = """
        import itertools, sys
        from pathlib import Path
        import numpy as np
        from dxdy_nb.observe.trace import STEP_COLUMNS, Layout, TraceWriter
        writer = TraceWriter(Layout(("w",), ((3,),)), Path(sys.argv[1]))
        for step in itertools.count():
            writer.append(step, dict.fromkeys(STEP_COLUMNS, float(step)), np.full((1, 6), float(step)))
            print(step, flush=True)
        """
    command = [sys.executable, "-c", textwrap.dedent(code), tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        printed = [int(child.stdout.readline()) for _ in range(300)]
        child.send_signal(signal.SIGKILL)
        printed += [int(line) for line in child.stdout if line.endswith("\n")]
    assert child.returncode == -signal.SIGKILL
    seen = trace.read(tmp_path)
    assert seen.steps.index.tolist()[: len(printed)] == printed
    assert seen.gradients["norm"].tolist() == [float(step) for step in seen.steps.index]
    assert len(seen.steps) <= len(printed) + 1


@pytest.mark.parametrize("room", [0.0, 0.5], ids=["no byte more", "half a record more"])
def test_on_a_full_disk_training_goes_on_and_says_once_what_is_missing(tmp_path, room):
    # A limit on the size of a file stands for the end of the disk: Python ignores its signal and sees an error.
    code = """
        import json, resource, sys, warnings
        from pathlib import Path
        import torch
        import dxdy_nb as dx
        from dxdy_nb.observe import trace
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as said, dx.watch(model, optimizer, out=sys.argv[1]) as w:
            warnings.simplefilter("always")
            size = json.loads(Path(sys.argv[1], "trace.json").read_text())["record_bytes"]
            limit = trace.HEADER + int((5 + float(sys.argv[2])) * size)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            for _ in range(12):
                optimizer.zero_grad()
                model(torch.ones(3, 2)).square().mean().backward()
                optimizer.step()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        stored = trace.read(sys.argv[1])
        print(json.dumps({
            "said": [[warning.category.__name__, str(warning.message)] for warning in said],
            "kept": w.steps["loss"].tolist(), "index": w.steps.index.tolist(), "stored": stored.steps["loss"].tolist(),
            "missing_from": stored.missing_from, "torn_bytes": stored.torn_bytes,
        }))
        """
    command = [sys.executable, "-c", textwrap.dedent(code), tmp_path / "run", str(room)]
    seen = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    ((category, text),) = seen["said"]
    assert category == "RuntimeWarning"
    assert "Training goes on; from step 5 on" in text
    assert seen["index"] == list(range(12))
    assert sorted(set(seen["kept"]), reverse=True) == seen["kept"]  # the loss of each step, falling
    assert seen["stored"] == seen["kept"][:5]
    assert (seen["missing_from"], seen["torn_bytes"]) == (5, 0)


def test_a_disk_that_refuses_every_call_is_no_reason_to_stop(tmp_path, monkeypatch):
    writer = TraceWriter(LAYOUT, tmp_path)
    fill(writer, range(2))

    def refuse(*arguments):
        raise OSError(5, "Input/output error")

    for call in ("write", "ftruncate", "pwrite"):
        monkeypatch.setattr(os, call, refuse)
    with pytest.warns(RuntimeWarning, match="Input/output error") as said:
        fill(writer, range(2, 5))
    assert len(said) == 1
    assert writer.read().steps["loss"].tolist() == [0, 1, 2, 3, 4]
    assert trace.read(tmp_path).steps["loss"].tolist() == [0, 1]
