"""How a command ends: with its result, or with one line that says what the user can do."""

import json
import os
import signal
import subprocess
import sys

import pytest

from hf_specgen.commands import generate, models, runner
from hf_specgen.commands.runner import COMMANDS, run
from hf_specgen.serving.backends import KINDS
from tests.support.launching import LIMIT, ROOT, environment_of_a_script, start_script

HI = ["--prompt", "hi"]
CALIBRATE = ["--target", "my/target", "--drafter", "my/drafter", "--plot", ""]
MISTAKES = [
    ("generate", [], "Give either `--prompt` or `--chat`"),
    ("generate", [*HI, "--chat"], "Give either `--prompt` or `--chat`"),
    ("generate", ["--prompt", " "], "`--prompt` has to say something, but is ' '"),
    ("generate", ["--promt", "hi"], "unknown option '--promt': did you mean `--prompt`?"),
    ("generate", [*HI, "and", "more"], "unknown option 'and': `--help` lists those that there are."),
    ("generate", [*HI, "--temp", "0.7"], "unknown option '--temp'"),
    ("generate", [*HI, "--max_new_tokens", "0"], "`--max_new_tokens` has to be at least 1, but is 0."),
    ("generate", [*HI, "--max_new_tokens", "-5"], "`--max_new_tokens` has to be at least 1, but is -5."),
    ("generate", [*HI, "--max_new_tokens", "many"], "argument --max_new_tokens/--max-new-tokens: invalid int value"),
    ("generate", [*HI, "--num_lookup_tokens", "0"], "`--num_lookup_tokens` has to be at least 1, but is 0."),
    (
        "generate",
        [*HI, "--draft_model", "x", "--num_assistant_tokens", "0"],
        "`--num_assistant_tokens` has to be",
    ),
    (
        "generate",
        [*HI, "--draft_model", "x", "--num_lookup_tokens", "4"],
        "Only one of `--draft_model` 'x' and `-",
    ),
    ("generate", [*HI, "--num_assistant_tokens", "4"], "`--num_assistant_tokens` needs `--draft_model`, but is 4"),
    ("generate", [*HI, "--assistant_confidence_threshold", "0.4"], "`--assistant_confidence_threshold` needs `--dra"),
    ("generate", [*HI, "--temperature", "0.7"], "`--temperature` needs `--do_sample`, but is 0.7 without."),
    ("generate", [*HI, "--top_k", "5"], "`--top_k` needs `--do_sample`, but is 5 without."),
    ("generate", [*HI, "--top_p", "0.9"], "`--top_p` needs `--do_sample`, but is 0.9 without."),
    ("generate", [*HI, "--do_sample", "--temperature", "nan"], "`--temperature` has to be a number above 0"),
    ("generate", [*HI, "--do_sample", "--top_p", "1.5"], "`--top_p` has to be above 0 and at most 1, but is 1.5."),
    ("generate", [*HI, "--repetition_penalty", "0"], "`--repetition_penalty` has to be above 0, but is 0.0."),
    ("generate", [*HI, "--frequency_penalty", "nan"], "`frequency_penalty` has to be a finite number"),
    ("generate", [*HI, "--logit_bias", "{198: -100}"], "`--logit_bias` has to be a JSON object of ids and numbers"),
    ("generate", [*HI, "--logit_bias", "[198]"], "`--logit_bias` has to be a JSON object of ids and numbers"),
    ("generate", [*HI, "--logit_bias", '{"198": "high"}'], "`--logit_bias` has to be a JSON object of ids and numbe"),
    ("generate", [*HI, "--stop", ""], "`--stop` has to hold strings that are not empty."),
    ("generate", [*HI, "--seed", "-1"], "`--seed` has to be at least 0"),
    ("generate", [*HI, "--backend", "fast"], "argument --backend: invalid choice: 'fast'"),
    ("generate", [*HI, "--backend", "eager", "--num_lookup_tokens", "4"], "`--backend` 'eager' drafts nothing"),
    ("generate", [*HI, "--backend", "dspark"], "`--backend` 'dspark' needs `--draft_model`"),
    ("generate", [*HI, "--tokenizer", "bytes"], "`--tokenizer` is for models from a folder or the hub; 'smollm2'"),
    ("generate", [*HI, "--model", "my/model"], "The model 'my/model' is no folder here and not in the hub's cache"),
    ("generate", [*HI, "--model", "small", "--draft_model", "my/draft"], "The draft model 'my/draft' is no folder"),
    ("benchmark", ["--model", "my/model"], "The model 'my/model' is no folder here and not in the hub's cache"),
    ("benchmark", ["--batch_sizes", "4", "0"], "`--batch_sizes` have to be at least 1, but are [4, 0]."),
    ("benchmark", ["--cases", "speed"], "`--cases` has to name some of"),
    ("benchmark", ["--repeats", "0"], "`--repeats` has to be at least 1, but is 0."),
    ("benchmark", ["--prompt_limit", "0"], "`--prompt_limit` has to be at least 1, but is 0."),
    ("benchmark", ["--num_threads", "0"], "`--num_threads` has to be at least 1, but is 0."),
    ("benchmark", ["--max_prompt_tokens", "0"], "`--max_prompt_tokens` has to be at least 1, but is 0."),
    ("benchmark", ["--temperature", "0.7"], "`--temperature` needs `--do_sample`"),
    (
        "benchmark",
        ["--num_assistant_tokens", "4"],
        "needs `--draft_model` or `--draft_noise`, but is 4",
    ),
    ("benchmark", ["--draft_noise", "0.3", "--num_lookup_tokens", "4"], "Only one of `--draft_noise` 0.3 and `--num_"),
    ("benchmark", ["--draft_noise", "0", "--draft_model", "x"], "Only one of `--draft_model` 'x' and `--draft_noise`"),
    ("benchmark", ["--confidence_threshold", "0.5"], "`--confidence_threshold` needs `--draft_model`"),
    ("benchmark", ["--model", "small", "--categories", "poems"], "has to name some of ['arithmetic', 'chat', 'code_e"),
    ("benchmark", ["--prompts", "absent.jsonl"], "absent.jsonl"),
    ("benchmark", ["--output", "."], "`--output` has to be a file, but '.' is a folder."),
    ("benchmark", ["--output", "README.md/report.json"], "`--output` needs the folder"),
    ("benchmark", ["--output", "/proc/report.json"], "`--output` needs the folder '/proc'"),
    ("profile", ["--output", "/proc/costs.json"], "`--output` needs the folder '/proc'"),
    ("profile", ["--num_rows", "0"], "`--num_rows` has to be at least 1, but is 0."),
    ("profile", ["--max_positions", "0"], "`--max_positions` has to be at least 1, but is 0."),
    ("profile", ["--context_length", "0"], "`--context_length` has to be at least 1, but is 0."),
    ("calibrate", [], "the following arguments are required: --target, --drafter"),
    ("calibrate", CALIBRATE, "`--drafter` is not a folder to write to ('my/drafter'): give `--output`."),
    ("calibrate", [*CALIBRATE, "--output", "README.md"], "`--output` needs the folder"),
    ("calibrate", [*CALIBRATE, "--prompt_limit", "1"], "`--prompt_limit` has to be at least 2"),
    ("calibrate", [*CALIBRATE, "--top_k", "3"], "`--top_k` needs `--do_sample`"),
    ("demo", ["--num_shown", "9"], "`--num_shown` has to be from 1 to 8, but is 9."),
    ("demo", ["--max_new_tokens", "0"], "`--max_new_tokens` has to be at least 1, but is 0."),
    ("train_with_generation_eval", ["--eval_steps", "0"], "`--eval_steps` has to be at least 1, but is 0."),
    ("train_with_generation_eval", ["--max_steps", "50"], "`--max_steps` has to be a multiple of `--eval_steps`"),
    ("train_with_generation_eval", ["--num_prompts", "8000"], "`--num_prompts` has to be between 1 and 7999"),
    ("train_with_generation_eval", ["--backend", "dspark"], "argument --backend: invalid choice: 'dspark'"),
    ("train_with_generation_eval", ["--output_dir", "README.md"], "`--output_dir` needs the folder"),
]


