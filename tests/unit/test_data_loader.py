"""Packing, the global order, each rank's share of it, and the batches: what no world size may change."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshtune.data.batch import IGNORED_LABEL, Batch
from meshtune.data.collate import as_filler, collate_packed, collate_padded, shifted_labels
from meshtune.data.cutting import take
from meshtune.data.dataset import TokenDataset
from meshtune.data.encoding import Encoded
from meshtune.data.loader import validation_batches
from meshtune.data.order import GlobalOrder, permutation
from meshtune.data.packing import PackingOptions, pack
from meshtune.data.padding import pad_to
from meshtune.data.report import DataReport
from meshtune.data.store import Writer
from meshtune.errors import DataError
from tests.unit.data_ranks import global_batches, loaders


def dataset_of(folder: Path, lengths: list[int]) -> TokenDataset:
    """Documents whose tokens are all 100 + their index, but the first; the second half is supervised."""
    with Writer(folder / "set") as writer:
        for index, length in enumerate(lengths):
            ids = np.full(length, 100 + index, dtype=np.int32)
            writer.append([Encoded(ids, np.arange(length) >= length // 2)])
        return writer.publish(DataReport())


def document(*ids: int, supervised: list[int] | None = None) -> Any:
    flags = [True] * len(ids) if supervised is None else [i in supervised for i in range(len(ids))]
    return np.array(ids, dtype=np.int64), np.array(flags)


def documents_in(batch: Batch) -> list[int]:
    """The indices of the documents that a batch of `dataset_of` counts, in order."""
    if batch.tokens == 0:
        return []
    if batch.document_lengths is None:
        return (batch.input_ids[:, 0] - 100).tolist()
    starts = torch.cumsum(batch.document_lengths, 0) - batch.document_lengths
    return (batch.input_ids[0, starts] - 100).tolist()


# ---- packing


def test_packs_lose_nothing_and_stay_within_the_capacity() -> None:
    """C32, over random lengths: every document once, packs bounded, ordered, repeatable and tight."""
    rng = random.Random(0)
    for _ in range(60):
        capacity = rng.choice([8, 50, 200])
        lengths = [rng.randint(2, capacity) for _ in range(rng.choice([1, 3, 40, 300]))]
        order = rng.sample(range(len(lengths)), len(lengths))
        packs = pack(lengths, capacity, order)
        place = {index: at for at, index in enumerate(order)}
        assert sorted(index for members in packs for index in members) == list(range(len(lengths)))
        assert all(sum(lengths[index] for index in members) <= capacity for members in packs)
        assert all(members == sorted(members, key=place.__getitem__) for members in packs)
        assert [place[m[0]] for m in packs] == sorted(place[m[0]] for m in packs)
        assert packs == pack(lengths, capacity, order)
        assert len(packs) <= 11 / 9 * -(-sum(lengths) // capacity) + len(lengths)
        for one, other in pairwise(packs):
            assert sum(lengths[i] for i in (*one, *other)) > capacity


def test_best_fit_takes_the_tightest_pack() -> None:
    assert pack([6, 7, 3, 4], 10, [0, 1, 2, 3]) == [[0, 3], [1, 2]]
    assert pack([7, 5, 3, 2], 10, [0, 1, 2, 3]) == [[0, 2], [1, 3]]
    assert pack([5, 5, 5, 5], 10, [3, 2, 1, 0]) == [[3, 2], [1, 0]]


def test_a_document_longer_than_a_pack_is_an_error() -> None:
    """C32: lengths 6, 3, 2 and packs of 4; nothing overflows or vanishes."""
    with pytest.raises(DataError, match="document 0 has 6 tokens; a pack holds at most 4"):
        pack([6, 3, 2], 4, [0, 1, 2])
    assert pack([], 4, []) == []


def test_packing_stays_near_linear() -> None:
    lengths = np.random.default_rng(0).integers(2, 2048, 100_000)
    packs = pack(lengths, 2048, np.arange(len(lengths)), PackingOptions("all"))
    assert sum(map(len, packs)) == len(lengths) and lengths.sum() / (len(packs) * 2048) > 0.98


def test_a_pack_reaches_no_further_than_its_window_and_holds_no_more_documents_than_it_may() -> None:
    """Whatever the options, nothing is lost or overfilled; a window of all is at least as tight as any other."""
    rng = random.Random(2)
    for _ in range(40):
        lengths = [rng.randint(2, 50) for _ in range(rng.randint(1, 200))]
        order = rng.sample(range(len(lengths)), len(lengths))
        place = {index: at for at, index in enumerate(order)}
        for options in (PackingOptions(7), PackingOptions("all"), PackingOptions(None, 2), PackingOptions(9, 3)):
            packs = pack(lengths, 50, order, options)
            assert sorted(index for members in packs for index in members) == list(range(len(lengths)))
            assert all(sum(lengths[index] for index in members) <= 50 for members in packs)
            assert all(len(members) <= (options.max_documents or len(lengths)) for members in packs)
            if isinstance(options.window, int):
                assert all(len({place[index] // options.window for index in members}) == 1 for members in packs)
    lengths = np.random.default_rng(0).integers(2, 100, 3000)
    sizes = [len(pack(lengths, 128, np.arange(3000), PackingOptions(window))) for window in (10, 100, 1000, "all")]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


@pytest.mark.parametrize("capacity", [1024, 2048, 8192])
@pytest.mark.parametrize("median", [250, 500])
def test_packs_of_chat_rows_are_98_percent_full(capacity: int, median: int) -> None:
    """Lengths of conversations are about lognormal: many short ones, a long tail that is cut off."""
    lengths = np.random.default_rng(1).lognormal(np.log(median), 0.8, 20_000).astype(int).clip(8, capacity)
    packs = pack(lengths, capacity, np.random.default_rng(2).permutation(20_000))
    assert lengths.sum() / (len(packs) * capacity) >= 0.98


def test_statistics_say_how_full_packs_are(tmp_path: Path) -> None:
    order = GlobalOrder(dataset_of(tmp_path, [6, 3, 4, 5]), 2, packing=True, max_seq_length=10)
    assert order.notes() == [
        "2 packs of up to 10 tokens, 90.00% full; documents in a pack: 2.0 on average, 2 at most",
    ]
    assert GlobalOrder(dataset_of(tmp_path / "b", [6, 3]), 2).notes() == []


# ---- the order


def test_file_order_without_shuffling(tmp_path: Path) -> None:
    """Global batch k is rows k·G to (k+1)·G-1; the short last one is kept unless it is dropped."""
    data = dataset_of(tmp_path, [4] * 7)
    order = GlobalOrder(data, 3, shuffle=False)
    assert [order.batch(5, k) for k in range(order.batches_per_epoch)] == [
        [[0], [1], [2]],
        [[3], [4], [5]],
        [[6]],
    ]
    dropping = GlobalOrder(data, 3, shuffle=False, drop_last=True)
    assert dropping.batches_per_epoch == 2 and dropping.batch(0, 1) == [[3], [4], [5]]
    with pytest.raises(IndexError):
        dropping.batch(0, 2)


def test_too_few_rows_for_drop_last_are_an_error_with_the_numbers(tmp_path: Path) -> None:
    """C24: never zero steps."""
    data = dataset_of(tmp_path, [4] * 3)
    with pytest.raises(DataError, match=r"3 rows make no full global batch of 4.*drop_last"):
        GlobalOrder(data, 4, drop_last=True)
    with pytest.raises(DataError, match=r"2 packs \(of 3 documents\)"):
        GlobalOrder(data, 4, drop_last=True, packing=True, max_seq_length=8)
    assert GlobalOrder(data, 4).batches_per_epoch == 1
    with pytest.raises(DataError, match="max_seq_length"):
        GlobalOrder(data, 2, packing=True)


@pytest.mark.parametrize("packing", [False, True])
def test_each_epoch_is_another_order_and_a_seed_is_the_same_order(tmp_path: Path, packing: bool) -> None:
    """C27: every row once in each epoch; epoch 1 is not epoch 0; packs stay what they are."""
    data = dataset_of(tmp_path, [2 + i % 5 for i in range(40)])

    def epoch(number: int, seed: int) -> list[list[int]]:
        order = GlobalOrder(data, 4, seed=seed, packing=packing, max_seq_length=8)
        return [unit for k in range(order.batches_per_epoch) for unit in order.batch(number, k)]

    assert epoch(0, 1) == epoch(0, 1) and epoch(0, 1) != epoch(1, 1) and epoch(0, 1) != epoch(0, 2)
    assert sorted(map(tuple, epoch(0, 1))) == sorted(map(tuple, epoch(1, 1)))
    assert sorted(index for unit in epoch(3, 1) for index in unit) == list(range(40))


def test_the_permutation_is_what_it_was() -> None:
    """A resumed run must meet the same order under any version of numpy: these numbers may never change."""
    assert permutation(8, 42, 0).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]
    assert permutation(8, 42, 1).tolist() == [1, 2, 5, 3, 6, 0, 4, 7]


# ---- the loader


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_no_world_size_or_micro_batch_changes_a_global_batch(tmp_path: Path, packing: bool, shuffle: bool) -> None:
    """Promise 1 and C24: same documents, tokens and targets in global batch k; as many micro-batches on every
    rank.
    """
    data = dataset_of(tmp_path, [2 + 3 * i % 7 for i in range(22)])
    order = GlobalOrder(data, 5, shuffle=shuffle, packing=packing, max_seq_length=9)
    for world_size in (1, 2, 3, 4):
        for size in (1, 2, 3):
            ranks = loaders(order, world_size, size)
            for step in range(2 * order.batches_per_epoch + 1):
                epoch, k = divmod(step, order.batches_per_epoch)
                want = [index for unit in order.batch(epoch, k) for index in unit]
                shares = [loader.next() for loader in ranks]
                assert len({len(share) for share in shares}) == 1
                rounds = zip(*shares, strict=True)
                assert [i for batches in rounds for b in batches for i in documents_in(b)] == want
                batches = [batch for share in shares for batch in share]
                assert sum(batch.tokens for batch in batches) == data.lengths[want].sum()
                assert sum(batch.supervised_tokens for batch in batches) == data.supervised_counts[want].sum()
                assert all(batch.supervised_tokens == (batch.shift_labels != IGNORED_LABEL).sum() for batch in batches)


@pytest.mark.parametrize(("rows", "drop_last"), [(12, False), (13, False), (13, True)])
def test_going_on_from_every_place_equals_never_having_stopped(tmp_path: Path, rows: int, drop_last: bool) -> None:
    """C67: any cut, on another world size, twice, and at the epoch's border."""
    data = dataset_of(tmp_path, [2 + i % 4 for i in range(rows)])
    order = GlobalOrder(data, 4, seed=3, drop_last=drop_last)
    steps = 3 * order.batches_per_epoch
    straight = loaders(order, 1, 1)[0]
    want = [[i for batch in straight.next() for i in documents_in(batch)] for _ in range(steps)]
    for first in range(steps):
        for second in range(first, steps, 2):
            got, state = [], None
            for world_size, until in ((1, first), (3, second), (2, steps)):
                ranks = loaders(GlobalOrder(data, 4, seed=3, drop_last=drop_last), world_size, 2)
                seen, state = global_batches(ranks, until - len(got), state)
                got += [[i for batch in batches for i in documents_in(batch)] for batches in seen]
            assert got == want


