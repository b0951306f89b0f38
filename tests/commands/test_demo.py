"""The demonstration, on a tiny model: what is shown while it runs, and what is left when somebody stops it."""

import pytest

from hf_specgen.commands import demo
from hf_specgen.commands.models import byte_tokenizer
from hf_specgen.commands.runner import run
from tests.support.models import make_model

SHORT = ["--max_new_tokens", "4", "--num_shown", "2"]


@pytest.fixture
def decoded(monkeypatch):
    """Puts a tiny model of letters in the place of the real one; returns the settings that were decoded with."""
    model = make_model("llama", vocab_size=300, hidden_size=16, max_position_embeddings=1024)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token
    monkeypatch.setattr(demo, "load_model", lambda name: (model, tokenizer))
    settings = []
    decode = demo.Demo.decode

    def look(self, setting, *given):
        settings.append(setting)
        return decode(self, setting, *given)

    monkeypatch.setattr(demo.Demo, "decode", look)
    return settings


@pytest.mark.slow
def test_texts_are_shown_as_they_come_and_each_run_says_how_fast_it_was(decoded, capsys):
    run("demo", SHORT)
    printed = capsys.readouterr().out
    assert printed.startswith("Loading")
    for name in (
        "plain, stock layers; code_editing",
        "prompt lookup 8; code_editing",
        "prompt lookup 8; summarisation",
    ):
        assert printed.count(name) == 1
    runs = [line for line in printed.splitlines() if "s left" in line]
    assert len(runs) == len(demo.SETTINGS) == 16
    assert runs[0].startswith(" 1/16  batch 1, penalties off, plain, stock layers: ") and runs[-1].startswith(
        "16/16  batch 4"
    )
    assert printed.index(runs[0]) < printed.index("Tuned") < printed.index("same text")
    assert printed.count("8/8") == 16, "all texts are those of plain decoding"
    assert "Other models and machines differ." in printed


def test_an_interruption_leaves_the_table_of_what_is_measured(decoded, monkeypatch, capsys):
    decode = demo.Demo.decode

    def stop(self, setting, *given):
        if setting.has_penalties:
            raise KeyboardInterrupt
        return decode(self, setting, *given)

    monkeypatch.setattr(demo.Demo, "decode", stop)
    with pytest.raises(SystemExit) as ended:
        run("demo", SHORT)
    printed = capsys.readouterr()
    assert ended.value.code == 130 and printed.err == "interrupted\n"
    assert printed.out.count("8/8") == 1 and "plain, stock layers" in printed.out
