from __future__ import annotations

from pathlib import Path

import pytest

from la_export.bench.speed.record import SpeedRecord, read_record
from la_runtime.errors import UsageError
from tests.la_export.bench.speed.records import make_record


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    record = make_record()
    path = tmp_path / "result.json"
    path.write_text(record.model_dump_json())

    assert read_record(path) == record


@pytest.mark.parametrize("text", ["", "{}", '{"version": "1.0"}'])
def test_what_is_no_record_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)

    with pytest.raises(UsageError, match=r"result\.json is no result of 'la-export bench'"):
        read_record(path)


def test_an_unknown_key_is_refused() -> None:
    raw = make_record().model_dump(mode="json") | {"more": 1}

    with pytest.raises(ValueError, match="more"):
        SpeedRecord.model_validate(raw)


def test_ways_are_named_apart() -> None:
    (bundle,) = make_record().bundles

    names = [run.name for run in bundle.decoding]
    assert names == ["plain", "k=2 root-only"]
