"""The scripts as a user starts them: what they print and what they refuse."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMPT = ["--prompt", "one two three one two"]
BENCHMARK = (
    "--model small --max_prompt_tokens 16 --max_new_tokens 8 --repeats 1 --batch_sizes 1 2 --draft_noise 0.3"
).split()
CASES = "--cases speculation ragged batching overhead".split()
MEASURED = ("speculation", "ragged", "batching")


def start(name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, *launcher, f"scripts/{name}.py", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, timeout=120, capture_output=True, encoding="utf-8", errors="replace"
    )


def report_of(done: subprocess.CompletedProcess) -> dict:
    """The JSON object in the last line of stdout."""
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_generate_keeps_the_times_of_the_phases_beside_the_wall_time():
    arguments = "--model small --max_new_tokens 8 --num_lookup_tokens 3 --stats".split()
    report = report_of(start("generate", *PROMPT, *arguments))
    assert report["tokens"] == 8
    assert set(report["seconds"]) == {"draft", "verify", "processors", "other"}
    assert 0 < sum(report["seconds"].values()) <= report["wall_seconds"]
    assert report["tokens_per_second"] == pytest.approx(8 / report["wall_seconds"])
    assert 0 < report["target_forwards"] <= 8


@pytest.mark.parametrize(
    "name, arguments, sentence",
    [
        ("generate", [*PROMPT, "--temperature", "0.7"], "`temperature` needs `do_sample`"),
        ("benchmark", ["--batch_sizes", "4", "0"], "`batch_sizes` have to be at least 1"),
        ("demo", ["--num_shown", "9"], "`num_shown` has to be from 1 to 8"),
    ],
    ids=["generate", "benchmark", "demo"],
)
def test_refusal_ends_the_script(name, arguments, sentence):
    done = start(name, *arguments)
    assert done.returncode != 0
    assert f"ValueError: {sentence}" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "name, arguments, sentence",
    [
        ("generate", {"temperature": 0.7}, "`temperature` needs `do_sample`"),
        ("generate", {"top_k": 5}, "`top_k` needs `do_sample`"),
        ("generate", {"top_p": 0.9}, "`top_p` needs `do_sample`"),
        ("generate", {"num_assistant_tokens": 4}, "`num_assistant_tokens` needs `draft_model`"),
        ("generate", {"assistant_confidence_threshold": 0.4}, "`assistant_confidence_threshold` needs `draft_model`"),
        ("generate", {"logit_bias": "{198: -100}"}, "`logit_bias` has to be a JSON object"),
        ("generate", {"logit_bias": "[198]"}, "`logit_bias` has to be a JSON object"),
        ("generate", {"logit_bias": '{"198": "high"}'}, "`logit_bias` has to be a JSON object"),
        ("benchmark", {"temperature": 0.7}, "`temperature` needs `do_sample`"),
        ("benchmark", {"num_assistant_tokens": 4}, "`num_assistant_tokens` needs `draft_model` or `draft_noise`"),
        ("benchmark", {"batch_sizes": [0]}, "`batch_sizes` have to be at least 1"),
        ("demo", {"num_shown": 0}, "`num_shown` has to be from 1 to 8"),
    ],
    ids=str,
)
def test_arguments_that_would_be_ignored_are_refused(monkeypatch, name, arguments, sentence):
    module = "benchmark.benchmark" if name == "benchmark" else name
    arguments_class = vars(importlib.import_module(f"hf_specgen.commands.{module}"))[f"{name.title()}Arguments"]
    required = {"prompt": "Hello"} if name == "generate" else {}
    with pytest.raises(ValueError, match=re.escape(sentence)):
        arguments_class(**required, **arguments)


def test_benchmark_refuses_processes_that_did_not_find_each_other(monkeypatch):
    for name in ("LOCAL_RANK", "RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    code = (
        "import os; from hf_specgen.commands.benchmark import benchmark; "
        "benchmark.PartialState(cpu=True); os.environ['WORLD_SIZE'] = '2'; benchmark.start_processes()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("WORLD_SIZE", None)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=120, capture_output=True, text=True)
    assert done.returncode != 0
    assert "ValueError: `WORLD_SIZE` has to be" in done.stderr


def test_benchmark_measures_equal_ids():
    report = report_of(start("benchmark", *BENCHMARK, *CASES, "--prompt_limit", "3"))
    assert report["settings"]["num_assistant_tokens"] == 5
    assert report["environment"]["num_processes"] == 1
    for case in MEASURED:
        for line in report[case]:
            assert line["num_equal"] == line["num_prompts"] == 3, f"{case}: {line['name']}"
    speculative = [line for line in report["speculation"] if line["name"] == "speculative"]
    assert [line["batch_size"] for line in speculative] == [1, 2]
    for line in speculative:
        assert line["tokens"] == line["stats"]["tokens"] == 24
        assert line["stats"]["drafting_rounds"] > 0
    assert 0 < report["overhead"]["processors_verification_bookkeeping_share"] < 1


def test_benchmark_compares_no_sampled_ids():
    arguments = "--cases speculation --prompt_limit 1 --do_sample --temperature 0.8".split()
    done = start("benchmark", *BENCHMARK, *arguments)
    report = report_of(done)
    assert {line["num_equal"] for line in report["speculation"]} == {None}
    assert "1/1" not in done.stdout


@pytest.mark.distributed
@pytest.mark.parametrize("prompt_limit", [1, 3])
def test_benchmark_adds_up_two_processes(prompt_limit):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    cases = ["--cases", "speculation", "overhead"] if prompt_limit == 3 else CASES
    done = start("benchmark", *BENCHMARK, *cases, "--prompt_limit", str(prompt_limit), launcher=launcher)
    report = report_of(done)
    lines = done.stdout.splitlines()
    assert sum(line.startswith("{") for line in lines) == 1
    assert sum(line.strip() == "speculation" for line in lines) == 1, "one table"
    assert report["environment"]["num_processes"] == 2
    for case in MEASURED:
        for line in report.get(case, []):
            assert line["num_equal"] == line["num_prompts"] == prompt_limit, f"{case}: {line['name']}"
    for line in report["speculation"]:
        assert line["tokens"] == 8 * prompt_limit
        assert line["speedup"] > 0
        if line["name"] == "speculative":
            assert line["stats"]["tokens"] == 8 * prompt_limit
    assert report["overhead"]["processors_verification_bookkeeping_share"] > 0


def test_benchmark_of_evaluation_generates_the_same_texts_each_way(monkeypatch):
    case, loading = [
        importlib.import_module(f"hf_specgen.commands.{name}") for name in ("benchmark.evaluation_cases", "loading")
    ]
    monkeypatch.setattr(case, "NUM_PROMPTS", 4)
    monkeypatch.setattr(case, "NUM_NEW_TOKENS", 6)
    prompts = case.evaluation_prompts(64)
    assert len({prompt[:20] for prompt in prompts}) == 64, "ours prefills common beginnings once"
    model, tokenizer = loading.load_model("small")
    setting = case.Setting(model, [], {}, repeats=1, pad_token_id=0)
    result = case.evaluation_case(setting, tokenizer)
    assert result["num_equal"] == dict.fromkeys(["padded generate", "callback, batched", "callback, speculative"], 4)
    assert all(seconds > 0 for seconds in result["seconds"].values())
