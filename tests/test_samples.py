"""The files that an evaluation keeps its samples in, over interruptions."""

import pyarrow.parquet as pq
import pytest

from dc_trl.evaluation.samples import Sample, SampleStore


SETTINGS = {"model": "m", "temperature": 0.7, "seed": 0}


def make_sample(problem, number, **overrides):
    values = {
        "seed": 7,
        "completion": "\\boxed{1}\0 é",
        "tokens": 3,
        "truncated": False,
        "answer": "1",
        "correct": True,
    }
    return Sample(problem, number, **values | overrides)


def rows_on_disk(folder):
    return [
        tuple(row.values()) for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()
    ]


def test_samples_come_back_as_they_were(tmp_path):
    samples = [make_sample("a", 0), make_sample("a", 1, answer=None, correct=False), make_sample("b", 0, correct=None)]
    store = SampleStore(tmp_path / "new" / "store", SETTINGS)
    store.add(samples[:2])
    store.add([])
    store.add(samples[2:])
    assert rows_on_disk(store.folder) == samples  # each is on disk once `add` returns
    store.close()
    again = SampleStore(store.folder, SETTINGS)
    assert again.samples == {(sample.id, sample.sample): sample for sample in samples}
    again.close()


def test_many_small_files_become_few(tmp_path):
    store = SampleStore(tmp_path, SETTINGS)
    samples = [make_sample("a", number) for number in range(150)]
    for sample in samples:
        store.add([sample])
    assert len(list(tmp_path.glob("*.parquet"))) < 70
    store.close()
    assert len(list(tmp_path.glob("*.parquet"))) <= 3
    assert sorted(rows_on_disk(tmp_path)) == sorted(samples)
    SampleStore(tmp_path, SETTINGS).close()


def test_a_kill_between_a_merged_file_and_its_parts_loses_and_doubles_nothing(tmp_path):
    store = SampleStore(tmp_path, SETTINGS)
    samples = [make_sample("a", number) for number in range(3)]
    for sample in samples:
        store.add([sample])
    parts = {file.name: file.read_bytes() for file in tmp_path.glob("part-*")}
    store.close()
    for name, content in parts.items():  # as if the process had died before it removed them
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".part-000009.parquet.tmp").write_bytes(b"half a file")
    again = SampleStore(tmp_path, SETTINGS)
    assert sorted(again.samples.values()) == samples
    again.add([make_sample("a", 3)])
    again.close()
    assert len(SampleStore(tmp_path, SETTINGS).samples) == 4
    assert not list(tmp_path.glob(".*"))


def test_two_evaluations_do_not_write_into_one_folder(tmp_path):
    store = SampleStore(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match="is in use by another evaluation: choose another output directory"):
        SampleStore(tmp_path, SETTINGS)
    store.close()
    SampleStore(tmp_path, SETTINGS).close()
