import json

import pandas as pd
import pytest

from lowgrad_utils import hessian
from lowgrad_utils.experiments import hessian_sweep

TINY = [
    *("--datasets", "mnist", "--networks", "vgg11", "--sizes", "10", "--rates", "0.03", "0.1"),
    *("--width", "0.02", "--size", "8", "--epochs", "2"),
]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def refused(capsys, *words):
    with pytest.raises(SystemExit) as error:
        hessian.main([str(word) for word in words])
    assert error.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_trains_goes_on_and_measures(tmp_path, monkeypatch, capsys):
    log, trained, real = tmp_path / "rows.jsonl", [], hessian_sweep.train

    def train(**cell):
        trained.append(cell["learning_rate"])
        if len(trained) == 2:
            raise KeyboardInterrupt
        return real(**cell)

    monkeypatch.setattr(hessian_sweep, "train", train)
    words = ["train", *TINY, "--log", str(log)]
    with pytest.raises(KeyboardInterrupt):
        hessian.main(words)
    assert len(rows(log)) == 1
    hessian.main(words)
    # The finished one is not trained again.
    assert trained == [0.03, 0.1, 0.1] and len(rows(log)) == 2
    assert "2 rows in" in capsys.readouterr().out
    # One more rate, into the same file.
    hessian.main([*words, "--rates", "0.01"])
    assert len(rows(log)) == 3 and len(trained) == 4

    measure = ["measure", "--log", str(log)]
    hessian.main(measure)
    spectra = pd.read_csv(tmp_path / "rows.spectra.csv")
    assert len(pd.read_csv(tmp_path / "rows.jsonl.csv")) == 1
    trainings = hessian.finished(log)
    assert list(spectra.test_error) == [trainings.test_error.min()]
    # Eigenvalues are computed to 1e-4 of themselves.
    assert (spectra["G1+2_1"] <= spectra.G_1 * (1 + 1e-4)).all()
    before = len(trained)
    hessian.main(measure)
    assert len(trained) == before


def test_a_failed_training_is_named_and_tried_again(tmp_path, monkeypatch, capsys):
    log, real = tmp_path / "rows.jsonl", hessian_sweep.train
    monkeypatch.setattr(hessian_sweep, "train", lambda **cell: 1 / 0)
    words = ["train", *TINY, "--log", str(log)]
    hessian.main(words)
    assert "2 failed; the first: ZeroDivisionError" in capsys.readouterr().out
    assert "no finished training" in refused(capsys, "measure", "--log", log)
    monkeypatch.setattr(hessian_sweep, "train", real)
    hessian.main(words)
    assert " failed" not in capsys.readouterr().out
    assert len(hessian.finished(log)) == 2


def test_bad_words_give_one_line(tmp_path, capsys):
    log = ["--log", tmp_path / "rows.jsonl"]
    assert "network is 'vgg16'" in refused(capsys, "train", "--networks", "vgg16", *log)
    assert "dataset is 'svhn'" in refused(capsys, "train", "--datasets", "svhn", *log)
    line = refused(capsys, "train", "--datasets", "mnist", "--sizes", "5000", *log)
    assert "702 images" in line and "--source full" in line
    assert "workers is 0" in refused(capsys, "train", *TINY, "--workers", "0", *log)
    assert "width is -1" in refused(capsys, "train", "--sizes", "10", "--width", "-1", *log)


def test_logs_that_are_none_give_one_line(tmp_path, capsys):
    missing, other = tmp_path / "none.jsonl", tmp_path / "other.jsonl"
    assert "cannot be read" in refused(capsys, "measure", "--log", missing)
    other.write_text("a,b\n1,2\n")
    assert "is not a log" in refused(capsys, "measure", "--log", other)
    other.write_text("")
    assert "is not a log" in refused(capsys, "measure", "--log", other)
    other.write_text('{"sweep": "another", "code": "", "parameters": []}\n')
    assert "is not a log" in refused(capsys, "measure", "--log", other)


def test_a_torn_last_line_is_passed_over(tmp_path):
    log = tmp_path / "rows.jsonl"
    hessian.main(["train", *TINY, "--log", str(log)])
    with open(log, "a") as file:
        file.write('{"parameters": {"dataset": "mn')
    assert len(hessian.finished(log)) == 2
