"""The file that an evaluation keeps its samples in, over interruptions."""

import json

from dc_trl.evaluation.samples import Sample, SampleStore

from .helpers import refuses


SETTINGS = {"model": "m", "temperature": 0.7, "seed": 0}


def make_sample(problem, number, answer="1", correct=True):
    return Sample(problem, number, 7, "\\boxed{1}\0 é\u2028\ud800", 3, False, answer, correct)


def test_samples_come_back_as_they_were_without_one_that_was_cut_short(tmp_path):
    samples = [make_sample("a", 0), make_sample("a", 1, None, False), make_sample("b", 0, correct=None)]
    store = SampleStore(tmp_path / "new" / "store", SETTINGS)
    file = store.folder / "samples.jsonl"
    for written, sample in enumerate(samples):
        store.add(sample)
        lines = file.read_text().splitlines()
        assert [tuple(json.loads(line).values()) for line in lines] == samples[: written + 1]
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:40])
    again = SampleStore(store.folder, SETTINGS)
    assert list(again.samples.values()) == samples
    again.add(make_sample("c", 0))
    assert len(SampleStore(store.folder, SETTINGS).samples) == 4


def test_blank_lines_are_passed_over_and_others_are_refused_by_file_and_line(tmp_path):
    store = SampleStore(tmp_path, SETTINGS)
    store.add(make_sample("a", 0))
    file = tmp_path / "samples.jsonl"
    for lines in ("\n", " \n\n"):
        file.write_text(file.read_text() + lines)
        assert list(SampleStore(tmp_path, SETTINGS).samples) == [("a", 0)]
    for line in ("{oops", "[1]", '{"id": "b"}', "7"):
        file.write_text(f"\n{line}\n")
        with refuses(ValueError, file, "line 2", "remove"):
            SampleStore(tmp_path, SETTINGS)