def test_the_cursor_at_an_epochs_end_is_the_next_epoch(tmp_path: Path) -> None:
    order = GlobalOrder(dataset_of(tmp_path, [4] * 6), 4)
    loader = loaders(order, 1, 4)[0]
    seen = []
    for _ in range(3):
        loader.next()
        seen.append((loader.state_dict(), loader.epoch_progress))
    assert seen == [
        ({"epoch": 0, "units": 4}, pytest.approx(4 / 6)),
        ({"epoch": 1, "units": 0}, 1.0),
        ({"epoch": 1, "units": 4}, pytest.approx(1 + 4 / 6)),
    ]
    with pytest.raises(DataError, match="unit 7 of epoch 0, but an epoch has 6 units"):
        loader.load_state_dict({"epoch": 0, "units": 7})


def test_another_global_batch_size_goes_on_at_the_same_row(tmp_path: Path) -> None:
    data = dataset_of(tmp_path, [4] * 10)
    loader = loaders(GlobalOrder(data, 4, shuffle=False), 1, 8)[0]
    loader.next()
    other = loaders(GlobalOrder(data, 3, shuffle=False), 1, 8)[0]
    other.load_state_dict(loader.state_dict())
    assert [documents_in(other.next()[0]) for _ in range(3)] == [[4, 5, 6], [7, 8, 9], [0, 1, 2]]


