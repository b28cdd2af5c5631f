"""The corpus, its split, and the order of batches."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import data
from models.errors import InputError

PERMUTED_8_1 = [0, 6, 4, 7, 3, 1, 5, 2]
DOCUMENTS = st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=12).filter(
    lambda d: sum(map(len, d)) >= 2
)


def pieces_of(documents):
    size = max(1, min(data.PIECE_BYTES, sum(map(len, documents)) // 40))
    return [d[i : i + size] for d in documents for i in range(0, len(d), size)]


@settings(deadline=None)
@given(DOCUMENTS)
def test_the_split_keeps_every_byte_once_and_no_piece_on_both_sides(documents):
    train, held_out = data.split(documents)
    pieces = pieces_of(documents)
    # Walk the documents, taking each piece from the side that holds it next.
    sides, cursors = (train.tobytes(), held_out.tobytes()), [0, 0]
    where: dict[bytes, set[int]] = {}

    def place(i):
        if i == len(pieces):
            return cursors == [len(side) for side in sides]
        for side in (0, 1):
            if where.get(pieces[i], {side}) != {side} or not sides[side].startswith(pieces[i], cursors[side]):
                continue
            known = pieces[i] in where
            where.setdefault(pieces[i], {side})
            cursors[side] += len(pieces[i])
            if place(i + 1):
                return True
            cursors[side] -= len(pieces[i])
            if not known:
                del where[pieces[i]]
        return False

    assert place(0)
    assert len(train) + len(held_out) == sum(map(len, documents))
    assert len(train) > 0
    assert len(held_out) > 0 or len(set(pieces)) == 1


def test_the_split_sends_copies_of_a_document_to_one_side():
    documents = [hashlib.sha256(bytes([i])).digest() * 20 for i in range(50)]
    train, held_out = data.split(documents + documents)
    held = {d for d in documents if d[:10] in held_out.tobytes()}
    assert held
    assert all(d[:10] not in train.tobytes() for d in held)


def test_the_split_holds_out_about_the_fraction_asked_for():
    text = np.random.default_rng(0).integers(0, 256, 1_000_000, np.uint8).tobytes()
    train, held_out = data.split([text])
    assert 0.05 <= len(held_out) / (len(train) + len(held_out)) <= 0.1


@settings(deadline=None)
@given(n=st.integers(1, 2000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(n, key):
    assert sorted(data.permute(np.arange(n), n, key)) == list(range(n))


def test_permute_is_the_same_on_every_machine():
    assert data.permute(np.arange(8), 8, 1).tolist() == PERMUTED_8_1
    assert data.permute(np.arange(8), 8, 2).tolist() != PERMUTED_8_1


@settings(deadline=None)
@given(
    size=st.integers(9, 400),
    batch=st.integers(1, 7),
    seq=st.integers(1, 8),
    seed=st.integers(0, 99),
    index=st.integers(0, 50),
)
def test_a_batch_is_a_pure_function_of_seed_and_index(size, batch, seq, seed, index):
    tokens = np.arange(size, dtype=np.int64).astype(np.uint8)
    first, second = (data.Batches(tokens, batch, seq, seed) for _ in range(2))
    for i in range(3):
        first[i]  # a batch must not depend on those made before
    np.testing.assert_array_equal(first[index], second[index])
    assert first[index].shape == (batch, seq + 1)
    assert first[index].dtype == np.int32
    # Windows are runs of the text.
    np.testing.assert_array_equal(np.diff(first[index]) % 256, 1)


@settings(deadline=None)
@given(size=st.integers(10, 250), batch=st.integers(1, 5), seq=st.integers(1, 4), seed=st.integers(0, 99))
def test_an_epoch_visits_every_window_once(size, batch, seq, seed):
    batches = data.Batches(np.arange(size, dtype=np.uint8), batch, seq, seed)
    n = batches.num_windows
    starts = np.concatenate([batches[i][:, 0] for i in range(-(-2 * n // batch))])
    for epoch in (starts[:n], starts[n : 2 * n]):
        assert sorted(np.diff(np.sort(epoch)).tolist()) == [seq] * (n - 1)


def test_seeds_and_epochs_differ():
    tokens = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    a, b = data.Batches(tokens, 8, 16, seed=0), data.Batches(tokens, 8, 16, seed=1)
    assert not np.array_equal(a[0], b[0])
    assert not np.array_equal(a[0], a[-(-a.num_windows // 8)])


def test_held_out_windows_share_no_target():
    tokens = np.arange(200, dtype=np.uint8)
    windows = data.held_out_windows(tokens, batch=3, seq=10, num_batches=4)
    assert windows.shape == (4, 3, 11)
    targets = windows[..., 1:].ravel()
    assert len(set(targets.tolist())) == targets.size


def test_held_out_windows_of_little_text_make_a_smaller_batch():
    assert data.held_out_windows(np.zeros(25, np.uint8), batch=8, seq=10, num_batches=4).shape == (1, 2, 11)


def test_the_byte_frequency_loss_is_the_entropy_of_the_targets():
    windows = np.array([[[9, 0, 0, 1, 1], [9, 2, 2, 3, 3]]])
    assert data.byte_frequency_loss(windows) == pytest.approx(np.log(4))
    assert data.bits(data.byte_frequency_loss(windows)) == pytest.approx(2.0)


def test_the_default_corpus_is_the_standard_library():
    corpus = data.load(max_bytes=200_000)
    assert corpus.truncated
    assert corpus.nbytes == 200_000
    assert corpus.sha256 == data.load(max_bytes=200_000).sha256
    assert b"import" in corpus.train.tobytes()


def test_a_folder_gives_its_text_files_sorted_at_any_depth(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.txt").write_bytes(b"h" * 100)
    (tmp_path / "b" / "z.txt").write_bytes(b"z" * 100)
    (tmp_path / "a.txt").write_bytes(b"a" * 100)
    (tmp_path / "image.bin").write_bytes(b"\0\1\2" * 100)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    corpus = data.load([tmp_path])
    assert corpus.num_files == 2
    assert set((corpus.train.tobytes() + corpus.held_out.tobytes()).decode()) == {"a", "z"}


def test_a_file_asked_for_by_name_may_hold_any_bytes(tmp_path: Path):
    (tmp_path / "image.bin").write_bytes(bytes(range(256)) * 10)
    assert data.load([tmp_path / "image.bin"]).nbytes == 2560


def test_what_is_no_text_or_cannot_be_read_is_said(tmp_path: Path, monkeypatch):
    (tmp_path / "image.bin").write_bytes(bytes(range(256)) * 10)
    for name in "abcd":
        (tmp_path / name).write_bytes(b"text\0text")
    (tmp_path / "good").write_text("good text")
    (named,) = data.load([tmp_path / "image.bin"]).notes
    assert named == f"{tmp_path}/image.bin looks like no text: it has a zero byte. Its bytes are trained on."
    (note,) = data.load([tmp_path]).notes
    assert (
        note == f"{tmp_path}/a (no text), {tmp_path}/b (no text), {tmp_path}/c (no text) and 2 more left out."
    )
    assert data.load([tmp_path / "good"]).notes == ()
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "a").write_bytes(b"\0")
    with pytest.raises(InputError, match=r"a \(no text\) left out. Of a folder, text files at any depth"):
        data.load([tmp_path / "only"])

    def scan_refused(folder):  # a folder that this user may not read, also where the user is root
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(data.os, "scandir", scan_refused)
    with pytest.raises(InputError, match=r"can be read, got .*: Permission denied"):
        data.load([tmp_path])


def test_pipes_devices_and_no_name_are_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(InputError, match="a pipe or a device"):
            data.load([path])
    with pytest.raises(InputError, match="got ''"):
        data.load([""])


def test_another_text_has_another_hash(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"ab" * 500 + b"c")
    (tmp_path / "b").write_bytes(b"ab" * 500 + b"d")
    assert data.load([tmp_path / "a"]).sha256 != data.load([tmp_path / "b"]).sha256


def test_missing_and_empty_data_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"files and folders that exist, got .*nowhere"):
        data.load([tmp_path / "nowhere"])
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match="at least one byte"):
        data.load([tmp_path / "empty"])
    with pytest.raises(InputError, match="at least one byte"):
        data.load([tmp_path])


def test_a_sequence_longer_than_the_data_is_refused():
    with pytest.raises(InputError, match="sequence of 100 needs 101 bytes, got 50"):
        data.Batches(np.zeros(50, np.uint8), 1, 100, 0)
    with pytest.raises(InputError, match="sequence of 100 needs 101 held-out bytes, got 50"):
        data.held_out_windows(np.zeros(50, np.uint8), batch=1, seq=100, num_batches=1)
