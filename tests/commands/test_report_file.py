"""A report that is whole at any time."""

import json
import os

import pytest

from hf_specgen.commands.report_file import ReportFile


def test_each_write_replaces_the_report_before(tmp_path):
    file = ReportFile(str(tmp_path / "new" / "folder" / "report.json"))
    for report in ({"a": 1}, {"a": 1, "b": [2]}):
        file.write(report)
        assert json.loads(file.path.read_text()) == report
    assert os.listdir(file.path.parent) == ["report.json"]
    ReportFile(None).write({"a": 1})


def test_a_report_that_cannot_be_written_leaves_the_one_before(tmp_path):
    file = ReportFile(str(tmp_path / "report.json"))
    file.write({"a": 1})
    with pytest.raises(TypeError):
        file.write({"a": object()})
    assert json.loads(file.path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_link_and_a_device_stay_what_they_are(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "report.json")
    ReportFile(str(tmp_path / "link")).write({"a": 1})
    assert (tmp_path / "link").is_symlink() and json.loads((tmp_path / "report.json").read_text()) == {"a": 1}
    read_end, write_end = os.pipe()
    ReportFile(f"/dev/fd/{write_end}").write({"a": 1})
    os.close(write_end)
    with os.fdopen(read_end) as reader:
        assert json.load(reader) == {"a": 1}


def test_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    ReportFile("~/report.json").write({})
    assert (tmp_path / "report.json").exists()
