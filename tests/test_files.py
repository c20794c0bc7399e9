"""Where data lie, and files written in one step."""

import pytest

from lowgrad_utils import files


def test_data_inside_the_package_come_first(tmp_path, monkeypatch):
    package = tmp_path / "package"
    monkeypatch.setattr(files, "_PACKAGE", package)
    assert files.data_folder("grids") == tmp_path / "data" / "grids"
    (package / "data").mkdir(parents=True)
    assert files.data_folder("grids") == package / "data" / "grids"


def test_what_a_notebook_left_out_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PACKAGE", tmp_path)
    (tmp_path / "data" / "grids").mkdir(parents=True)
    # Elsewhere a missing file is a damaged installation, which its reader tells.
    path = files.data_folder("grids", "a.csv")
    assert files.shipped(path) == path
    (tmp_path / "data" / "CARRIED").touch()
    with pytest.raises(FileNotFoundError, match=r"^a\.csv is not here: this notebook carries only"):
        files.shipped(path)
    path.touch()
    assert files.shipped(path) == path


def test_a_file_is_written_whole_and_nothing_lies_beside_it(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(b"a much longer older content")
    files.write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interruption_leaves_the_old_file(tmp_path, monkeypatch, error):
    path = tmp_path / "table.csv"
    path.write_bytes(b"old")

    def fail(handle):
        raise error

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(type(error)):
        files.write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
