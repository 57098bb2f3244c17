"""What was acknowledged can be read again, whatever ended the process that wrote it."""

import contextlib
import json
import os
import resource
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import stress
from hypothesis import given
from hypothesis import strategies as st

from dxdy_nb import DxdyError
from dxdy_nb.observe import trace
from dxdy_nb.observe.trace import GRADIENT_COLUMNS, HEADER, MAX_BAD_SAMPLES, STEP_COLUMNS, Layout, Reader, TraceWriter

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
    writer.append(2, values_of(2) | {"loss": np.nan, "memory": 2.0**40}, gradients_of(2), full=False)
    seen = writer.read()
    writer.close()
    steps = pd.DataFrame([values_of(0), values_of(1), values_of(2)])
    steps["effective_batch"] = steps["effective_batch"].astype(int)
    steps.loc[2, ["loss", "memory"]] = [np.nan, 2.0**40]
    steps["skipped"] = [False, True, False]
    steps["bad_samples"] = [[], [7, 3], []]
    steps["full"] = [True, True, False]
    pd.testing.assert_frame_equal(seen.steps, steps.rename_axis("step"))
    expected = np.full((9, 7), np.nan)
    expected[:3, :6], expected[6:, :6] = gradients_of(0), gradients_of(2)
    expected[:3, 6] = [0.1, np.nan, 0.3]
    np.testing.assert_array_equal(seen.gradients.to_numpy(), expected)
    assert seen.gradients.index.tolist() == [(step, name) for step in range(3) for name in LAYOUT.parameters]
    assert (seen.missing_from, seen.torn_bytes) == (None, 0)


def test_names_and_shapes_are_read_back(five):
    (segment,) = trace.read(five).segments
    assert segment.layout == LAYOUT
    assert trace.read(five).sizes == {"0.weight": 12, "0.bias": 4, "Gewicht ö": 1}


def test_a_trace_without_steps_has_empty_tables(tmp_path):
    TraceWriter(LAYOUT, tmp_path).close()
    empty = trace.read(tmp_path)
    assert (len(empty.steps), len(empty.gradients)) == (0, 0)
    assert list(empty.steps.columns) == [*STEP_COLUMNS, "skipped", "bad_samples", "full"]
    assert list(empty.gradients.columns) == list(GRADIENT_COLUMNS)
    assert empty.gradients.index.names == ["step", "parameter"]


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


def test_a_folder_that_is_a_file_is_not_called_a_trace(tmp_path):
    (tmp_path / "a_file").write_text("")
    with pytest.raises(DxdyError, match="a_file: cannot be written"):
        TraceWriter(LAYOUT, tmp_path / "a_file")


@pytest.mark.parametrize("name", ["x\0y", "x" * 300])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    with pytest.raises(DxdyError, match="cannot be written"):
        TraceWriter(LAYOUT, tmp_path / name)


def test_a_description_alone_is_not_overwritten(tmp_path):
    (tmp_path / "trace.json").write_text("mine")
    with pytest.raises(DxdyError, match="already holds a trace"):
        TraceWriter(LAYOUT, tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("trace.json", "mine")]