def test_validation_is_one_pass_whose_sums_know_no_world_size(tmp_path: Path) -> None:
    data = dataset_of(tmp_path, [2 + i % 6 for i in range(11)])
    for world_size, size, global_batch in ((1, 1, 1), (2, 3, 4), (4, 2, 8)):
        order = GlobalOrder(data, global_batch, shuffle=False)
        shares = [
            list(
                validation_batches(order, rank=rank, world_size=world_size, per_device_batch_size=size, pad_token_id=0)
            )
            for rank in range(world_size)
        ]
        batches = [batch for share in shares for part in share for batch in part]
        assert sorted(i for batch in batches for i in documents_in(batch)) == list(range(11))
        assert sum(batch.supervised_tokens for batch in batches) == data.supervised_counts.sum()


# ---- batches


def test_padding_is_known_by_length_even_if_pad_is_eos() -> None:
    """C03: the real eos keeps its label, the padding has none."""
    bos, eos = 1, 2
    batch = collate_padded([document(bos, 5, 6, eos), document(bos, 5, eos)], pad_token_id=eos)
    assert batch.input_ids.tolist() == [[bos, 5, 6, eos], [bos, 5, eos, eos]]
    assert batch.shift_labels.tolist() == [[5, 6, eos, -100], [5, eos, -100, -100]]
    assert batch["attention_mask"].tolist() == [[True] * 4, [True, True, True, False]]
    assert (batch.tokens, batch.supervised_tokens) == (7, 5)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2


