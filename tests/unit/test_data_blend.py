"""Several sources in one deterministic order: shares, packs, resuming, reports, and what is refused."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtune.config import from_mapping
from meshtune.data.blend import Blend, BlendedUnits, Joined
from meshtune.data.dataset import TokenDataset
from meshtune.data.opening import Opening
from meshtune.data.order import GlobalOrder
from meshtune.data.section import DataSection
from meshtune.errors import DataError, RecipeError
from tests.unit import data_tokenizers as kit
from tests.unit.data_ranks import global_batches, loaders, write_rows
from tests.unit.test_data_loader import dataset_of, documents_in
from tests.unit.token_file_writers import write_megatron

Counts = list[dict[int, int]]


def blend_of(folder: Path, sizes: list[list[int]], weights: list[float]) -> Blend:
    """Sources of documents of the given lengths."""
    return Blend([dataset_of(folder / str(n), lengths) for n, lengths in enumerate(sizes)], weights)


def epoch_of(order: GlobalOrder, epoch: int) -> list[list[int]]:
    return [unit for k in range(order.batches_per_epoch) for unit in order.batch(epoch, k)]


# ---- shares


def test_an_epoch_holds_the_shares_that_the_weights_say(tmp_path: Path) -> None:
    """As many units as all sources together; 3 : 1 of 40 + 60 rows are 75 and 25."""
    order = GlobalOrder(blend_of(tmp_path, [[4] * 40, [4] * 60], [3, 1]), 10)
    assert order.units == 100
    for epoch in range(4):
        assert Counter(unit[0] for unit in epoch_of(order, epoch)) == {0: 75, 1: 25}


def test_any_stretch_holds_the_shares_too(tmp_path: Path) -> None:
    """Else a run of a fraction of an epoch would have learnt something else than was asked for."""
    weights = [0.5, 0.3, 0.15, 0.05]
    order = GlobalOrder(blend_of(tmp_path, [[4] * 50] * 4, weights), 8)
    seen = [unit[0] for unit in epoch_of(order, 0)]
    for start in range(0, 200, 7):
        for stop in range(start, 201, 13):
            for source, weight in enumerate(weights):
                assert abs(seen[start:stop].count(source) - weight * (stop - start)) <= 2


def test_each_source_walks_through_its_own_epochs_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Every row of a source once before any a second time, in another order the second time; nothing is always left out."""
    order = GlobalOrder(blend_of(tmp_path, [[4] * 10, [4] * 90], [1, 1]), 10, seed=5)
    rows: dict[int, list[int]] = {0: [], 1: []}
    for epoch in range(9):
        for source, row in epoch_of(order, epoch):
            rows[source].append(row)
    for source, size in ((0, 10), (1, 90)):
        passes = [rows[source][at : at + size] for at in range(0, len(rows[source]), size)]
        assert all(sorted(one) == list(range(size)) for one in passes if len(one) == size)
        assert passes[0] != passes[1]


def test_sources_of_one_size_are_not_shuffled_alike(tmp_path: Path) -> None:
    units = epoch_of(GlobalOrder(blend_of(tmp_path, [[4] * 20] * 2, [1, 1]), 4, seed=5), 0)
    assert [row for source, row in units if source == 0] != [row for source, row in units if source == 1]


def test_a_pack_is_of_one_source_so_that_shares_are_of_tokens(tmp_path: Path) -> None:
    """Short rows and long ones: with equal weights each gives half of the tokens."""
    blend = blend_of(tmp_path, [[2] * 400, [10] * 100], [1, 1])
    order = GlobalOrder(blend, 4, packing=True, max_seq_length=20)
    tokens: Counter[int] = Counter()
    for unit in epoch_of(order, 0):
        tokens[unit[0]] += sum(len(document[0]) for document in order.documents(unit))
    assert tokens[0] == pytest.approx(tokens[1], rel=0.02)


def test_a_weight_that_gives_no_unit_is_an_error(tmp_path: Path) -> None:
    """Not a source that is silently never read."""
    with pytest.raises(DataError, match=r"its weight is 0\.001 of all, less than one of the 8 units of an epoch"):
        GlobalOrder(blend_of(tmp_path, [[4] * 4] * 2, [0.999, 0.001]), 2)