@pytest.mark.parametrize("room", [0, HEADER, HEADER + 10])
def test_a_disk_that_is_full_at_the_start_leaves_the_folder_as_it_was(tmp_path, room):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(DxdyError, match=f"^{tmp_path}: cannot be written") as caught:
            TraceWriter(LAYOUT, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "as out=" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    TraceWriter(LAYOUT, tmp_path).close()


def test_a_loop_may_go_to_another_directory(here):
    writer = TraceWriter(LAYOUT, Path("run"))
    fill(writer, [0])
    (here / "elsewhere").mkdir()
    os.chdir(here / "elsewhere")
    fill(writer, [1])
    writer.close()
    assert writer.read().steps.index.tolist() == [0, 1]


@pytest.mark.parametrize(
    "content",
    [
        *[None, b"", b"\xff\xfe", b"[]", b"{}", b"3", b'{"version": 2}', b'{"version": 2, "segments": 3}'],
        *[b'{"version": 2, "segments": [3]}', b'{"version": 2, "segments": [{"parameters": [3]}]}'],
    ],
)
def test_a_damaged_description_is_named(five, content):
    (five / "trace.json").unlink()
    if content is not None:
        (five / "trace.json").write_bytes(content)
    with pytest.raises(DxdyError, match=f"^{five}/trace.json: "):
        trace.read(five)


def test_a_trace_with_records_of_another_size_is_refused(five):
    described = json.loads((five / "trace.json").read_text())
    described["segments"][0]["record_bytes"] += 8
    (five / "trace.json").write_text(json.dumps(described))
    with pytest.raises(DxdyError, match=f"^{five}/trace.json: written by another version"):
        trace.read(five)


def test_a_trace_in_another_version_of_the_format_is_named(five):
    described = json.loads((five / "trace.json").read_text())
    (five / "trace.json").write_text(json.dumps(described | {"version": 1}))
    with pytest.raises(DxdyError, match=f"^{five}/trace.json: written in version 1 .* version 2 is read"):
        trace.read(five)


@pytest.mark.parametrize("content", [None, b"", b"dxdy", b"not a trace at all"])
def test_a_file_that_is_no_trace_is_named(five, content):
    (five / "trace.bin").unlink()
    if content is not None:
        (five / "trace.bin").write_bytes(content)
    with pytest.raises(DxdyError, match=f"^{five}/trace.bin: "):
        trace.read(five)


def test_killed_processes_lose_no_acknowledged_step(tmp_path):
    for kill in range(2):
        assert stress.kill_one(tmp_path / str(kill), after=20 + 40 * kill, delay=0.001 * kill) is None


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
            size = trace.Layout(("weight", "bias"), ((1, 2), (1,))).record.itemsize
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


OTHER = Layout(("0.weight", "head"), ((4, 3), (7,)))


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_parameters_may_change(tmp_path, on_disk):
    writer = TraceWriter(Layout((), ()), tmp_path if on_disk else None)
    writer.append(0, values_of(0), np.zeros((0, 6)))
    writer.relayout(OTHER)  # no step comes of it
    writer.relayout(LAYOUT)
    fill(writer, [1, 2])
    writer.relayout(Layout(LAYOUT.parameters, LAYOUT.shapes))  # the same
    fill(writer, [3])
    writer.relayout(OTHER)
    writer.append(4, values_of(4), np.full((2, 6), 4.0))
    writer.relayout(LAYOUT)
    fill(writer, [5])
    seen = writer.read()
    writer.close()
    assert seen.steps["loss"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    names = {
        1: LAYOUT.parameters,
        2: LAYOUT.parameters,
        3: LAYOUT.parameters,
        4: OTHER.parameters,
        5: LAYOUT.parameters,
    }
    assert seen.gradients.index.tolist() == [(step, name) for step, those in names.items() for name in those]
    assert seen.gradients.loc[4, "norm"].tolist() == [4.0, 4.0]
    np.testing.assert_array_equal(seen.gradients.loc[5].to_numpy()[:, :6], gradients_of(5))
    assert seen.sizes == {"0.weight": 12, "0.bias": 4, "Gewicht ö": 1, "head": 7}
    if on_disk:
        names = ["trace.1.bin", "trace.2.bin", "trace.3.bin", "trace.bin", "trace.json"]
        assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_trace_that_starts_without_parameters_needs_no_second_file(tmp_path):
    writer = TraceWriter(Layout((), ()), tmp_path)
    writer.relayout(LAYOUT)
    fill(writer, range(3))
    writer.close()
    assert trace.read(tmp_path).gradients.index.levels[1].tolist() == sorted(LAYOUT.parameters)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.bin", "trace.json"]


def test_names_are_known_before_the_first_step(tmp_path):
    writer = TraceWriter(LAYOUT, tmp_path)
    assert trace.read(tmp_path).sizes == LAYOUT.sizes
    writer.relayout(OTHER)
    writer.append(0, values_of(0), np.full((2, 6), 4.0))
    writer.close()
    assert trace.read(tmp_path).gradients.index.tolist() == [(0, "0.weight"), (0, "head")]


def test_a_reader_follows_what_is_being_written(tmp_path):
    writer = TraceWriter(LAYOUT, tmp_path)
    reader = Reader(tmp_path)
    assert len(reader.update().steps) == 0
    fill(writer, range(3))
    assert reader.update().steps.index.tolist() == [0, 1, 2]
    assert len(reader.update().steps) == 0
    fill(writer, [3])
    writer.relayout(OTHER)
    writer.append(4, values_of(4), np.full((2, 6), 4.0))
    writer.relayout(LAYOUT)
    fill(writer, [5])
    seen = reader.update()
    assert seen.steps.index.tolist() == [3, 4, 5]
    assert seen.gradients.loc[4].index.tolist() == list(OTHER.parameters)
    fill(writer, [6])
    writer.close()
    assert reader.update().steps.index.tolist() == [6]


def test_a_reader_takes_a_torn_record_when_it_is_whole(six, tmp_path):
    folder, content = six
    (tmp_path / "trace.json").write_bytes((folder / "trace.json").read_bytes())
    reader = None
    for length, steps, torn in [
        (HEADER, [], 0),
        (HEADER + 1, [], 1),
        (HEADER + SIZE + 9, [0], 9),
        (None, range(1, 6), 0),
    ]:
        (tmp_path / "trace.bin").write_bytes(content[:length])
        reader = reader or Reader(tmp_path)
        seen = reader.update()
        assert (seen.steps.index.tolist(), seen.torn_bytes) == (list(steps), torn)


def test_a_reader_reads_only_what_is_new(tmp_path, monkeypatch):
    writer = TraceWriter(LAYOUT, tmp_path)
    fill(writer, range(1000))
    reader = Reader(tmp_path)
    reader.update()
    fill(writer, [1000])
    checked = []
    sound = trace._sound
    monkeypatch.setattr(trace, "_sound", lambda record: checked.append(1) or sound(record))
    assert reader.update().steps.index.tolist() == [1000]
    assert len(checked) == 1


@pytest.mark.parametrize("call", ["open", "replace"])
def test_a_disk_that_has_no_room_for_another_segment_keeps_those_before_it(tmp_path, monkeypatch, call):
    writer = TraceWriter(LAYOUT, tmp_path)
    fill(writer, range(2))
    writer.relayout(OTHER)
    original = getattr(os, call)

    def refuse(path, *arguments):
        if "trace.bin" in str(path):
            return original(path, *arguments)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="from step 2 on") as said:
        patch.setattr(os, call, refuse)
        for step in (2, 3):
            writer.append(step, values_of(step), np.full((2, 6), 4.0))
    assert len(said) == 1
    assert writer.read().gradients.index.tolist()[-2:] == [(3, "0.weight"), (3, "head")]
    stored = trace.read(tmp_path)
    assert (stored.steps.index.tolist(), stored.missing_from, stored.torn_bytes) == ([0, 1], 2, 0)


@pytest.mark.parametrize("first", [0, 3, 5, 9])
def test_a_trace_goes_on_from_a_step_and_what_followed_is_cut_off(five, first):
    with open(five / "trace.bin", "ab") as file:
        file.write(b"torn")
    writer = TraceWriter(LAYOUT, five, first)
    fill(writer, range(first, first + 2))
    writer.close()
    found = trace.read(five)
    assert found.steps.index.tolist() == [*range(min(first, 5)), first, first + 1]
    assert found.torn_bytes == 0
    assert found.gradients.loc[(first, "0.bias"), "mean"] == gradients_of(first)[1, 0]


@pytest.mark.parametrize(("first", "files"), [(2, 1), (3, 2), (7, 3)])
def test_a_trace_of_several_layouts_goes_on_in_the_one_that_was_written_then(tmp_path, first, files):
    layouts = [Layout(("a",), ((2,),)), LAYOUT, Layout(("b", "c"), ((2,), ()))]
    writer = TraceWriter(layouts[0], tmp_path)
    for place, layout in enumerate(layouts):
        writer.relayout(layout)
        for step in range(2 * place, 2 * place + 2):
            writer.append(step, values_of(step), np.ones((len(layout.parameters), 6)))
    writer.close()
    writer = TraceWriter(layouts[files - 1], tmp_path, first)
    writer.append(first, values_of(first), np.ones((len(layouts[files - 1].parameters), 6)))
    writer.close()
    assert trace.read(tmp_path).steps.index.tolist() == [*range(min(first, 6)), first]
    assert len(list(tmp_path.glob("trace*.bin"))) == files


def test_what_was_missing_behind_the_step_is_missing_no_more(five):
    trace._note_missing(five, 4)
    assert trace.read(five).missing_from == 4
    TraceWriter(LAYOUT, five, 5).close()
    assert trace.read(five).missing_from == 4
    TraceWriter(LAYOUT, five, 4).close()
    assert trace.read(five).missing_from is None


def test_a_trace_whose_process_died_before_its_description_begins_anew(tmp_path):
    (tmp_path / "trace.bin").write_bytes(b"dx")
    writer = TraceWriter(LAYOUT, tmp_path, 0)
    fill(writer, range(2))
    writer.close()
    assert len(trace.read(tmp_path).steps) == 2


def test_tensorboard_is_asked_for_where_it_is_missing(five, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(DxdyError, match="pip install tensorboard"):
        trace.read(five).to_tensorboard(five / "events")


def test_tensorboard_gets_every_number_under_a_name(five, monkeypatch):
    written = {}

    class SummaryWriter(contextlib.nullcontext):
        def add_scalar(self, name, value, step):
            written[name, step] = value

    def make(folder):
        written["folder"] = folder
        writer = SummaryWriter()
        writer.enter_result = writer
        return writer

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=make))
    trace.read(five).to_tensorboard(five / "events")
    assert written.pop("folder") == str(five / "events")
    assert len(written) == 5 * (len(STEP_COLUMNS) + len(LAYOUT.parameters))
    assert written["steps/loss", 3] == 3.0
    assert written["norm/0.bias", 2] == gradients_of(2)[1, GRADIENT_COLUMNS.index("norm")]
