"""Data is what its checksum says, its parts do not overlap, and an id always names the same sample."""

import shutil

import pytest
import torch

from dxdy_nb import DxdyError
from dxdy_nb.training import datasets

NAMES = ("digits", "spirals", "sequences")
SIZES = {"digits": 1797, "spirals": 600, "sequences": 1500}


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Return a copy of the data folder that the package reads instead of its own."""
    folder = tmp_path / "data"
    shutil.copytree(datasets.DATA, folder)
    monkeypatch.setattr(datasets, "DATA", folder)
    return folder


def parts(splits):
    return [splits.train, splits.validation, splits.test]


@pytest.fixture(scope="module", params=NAMES)
def named(request):
    return request.param, datasets.load(request.param)


def test_one_changed_byte_is_noticed_and_the_file_named(copied):
    content = bytearray((copied / "digits.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (copied / "digits.npz").write_bytes(content)
    with pytest.raises(DxdyError, match=rf"^{copied}/digits.npz: damaged.*git checkout -- data/digits.npz"):
        datasets.load("digits")


def test_a_missing_file_is_named_with_how_to_restore_it(copied):
    (copied / "digits.npz").unlink()
    with pytest.raises(DxdyError, match=rf"^{copied}/digits.npz: missing.*git checkout -- data/digits.npz"):
        datasets.load("digits")


@pytest.mark.parametrize(
    ("content", "told"), [(None, "cannot be read"), ("", "damaged"), ("x\n", "damaged"), (b"\xff", "damaged")]
)
def test_a_list_of_checksums_that_is_none_is_named(copied, content, told):
    (copied / "SHA256SUMS").unlink()
    if content is not None:
        (copied / "SHA256SUMS").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DxdyError, match=rf"^{copied}/SHA256SUMS: {told}.*git checkout -- data/SHA256SUMS"):
        datasets.load("digits")


def test_a_folder_in_place_of_the_data_is_named(copied):
    (copied / "digits.npz").unlink()
    (copied / "digits.npz").mkdir()
    with pytest.raises(DxdyError, match=rf"^{copied}/digits.npz: cannot be read.*git checkout -- data/digits.npz"):
        datasets.load("digits")


def test_the_copy_that_is_whole_is_read(copied):
    assert torch.equal(datasets.load("digits").test.ids, datasets.digits().test.ids)


def test_an_unknown_name_is_told_with_the_nearest():
    with pytest.raises(DxdyError, match=r"no data set is called 'digit'\. Did you mean 'digits'"):
        datasets.load("digit")


def test_the_parts_are_disjoint_and_together_everything(named):
    name, splits = named
    ids = torch.cat([part.ids for part in parts(splits)])
    assert ids.sort().values.tolist() == list(range(SIZES[name]))


def test_every_class_has_its_share_of_every_part(named):
    _, splits = named
    whole = torch.cat([part.y for part in parts(splits)]).bincount() / sum(map(len, parts(splits)))
    for part in parts(splits):
        share = part.y.bincount(minlength=splits.classes) / len(part)
        deviation = (whole * (1 - whole) / len(part)).sqrt()  # of a share when samples are drawn blindly
        assert ((share - whole).abs() < 4 * deviation).all()


def test_the_digits_are_split_evenly_by_class():
    splits = datasets.digits()
    counts = torch.stack([part.y.bincount() for part in parts(splits)])  # (3, 10)
    expected = counts.sum(0) * torch.tensor([[4], [1], [1]]) / 6
    assert ((counts - expected).abs() < 1.5).all()


def test_inputs_are_what_the_models_expect(named):
    name, splits = named
    shape, dtype = {
        "digits": ((1, 8, 8), torch.float32),
        "spirals": ((2,), torch.float32),
        "sequences": ((12,), torch.int64),
    }[name]
    for part in parts(splits):
        assert part.x.shape[1:] == shape
        assert part.x.dtype == dtype
        assert part.y.dtype == part.ids.dtype == torch.int64
        assert part.y.min() >= 0
        assert part.y.max() < splits.classes


def test_digits_are_ink_between_zero_and_one():
    x = datasets.digits().train.x
    assert (x.min(), x.max()) == (0, 1)


def test_the_target_of_a_sequence_is_its_first_token():
    splits = datasets.sequences()
    assert torch.equal(splits.test.y, splits.test.x[:, 0])


@pytest.mark.parametrize("name", ["spirals", "sequences"])
def test_an_id_names_the_same_sample_in_whatever_part_it_is(name):
    one = datasets.load(name, seed=5)
    x = torch.cat([part.x for part in parts(one)])[torch.cat([part.ids for part in parts(one)]).argsort()]
    again = datasets.load(name, seed=5)
    for part in parts(again):
        assert torch.equal(part.x, x[part.ids])


def test_a_digits_id_is_its_place_in_the_file():
    with datasets.np.load(datasets.DATA / "digits.npz") as stored:
        images = torch.from_numpy(stored["images"]).float() / 16
    test = datasets.digits().test
    assert torch.equal(test.x[:, 0], images[test.ids])


def test_a_batch_carries_the_ids_of_its_samples():
    splits = datasets.spirals()
    place = {int(i): k for k, i in enumerate(splits.train.ids)}
    for batch in datasets.loader(splits.train, 64, shuffle_seed=3):
        assert torch.equal(batch.x, splits.train.x[[place[int(i)] for i in batch.ids]])


@pytest.mark.parametrize("name", ["spirals", "sequences"])
def test_a_synthetic_set_depends_on_its_seed_alone(name):
    torch.manual_seed(1)
    one = datasets.load(name, seed=5)
    torch.manual_seed(2)
    same, other = datasets.load(name, seed=5), datasets.load(name, seed=6)
    assert torch.equal(one.train.x, same.train.x)
    assert torch.equal(one.train.ids, same.train.ids)
    assert not torch.equal(one.train.x, other.train.x)


def test_without_a_seed_the_order_is_that_of_the_samples():
    samples = datasets.spirals().test
    ids = torch.cat([batch.ids for batch in datasets.loader(samples, 32)])
    assert torch.equal(ids, samples.ids)


def test_a_shuffled_order_is_decided_by_its_seed_and_new_in_every_epoch():
    samples = datasets.spirals().test

    def epochs(seed):
        loader = datasets.loader(samples, 32, shuffle_seed=seed)
        orders = []
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            orders.append(torch.cat([batch.ids for batch in loader]))
        return orders

    first, second = epochs(0)
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)
    torch.manual_seed(99)
    assert torch.equal(torch.cat(epochs(0)), torch.cat([first, second]))
    assert not torch.equal(epochs(1)[0], first)


@pytest.mark.parametrize("shuffle_seed", [None, 0])
def test_reading_batches_leaves_the_global_random_state_alone(shuffle_seed):
    before = torch.get_rng_state()
    list(datasets.loader(datasets.spirals().test, 32, shuffle_seed=shuffle_seed))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("world_size", "repeated"), [(2, 0), (3, 2)])  # 400 samples
def test_ranks_read_shares_of_one_order_and_as_many_samples_twice_as_make_them_even(world_size, repeated):
    samples = datasets.spirals().train
    whole = torch.cat([b.ids for b in datasets.loader(samples, 64, shuffle_seed=5)])
    loaders = [datasets.loader(samples, 32, shuffle_seed=5, rank=r, world_size=world_size) for r in range(world_size)]
    shares = [torch.cat([batch.ids for batch in loader]) for loader in loaders]
    assert {len(share) for share in shares} == {(400 + repeated) // world_size}
    order = torch.stack(shares, dim=1).flatten()  # rank 0, rank 1, ..., rank 0, rank 1, ...
    assert torch.equal(order[:400], whole)
    assert torch.equal(order[400:], whole[:repeated])