@pytest.mark.parametrize("name, arguments, sentence", MISTAKES, ids=lambda value: " ".join(value))
def test_a_mistake_is_one_line_and_status_2(monkeypatch, capsys, name, arguments, sentence):
    def load(*given):
        raise AssertionError("a mistake is found before the model is there")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(models, "load_embedded_model", load)
    with pytest.raises(SystemExit) as ended:
        run(name, arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and sentence in printed.err


def test_a_plot_needs_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("hf_specgen.commands.options.checks.find_spec", lambda name: None)
    for name, given in {
        "train_with_generation_eval": [],
        "calibrate": [*CALIBRATE[:-2], "--output", str(tmp_path)],
    }.items():
        with pytest.raises(SystemExit):
            run(name, given)
        assert "error: `--plot` needs matplotlib" in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_ends_as_its_command_does():
    done = start_script("generate", *HI, "--num_lookup_tokens", "0")
    assert done.returncode == 2
    assert done.stderr == "error: `--num_lookup_tokens` has to be at least 1, but is 0.\n"
    assert done.stdout == ""


@pytest.mark.parametrize("error", [ValueError("no\nsuch thing"), OSError(), ImportError("no such thing"), TypeError()])
def test_errors_are_told_in_one_line_or_shown_where_they_were_raised(monkeypatch, capsys, error):
    def fail(options):
        raise error

    monkeypatch.setattr(generate, "main", fail)
    with pytest.raises(SystemExit) as ended:
        run("generate", HI)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {'no such thing' if error.args else type(error).__name__}\n"
    monkeypatch.setenv(runner.SHOW_TRACEBACK, "1")
    with pytest.raises(type(error)):
        run("generate", HI)


def test_a_fault_of_the_program_is_not_told_as_a_mistake(monkeypatch):
    def fail(options):
        raise AssertionError("rows and ids are equally many")

    monkeypatch.setattr(generate, "main", fail)
    with pytest.raises(AssertionError):
        run("generate", HI)


def test_another_process_says_which_one_it_is(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        run("generate", [*HI, "--top_k", "5"])
    assert capsys.readouterr().err == "error: `--top_k` needs `--do_sample`, but is 5 without. (process 3)\n"


def test_the_backends_that_can_be_asked_for_are_those_that_there_are(capsys):
    with pytest.raises(SystemExit):
        run("generate", [*HI, "--backend", "?"])
    assert f"(choose from {', '.join(map(repr, sorted(KINDS)))})" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_tells_how_to_start_and_every_default(capsys, name):
    with pytest.raises(SystemExit) as ended:
        run(name, ["--help"], "hf-specgen command")
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert printed.startswith("usage: hf-specgen command")
    assert "python scripts/" in printed and "(default: " in printed


@pytest.mark.slow
def test_processes_that_did_not_find_each_other_are_refused():
    code = (
        "import os; from hf_specgen.commands import processes; "
        "processes.PartialState(cpu=True); os.environ['WORLD_SIZE'] = '2'; processes.start_processes()"
    )
    environment = environment_of_a_script()
    for name in ("WORLD_SIZE", "LOCAL_RANK", "RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, timeout=LIMIT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "ValueError: `WORLD_SIZE` has to be" in done.stderr


@pytest.fixture
def chat():
    """A chat with the small model in a process of its own, that has asked for its first turn."""
    command = [sys.executable, "scripts/generate.py", "--chat", "--model", "small", "--max_new_tokens", "4", "--stats"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment_of_a_script(), **pipes) as process:
        try:
            assert process.stdout.read(2) == b"> "
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_ctrl_c_ends_a_chat_with_one_line_and_what_is_measured(chat):
    chat.stdin.write(b"one two three\n")
    chat.stdin.flush()
    while chat.stdout.read(1) != b">":  # the answer, and the next turn
        pass
    chat.send_signal(signal.SIGINT)
    stdout, stderr = chat.communicate(timeout=LIMIT)
    assert chat.returncode == 130
    assert json.loads(stdout.decode().splitlines()[-1])["tokens"] == 4
    assert stderr.decode().splitlines()[-1] == "interrupted" and "Traceback" not in stderr.decode()


@pytest.mark.slow
def test_a_reader_that_has_gone_ends_a_chat_without_a_word(chat):
    chat.stdout.close()
    chat.stdin.write(b"one two three\n")
    chat.stdin.close()
    stderr = chat.stderr.read().decode()
    assert chat.wait(LIMIT) == 1
    assert "Traceback" not in stderr and "error" not in stderr


def test_the_console_script_lists_its_commands_and_passes_options_on(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [os.path.join("bin", "hf-specgen"), "--help"])
    runner.main()
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in COMMANDS)
    for arguments, sentence in (
        (["generate", *HI, "--top_k", "5"], "error: `--top_k` needs `--do_sample`, but is 5 without.\n"),
        (["generat"], "error: unknown command 'generat': there are demo, generate"),
    ):
        monkeypatch.setattr(sys, "argv", ["hf-specgen", *arguments])
        with pytest.raises(SystemExit) as ended:
            runner.main()
        assert ended.value.code == 2 and capsys.readouterr().err.startswith(sentence)