def test_quotas_are_whole_and_add_up() -> None:
    class Fixed:
        def __init__(self, count: int) -> None:
            self.count = count

        def __len__(self) -> int:
            return self.count

    bits = np.random.default_rng(0)
    for _ in range(200):
        counts = bits.integers(1, 50, bits.integers(1, 6)).tolist()
        shares = bits.random(len(counts)) + 0.1
        shares = (shares / shares.sum()).tolist()
        if min(shares) * sum(counts) < 1:
            continue
        units = BlendedUnits([Fixed(count) for count in counts], shares, [""] * len(counts))  # type: ignore[arg-type]
        assert sum(units._quotas) == sum(counts) == len(units)
        assert all(abs(q - s * sum(counts)) < 1 for q, s in zip(units._quotas, shares, strict=True))


@pytest.mark.parametrize("packing", [False, True])
def test_the_order_knows_no_world_size_and_goes_on_from_a_cursor(tmp_path: Path, packing: bool) -> None:
    """Promises 1 and 6 for blends, over an epoch's border, on another number of ranks each time."""
    blend = blend_of(tmp_path, [[2 + i % 5 for i in range(13)], [3 + i % 4 for i in range(8)]], [1, 2])

    def course(world_size: int, steps: int, cursor: Any = None) -> tuple[list[list[int]], Any]:
        order = GlobalOrder(blend, 4, seed=3, packing=packing, max_seq_length=9)
        seen, cursor = global_batches(loaders(order, world_size), steps, cursor)
        return [[i for batch in batches for i in documents_in(batch)] for batches in seen], cursor

    straight, _ = course(1, 14)
    assert straight == course(3, 14)[0]
    for stop in range(1, 14):
        before, cursor = course(2, stop)
        assert before + course(1, 14 - stop, cursor)[0] == straight


# ---- from the recipe


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(name: str, *rows: Any) -> str:
        return write_rows(tmp_path / name, rows)

    return written


def opening(tmp_path: Path, **data: Any) -> Opening:
    section = from_mapping(DataSection, data)
    return Opening(section, kit.words(), 16, 60, tmp_path / "cache")


def texts(count: int, word: str = "hi") -> list[dict[str, str]]:
    return [{"text": f"{word} " * (2 + i % 4)} for i in range(count)]


def test_a_recipe_names_sources_with_weights(tmp_path: Path, write: Any) -> None:
    """Each with its own columns and format; the report says what an epoch takes of each."""
    a, b = write("a.jsonl", *texts(6)), write("b.jsonl", *({"body": row["text"]} for row in texts(18, "ok")))
    sources = [{"path": a, "weight": 1.0}, {"path": b, "weight": 1.0, "columns": {"text": "body"}}]
    blend = opening(tmp_path, train_path=sources).training()
    assert isinstance(blend, Blend) and len(blend) == 24
    order = GlobalOrder(blend, 4)
    assert Counter(unit[0] for unit in epoch_of(order, 0)) == {0: 12, 1: 12}
    assert blend.report.rows_used == 24 and [part["rows_used"] for part in blend.report.as_dict()["parts"]] == [6, 18]
    assert any(line.startswith("weight 50.00%: ") and "b.jsonl" in line for line in blend.report.summary())
    assert f"{a}: 50.00% of an epoch, 12 units, 2.00 of its 6" in order.notes()


def test_other_weights_are_other_data(tmp_path: Path, write: Any) -> None:
    """A resumed run would meet rows twice, or never."""
    paths = [write("a.jsonl", *texts(6)), write("b.jsonl", *texts(6, "ok"))]

    def fingerprint(*weights: float) -> str:
        sources = [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]
        return opening(tmp_path, train_path=sources).training().fingerprint

    assert fingerprint(1, 1) == fingerprint(2, 2) != fingerprint(1, 2)


def test_without_weights_sources_stand_one_behind_the_other(tmp_path: Path, write: Any) -> None:
    """A list of paths stays what it was; an item that says more of itself makes no other order."""
    a, b = write("a.jsonl", *texts(5)), write("b.jsonl", *texts(3, "ok"))
    plain = opening(tmp_path, train_path=[a, b]).training()
    joined = opening(tmp_path, train_path=[a, {"path": b, "format": "text"}]).training()
    assert isinstance(plain, TokenDataset) and isinstance(joined, Joined)
    assert [joined[i][0].tolist() for i in range(8)] == [plain[i][0].tolist() for i in range(8)]
    assert joined.report.rows_used == 8
    orders = [GlobalOrder(data, 4, packing=True, max_seq_length=16) for data in (plain, joined)]
    assert epoch_of(orders[0], 1) == epoch_of(orders[1], 1)