def test_no_mask_without_padding() -> None:
    batch = collate_padded([document(1, 2), document(3, 4)], pad_token_id=0)
    assert batch.attention_mask is None and sorted(batch) == ["input_ids", "position_ids", "shift_labels"]


def test_targets_are_the_tokens_after() -> None:
    """C09: 7 tokens, 4 of them prompt: three targets, the answer, from position 3 on."""
    labels = shifted_labels(document(10, 11, 12, 13, 14, 15, 16, supervised=[4, 5, 6]))
    assert labels.tolist() == [-100, -100, -100, 14, 15, 16, -100]
    assert shifted_labels(document(10, 11, supervised=[0])).tolist() == [-100, -100]


def test_packed_documents_have_their_own_positions_and_no_target_across_the_border() -> None:
    """C33: (3-1) + (4-1) targets."""
    batch = collate_packed([document(1, 2, 3), document(4, 5, 6, 7)])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert batch.shift_labels.tolist() == [[2, 3, -100, 5, 6, 7, -100]]
    assert batch["document_lengths"].tolist() == [3, 4] and batch.packed
    assert batch.attention_mask is None and (batch.tokens, batch.supervised_tokens) == (7, 5)


def test_a_batch_is_a_mapping_that_declares_its_token_axes() -> None:
    batch = collate_packed([document(1, 2, 3)])
    assert {name: Batch.token_axis(name) for name in Batch.tensor_fields()} == {
        "input_ids": 1,
        "position_ids": 1,
        "shift_labels": 1,
        "attention_mask": 1,
        "document_lengths": None,
        "real": 1,
    }
    assert set(batch) == {"input_ids", "position_ids", "shift_labels", "document_lengths"} and len(batch) == 4
    with pytest.raises(KeyError):
        batch["attention_mask"]
    with pytest.raises(KeyError):
        batch["tokens"]
    moved = batch.to("meta")
    assert moved.input_ids.device.type == "meta" and moved["document_lengths"].device.type == "cpu"
    assert moved.tokens == 3 and all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_real_tokens_are_known_without_looking_at_token_ids() -> None:
    padded = collate_padded([document(1, 2, 3), document(4)], pad_token_id=4)
    assert padded.real_tokens.tolist() == [[True, True, True], [True, False, False]]
    packed = collate_packed([document(1, 2), document(3)])
    assert packed.real_tokens.tolist() == [[True] * 3]
    longer = pad_to(packed, 5)
    assert longer.real_tokens.tolist() == [[True, True, True, False, False]]
    part = take(longer, torch.tensor([0, 4, 2]))
    assert part.real_tokens.tolist() == [[True, False, True]] and part.tokens == 2
    assert not as_filler(padded).real_tokens.any()


def test_a_filler_counts_nothing_and_teaches_nothing() -> None:
    filler = as_filler(collate_padded([document(1, 2, 3)], pad_token_id=0))
    assert (filler.tokens, filler.supervised_tokens) == (0, 0)
    assert (filler.shift_labels == IGNORED_LABEL).all() and filler.input_ids.tolist() == [[1, 2, 3]]
