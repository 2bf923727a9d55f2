"""Files: what is damaged is reported in one sentence, and renames are written through."""

import os

import numpy as np

from perfedrl.errors import UserError
from perfedrl.experiments.files import npz, read_npz, write_atomically


def test_no_flipped_bit_and_no_cut_of_an_npz_file_raises_anything_but_a_sentence(tmp_path):
    path, whole = tmp_path / "x.npz", npz({"a": np.arange(3.0), "b": np.arange(2)})
    cut = [whole[:i] for i in range(0, len(whole), 5)]
    flipped = [
        whole[:i] + bytes([whole[i] ^ bit]) + whole[i + 1 :] for i in range(0, len(whole)) for bit in (1, 16, 128)
    ]
    reported = set()
    for content in (*cut, *flipped):
        path.write_bytes(content)
        try:
            read_npz(path, dict)
        except UserError as error:
            reported.add(str(error))
    assert reported == {f"{path} is damaged; train its config again with --restart"}


def test_the_folder_is_written_through_after_the_new_name_is_there(tmp_path, monkeypatch):
    path, seen = tmp_path / "f", []

    def fsync(handle):
        seen.append((os.path.isdir(f"/dev/fd/{handle}"), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(path, b"x")
    assert seen == [(False, False), (True, True)]