def test_token_files_and_rows_blend(tmp_path: Path, write: Any) -> None:
    rows = write("a.jsonl", *texts(6))
    tokens = write_megatron(tmp_path / "b.bin", [list(range(1, 40))] * 4)
    sources = [{"path": rows, "weight": 1}, {"path": tokens, "weight": 3}]
    order = GlobalOrder(opening(tmp_path, train_path=sources).training(), 4, packing=True, max_seq_length=16)
    found = epoch_of(order, 0)
    shares = Counter(unit[0] for unit in found)
    assert shares[1] == pytest.approx(0.75 * len(found), abs=1)
    assert all(len(order.documents(unit)[0][0]) > 1 for unit in found)
    with pytest.raises(DataError, match="some sources hold tokens, others rows"):
        opening(tmp_path, train_path=[{"path": rows}, tokens]).training()
    with pytest.raises(DataError, match=r"b\.bin holds tokens, .*a\.jsonl rows"):
        opening(tmp_path, train_path=[rows, tokens]).training()


def test_what_is_wrong_with_a_source_is_said_at_its_place(tmp_path: Path, write: Any) -> None:
    a = write("a.jsonl", *texts(2))
    cases: list[tuple[list[Any], str]] = [
        ([{"path": a, "weight": 1}, a], "train_path[1]: has no weight, but another source has one"),
        (
            [{"path": a, "weight": 0}, {"path": a, "weight": 1}],
            "train_path[0].weight: found 0; wanted a value greater than 0",
        ),
        ([{"path": a, "split": "train"}], "train_path[0].split: has no effect"),
        ([{"path": a, "wait": 1}], "train_path[0].wait"),
        ([{"weight": 1}], "train_path[0].path: required"),
        ([{"path": a, "format": "text", "columns": {"txt": "x"}}], "train_path[0].columns: names 'txt'"),
        ([{"path": f"{a}.bin", "format": "text"}], "train_path[0].format: has no effect"),
    ]
    for paths, message in cases:
        with pytest.raises(RecipeError, match=re.escape(message)):
            from_mapping(DataSection, {"train_path": paths})


def test_options_of_packing_have_an_effect_or_are_refused(tmp_path: Path, write: Any) -> None:
    rows, tokens = write("a.jsonl", *texts(2)), write_megatron(tmp_path / "b.bin", [[1, 2, 3]])
    for key, value in (("packing_window", "all"), ("packing_window", 100), ("max_documents_per_pack", 4)):
        section = from_mapping(DataSection, {"train_path": rows, "packing": True, key: value})
        assert value in (section.packing_options.window, section.packing_options.max_documents)
        with pytest.raises(RecipeError, match=f"{key}: has no effect without `packing: true`"):
            from_mapping(DataSection, {"train_path": rows, key: value})
        with pytest.raises(RecipeError, match=f"{key}: has no effect on .*b.bin"):
            from_mapping(DataSection, {"train_path": tokens, "packing": True, key: value})


def test_units_are_named_as_a_user_finds_them(tmp_path: Path, write: Any) -> None:
    """What a skipped step was trained on: rows by number, sequences by epoch, both behind the name of their source."""
    rows, tokens = write("a.jsonl", *texts(2)), write_megatron(tmp_path / "b.bin", [[1, 2, 3, 4], [5, 6]])
    order = GlobalOrder(opening(tmp_path, train_path=rows).training(), 2, shuffle=False)
    assert [order.names(unit) for unit in order.batch(0, 0)] == [[0], [1]]
    sources = [{"path": path, "weight": 1} for path in (rows, tokens)]
    blended = GlobalOrder(opening(tmp_path, train_path=sources).training(), 2, shuffle=False)
    assert [blended.names(unit) for unit in blended.batch(0, 0)] == [
        [f"{rows}: 0"],
        [f"{tokens}: sequence 0 of epoch 0"],
    ]


def test_a_preview_shows_each_source(tmp_path: Path, write: Any) -> None:
    sources = [{"path": write(f"{n}.jsonl", *texts(3)), "weight": 1} for n in "ab"]
    lines = opening(tmp_path, train_path=sources).preview()
    assert [sum(f"{n}.jsonl" in line for line in lines) for n in "ab"] == [1, 1]
