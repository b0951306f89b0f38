import json
import re
import resource
import signal
from contextlib import contextmanager

import pytest
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from tests.support.completions import completed, failed
from trainers.completion_log import CompletionLog

SURROGATES = "a \udc80 and \ud83d, alone"
NAME = "eval_step_00000003.jsonl"


@pytest.fixture
def said():
    """What was said, by its subject."""
    return {}


@pytest.fixture
def log(tmp_path, said):
    def say_once(subject, sentence):
        said.setdefault(subject, sentence)

    return CompletionLog(tmp_path / "texts", num_shown=2, say_once=say_once)


def files(log):
    return sorted(path.name for path in log.output_dir.iterdir()) if log.output_dir.exists() else []


def lines(log, name=NAME):
    return [json.loads(line) for line in (log.output_dir / name).read_text(encoding="utf-8").splitlines()]


@contextmanager
def largest_file(num_bytes):
    """A disk that is full after so many bytes of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


# The file


def test_a_line_for_each_text(log, said):
    log.save("eval", 3, [completed("ja", 1, (5, 6)), failed(0)], [None, {"right": "ja"}])
    assert files(log) == [NAME]
    first, second = lines(log)
    assert first == {
        "step": 3,
        "index": 1,
        "sample": 0,
        "prompt": "prompt",
        "completion": "ja",
        "finish_reason": "eos",
        "num_tokens": 2,
        "reference": {"right": "ja"},
    }
    assert second["error"] == "out of memory" and second["reference"] is None
    log.save("eval", 3, [completed("nein")], None)
    assert [(line["completion"], "reference" in line) for line in lines(log)] == [("nein", False)]
    assert not said


def test_lone_surrogates_are_escaped_and_come_back(log, said):
    log.save("eval", 3, [completed(SURROGATES)], [SURROGATES])
    (line,) = lines(log)
    assert line["completion"] == line["reference"] == SURROGATES
    assert not said


def test_a_full_disk_leaves_no_half_file_and_is_said_with_the_path(log, said):
    texts = [completed("x" * 50, index) for index in range(40)]
    with largest_file(1000):
        log.save("eval", 3, texts, None)
    assert files(log) == []
    assert re.search(rf"cannot be saved in '.*{NAME}': .*File too large.*training goes on", said["file"])
    log.save("eval", 3, texts[:2], None)
    with largest_file(1000):
        log.save("eval", 3, texts, None)
    assert len(lines(log)) == 2, "what was there stays whole"
    assert files(log) == [NAME]
    log.save("eval", 3, texts, None)
    assert len(lines(log)) == 40, "the next one is saved when there is room again"


def test_a_folder_that_cannot_be_made(tmp_path, log, said):
    (tmp_path / "texts").write_text("a file in its place")
    with pytest.raises(ValueError, match=r"cannot be saved in '.*/texts': .*Give another `output_dir`"):
        log.check(None)
    log.save("eval", 3, [completed("a")], None)
    assert re.search(rf"texts/{NAME}", said["file"])


def test_references_that_json_cannot_hold(log, said):
    circular = []
    circular.append(circular)
    for reference in ({("a", 1): "tuples are no keys"}, circular):
        with pytest.raises(ValueError, match="`references` cannot be saved as JSON"):
            log.check([reference])
        log.save("eval", 3, [completed("a")], [reference])
        assert files(log) == [] and "cannot be saved" in said.pop("file")
    log.check([object(), 5, None, SURROGATES])
    assert files(log) == [], "the check leaves nothing behind"


# The terminal and the trackers


def test_a_table_on_the_terminal(log, said, capsys):
    log.show("eval", 3, [completed("[b]bold"), completed("second", 1), completed("third", 2)], ["[r]", "s", "t"], [])
    printed = capsys.readouterr().out
    assert "eval, step 3" in printed and "[b]bold" in printed and "[r]" in printed and "second" in printed
    assert "third" not in printed
    log.num_shown = 0
    log.show("eval", 3, [completed("first")], None, [])
    assert capsys.readouterr().out == "" and not said


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_that_cannot_show_every_character(log, said, monkeypatch, tmp_path, encoding):
    with (tmp_path / "terminal").open("w", encoding=encoding) as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        log.show("eval", 3, [completed(SURROGATES), completed("नमस्ते" * 100, 1)], ["ü", "😀"], [])
    shown = (tmp_path / "terminal").read_text(encoding=encoding)
    assert "udc80" in shown and ("नम" in shown) == (encoding == "utf-8")
    assert not said


class Tracker:
    """Stands in for the package of W&B or of Trackio."""

    def __init__(self):
        self.logged = []

    def Table(self, **content):
        return content

    def log(self, values):
        self.logged.append(values)


def tracking(kind):
    """A tracker's callback that has begun to record."""
    callback = TrainerCallback.__new__(kind)
    callback._wandb = callback._trackio = Tracker()
    callback._initialized = True
    return callback


def test_tables_of_trackers(log, said):
    wandb, trackio, waiting = tracking(WandbCallback), tracking(TrackioCallback), tracking(WandbCallback)
    waiting._initialized = False
    log.show("eval", 1, [completed("[D]|")], ["yes"], [TrainerCallback(), wandb, waiting, trackio])
    row = [1, "prompt", "[D]|", "yes"]
    ((key, table),) = [item for item in wandb._wandb.logged[0].items() if "/" in item[0] and "train" not in item[0]]
    assert key == "eval/completions"
    assert table == {"columns": ["step", "prompt", "completion", "reference"], "data": [row]}
    assert trackio._trackio.logged[0]["eval/completions"]["dataframe"].to_numpy().tolist() == [row]
    assert waiting._wandb.logged == [] and not said


def test_a_tracker_that_fails_is_named_and_the_others_get_the_table(log, said, capsys):
    broken, whole = tracking(WandbCallback), tracking(TrackioCallback)

    def refuse(values):
        raise ConnectionError("no network")

    broken._wandb.log = refuse
    log.show("eval", 1, [completed(SURROGATES)], None, [broken, whole])
    assert said == {"`WandbCallback`": "The texts cannot be shown in `WandbCallback`: ConnectionError: no network"}
    cells = whole._trackio.logged[0]["eval/completions"]["dataframe"].to_numpy().tolist()
    assert cells == [[1, "prompt", "a \\udc80 and \\ud83d, alone"]]


def test_table_in_tensorboard(log, said, tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path / "runs"))
    callback = TensorBoardCallback(writer)
    log.show("eval", 1, [completed("a|b\nc"), completed(SURROGATES, 1), completed("third", 2)], None, [callback])
    events = accumulators.EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    (tag,) = events.Tags()["tensors"]
    table = events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    assert tag.startswith("eval/completions") and not said
    assert r"a\|b<br>c" in table and "udc80" in table and "third" not in table
