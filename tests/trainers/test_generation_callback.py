import copy
import gc
import json
import resource

import pytest
import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback
from transformers.integrations import TensorBoardCallback

from hf_specgen import SamplingParams
from tests.support.models import EOS, PAD, assert_partly_accepted, make_model, noisy_copy
from tests.support.training import PROMPTS, dropout_model, losses, make_trainer, text_tokenizer, training_texts
from trainers import GenerationEvalCallback
from trainers import generation_callback as module_of_callback

GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
SAMPLED = SamplingParams(max_new_tokens=12, temperature=1.0, n=2)


class Spy(TrainerCallback):
    """Stands behind the callback under test: what the Trainer's other callbacks see."""

    def __init__(self):
        self.evaluations, self.logs, self.models = [], [], []

    def on_evaluate(self, args, state, control, metrics=None, model=None, **kwargs):
        self.evaluations.append(dict(metrics))
        self.models.append(copy.deepcopy(model).eval())

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def read(folder, step: int, prefix: str = "eval") -> list[dict]:
    path = folder / "completions" / f"{prefix}_step_{step:08d}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plain_text(model, prompt: str, max_new_tokens: int = 12) -> str:
    """What the model's own `generate` makes of a prompt that stands alone, without the id that ends it."""
    tokenizer = text_tokenizer()
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        suppress_tokens=[PAD],
        eos_token_id=EOS,
        pad_token_id=PAD,
        use_cache=True,
    )
    generated = output[0, ids.shape[1] :].tolist()
    return tokenizer.decode([token_id for token_id in generated if token_id != EOS])


@pytest.mark.slow
def test_texts_are_those_of_the_prompts_alone_after_training_with_right_padding(tmp_path):
    spy = Spy()
    trainer = make_trainer(tmp_path, make_model("llama"), [spy])
    GenerationEvalCallback(PROMPTS, GREEDY).attach(trainer)
    trainer.train()
    assert trainer.processing_class.padding_side == "right"
    texts = []
    for step, model in enumerate(spy.models, start=1):
        lines = read(tmp_path, step)
        assert [line["prompt"] for line in lines] == PROMPTS
        assert [line["completion"] for line in lines] == [plain_text(model, prompt) for prompt in PROMPTS]
        texts.append([line["completion"] for line in lines])
    assert len(texts) == 4 and texts[0] != texts[-1], "training changed nothing"


@pytest.mark.slow
def test_speculation_changes_no_text(tmp_path):
    model = make_model("llama")
    texts = []
    for number, (backend, settings) in enumerate(
        [("batched", {}), ("speculative", {"draft_model": noisy_copy(model), "num_assistant_tokens": 3})]
    ):
        folder = tmp_path / backend
        trainer = make_trainer(folder, copy.deepcopy(model), max_steps=1, learning_rate=0.0)
        callback = GenerationEvalCallback(PROMPTS, GREEDY, backend=backend, backend_settings=settings).attach(trainer)
        trainer.train()
        texts.append([line["completion"] for line in read(folder, 1)])
        (logged,) = [entry for entry in trainer.state.log_history if "eval_distinct_1" in entry]
        assert ("eval_acceptance_rate" in logged) == (number == 1)
    assert texts[0] == texts[1]
    tokenizer, draft = text_tokenizer(), settings["draft_model"]
    generated = callback.generation.generate(model, tokenizer)
    assert_partly_accepted(generated.stats)
    assert not draft.training


class Disturber(TrainerCallback):
    """The negative control: an evaluation that leaves something behind."""

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        torch.rand(1)


@pytest.mark.slow
def test_training_is_the_same_to_the_last_bit(tmp_path):
    def train(name, *callbacks):
        checkpointing = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
        trainer = make_trainer(tmp_path / name, dropout_model(), **checkpointing)
        for callback in callbacks:
            if isinstance(callback, GenerationEvalCallback):
                callback.attach(trainer)
            else:
                trainer.add_callback(callback)
        trainer.train()
        return losses(trainer), [parameter.clone() for parameter in trainer.model.parameters()]

    expected, weights = train("without")
    for name, params in {"greedy": GREEDY, "sampled": SAMPLED}.items():
        actual, same_weights = train(name, GenerationEvalCallback(PROMPTS, params))
        assert actual == expected
        assert all(torch.equal(a, b) for a, b in zip(weights, same_weights))
    assert train("disturbed", Disturber())[0] != expected, "the losses do not depend on the random numbers"


@pytest.mark.slow
def test_dropout_is_off_in_greedy_texts(tmp_path):
    spy = Spy()
    trainer = make_trainer(tmp_path, dropout_model(), [spy], max_steps=2)
    GenerationEvalCallback(PROMPTS, GREEDY, every=1).attach(trainer)  # in the midst of training mode
    trainer.train()
    for step, model in enumerate(spy.models, start=1):
        assert [line["completion"] for line in read(tmp_path, step)] == [plain_text(model, p) for p in PROMPTS]
    model = spy.models[-1].train()
    assert [plain_text(model, p) for p in PROMPTS] != [plain_text(model.eval(), p) for p in PROMPTS]


def scripted(*scores):
    """A metric that gives one score after the other."""
    remaining = list(scores)
    return lambda completions, references: {"score": remaining.pop(0)}


def test_metrics_choose_the_best_model_and_stop_early(tmp_path):
    spy = Spy()
    settings = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True, "max_steps": 9}
    settings |= {"metric_for_best_model": "eval_score", "greater_is_better": True}
    callback = GenerationEvalCallback(PROMPTS, GREEDY, metrics=[scripted(0.1, 0.9, 0.2, 0.3, 0.4)])
    trainer = make_trainer(tmp_path, make_model(), [EarlyStoppingCallback(2), callback, spy], **settings)
    callback.attach(trainer)
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert trainer.state.best_metric == 0.9
    best = spy.models[1].state_dict()
    assert all(torch.equal(best[name], value) for name, value in trainer.model.state_dict().items())
    assert [evaluation["eval_score"] for evaluation in spy.evaluations] == [0.1, 0.9, 0.2, 0.3]


def test_metrics_are_logged_once_everywhere(tmp_path):
    spy = Spy()
    trainer = make_trainer(tmp_path, make_model(), [spy])
    GenerationEvalCallback(PROMPTS, GREEDY, references=PROMPTS, metrics=["exact_match"]).attach(trainer)
    trainer.train()
    for records in (trainer.state.log_history, spy.logs):
        found = [record for record in records if "eval_exact_match" in record]
        assert len(found) == 4
        assert all({"eval_mean_length", "eval_tokens_per_second", "epoch"} <= set(record) for record in found)
    assert [entry["step"] for entry in trainer.state.log_history if "eval_exact_match" in entry] == [1, 2, 3, 4]
    assert all("eval_exact_match" in evaluation and "eval_loss" in evaluation for evaluation in spy.evaluations)


def test_evaluation_by_hand_returns_the_metrics_under_its_prefix(tmp_path):
    trainer = make_trainer(tmp_path, make_model())
    GenerationEvalCallback(PROMPTS, GREEDY).attach(trainer)
    metrics = trainer.evaluate(metric_key_prefix="test_unseen")
    assert metrics["test_unseen_mean_length"] > 0
    assert len(read(tmp_path, 0, "test_unseen")) == len(PROMPTS)


def test_several_evaluation_sets_are_generated_for_once(tmp_path):
    trainer = make_trainer(tmp_path, make_model(), max_steps=1)
    texts = training_texts(text_tokenizer())
    trainer.eval_dataset = {"first": texts[:4], "second": texts[4:8]}
    callback = GenerationEvalCallback(PROMPTS, GREEDY, metrics=[scripted(0.5, 0.6)]).attach(trainer)
    spy = Spy()
    trainer.add_callback(spy)
    trainer.train()
    assert [e.get("eval_first_score", e.get("eval_second_score")) for e in spy.evaluations] == [0.5, 0.5]
    assert sum("eval_first_score" in entry for entry in trainer.state.log_history) == 1
    trainer.eval_dataset = texts[:4]
    assert trainer.evaluate()["eval_score"] == 0.6, "outside of training the weights may have changed"
    assert callback._last.step == 1


@pytest.mark.parametrize("every, steps", [(3, [3, 6]), ("epoch", [4, 8]), ("evaluate", [2, 4, 6, 8])])
def test_moments(tmp_path, every, steps):
    trainer = make_trainer(tmp_path, make_model(), max_steps=8, per_device_train_batch_size=6, eval_steps=2)
    GenerationEvalCallback(PROMPTS[:2], GREEDY, every=every).attach(trainer)
    trainer.train()
    logged = [entry["step"] for entry in trainer.state.log_history if "eval_distinct_1" in entry]
    assert logged == steps
    assert sorted(path.name for path in (tmp_path / "completions").iterdir()) == [
        f"eval_step_{step:08d}.jsonl" for step in steps
    ]


def test_sampled_texts_are_complete_in_order_and_the_same_each_time(tmp_path):
    trainer = make_trainer(tmp_path, make_model(), max_steps=2, learning_rate=0.0)
    GenerationEvalCallback(PROMPTS, SAMPLED).attach(trainer)
    trainer.train()
    first, second = read(tmp_path, 1), read(tmp_path, 2)
    assert [(line["index"], line["sample"]) for line in first] == [(i, s) for i in range(len(PROMPTS)) for s in (0, 1)]
    assert [line["completion"] for line in first] == [line["completion"] for line in second]
    assert len({line["completion"] for line in first}) > len(PROMPTS), "the samples of a prompt are all equal"


def test_data_set_with_columns(tmp_path):
    rows = {"question": PROMPTS, "right": ["D"] * len(PROMPTS)}
    trainer = make_trainer(tmp_path, make_model(), max_steps=1)
    callback = GenerationEvalCallback(
        Dataset.from_dict(rows),
        GREEDY,
        metrics=["exact_match"],
        max_prompts=3,
        output_dir=str(tmp_path / "texts"),
        prompt_column="question",
        completion_column="right",
    )
    callback.attach(trainer)
    trainer.train()
    lines = [json.loads(line) for line in next((tmp_path / "texts").iterdir()).read_text().splitlines()]
    assert [(line["prompt"], line["reference"]) for line in lines] == [(prompt, "D") for prompt in PROMPTS[:3]]


def test_seq2seq_trainer(tmp_path):
    trainer = make_trainer(
        tmp_path, make_model(), trainer_class=Seq2SeqTrainer, args_class=Seq2SeqTrainingArguments, max_steps=1
    )
    GenerationEvalCallback(PROMPTS, GREEDY).attach(trainer)
    trainer.train()
    assert len(read(tmp_path, 1)) == len(PROMPTS)
    assert any("eval_mean_length" in entry for entry in trainer.state.log_history)


@pytest.mark.slow
def test_sft_trainer_keeps_its_own_metrics(tmp_path):
    trl = pytest.importorskip("trl")
    own = {}
    for name in ("without", "with"):
        tokenizer = text_tokenizer()
        rows = Dataset.from_list([{"input_ids": row["input_ids"]} for row in training_texts(tokenizer)])
        settings = {"use_cpu": True, "max_steps": 4, "logging_steps": 4, "report_to": [], "save_strategy": "no"}
        settings |= {"per_device_train_batch_size": 4, "seed": 1, "bf16": False, "disable_tqdm": True}
        trainer = trl.SFTTrainer(
            model=dropout_model(),
            args=trl.SFTConfig(str(tmp_path / name), eval_strategy="steps", eval_steps=2, **settings),
            train_dataset=rows,
            eval_dataset=rows.select(range(4)),
            processing_class=tokenizer,
        )
        if name == "with":
            # One of them in the midst of what SFT averages.
            GenerationEvalCallback(PROMPTS, SAMPLED, every=1, name="sampled").attach(trainer)
            evaluating = GenerationEvalCallback(PROMPTS, GREEDY, output_dir=str(tmp_path / "texts")).attach(trainer)
            assert trainer.callback_handler.callbacks[0] is evaluating
        trainer.train()
        own[name] = [entry for entry in trainer.state.log_history if "loss" in entry]
    timing = ("entropy", "mean_token_accuracy", "loss", "num_tokens")
    (expected,), (actual,) = own["without"], own["with"]
    assert {name: actual[name] for name in timing} == {name: expected[name] for name in timing}
    assert sum("eval_sampled_mean_length" in entry for entry in trainer.state.log_history) == 4
    assert sum("eval_mean_length" in entry for entry in trainer.state.log_history) == 2
    assert len(list((tmp_path / "texts").iterdir())) == 2


def test_half_precision_training(tmp_path):
    trainer = make_trainer(tmp_path, make_model("llama"), max_steps=1, bf16=True)
    GenerationEvalCallback(PROMPTS, GREEDY).attach(trainer)
    trainer.train()
    assert len(read(tmp_path, 1)) == len(PROMPTS)


@pytest.mark.slow
def test_a_metric_that_raises_is_left_out(tmp_path, monkeypatch):
    def broken(completions, references):
        raise KeyError("no such thing")

    messages = []
    monkeypatch.setattr(module_of_callback.logger, "error", messages.append)
    trainer = make_trainer(tmp_path, make_model())
    GenerationEvalCallback(PROMPTS, GREEDY, metrics=[broken, scripted(0, 1, 2, 3)]).attach(trainer)
    trainer.train()
    assert [entry["eval_score"] for entry in trainer.state.log_history if "eval_score" in entry] == [0, 1, 2, 3]
    (message,) = messages
    assert "'broken'" in message and "no such thing" in message
    trainer = make_trainer(tmp_path, make_model())
    GenerationEvalCallback(PROMPTS, GREEDY, metrics=[broken], strict=True, every=1).attach(trainer)
    with pytest.raises(KeyError, match="no such thing"):
        trainer.train()
    assert trainer.processing_class.padding_side == "right" and trainer.model.training


def test_a_metric_does_not_replace_another_one(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(module_of_callback.logger, "error", messages.append)
    trainer = make_trainer(tmp_path, make_model())

    def mine(completions, references):
        return {"mean_length": -1.0}

    GenerationEvalCallback(PROMPTS, GREEDY, metrics=[mine]).attach(trainer)
    trainer.train()
    assert all(entry["eval_mean_length"] > 0 for entry in trainer.state.log_history if "eval_mean_length" in entry)
    (message,) = messages
    assert "`mean_length` is measured already" in message


def test_a_metric_that_raises_now_and_then_chooses_among_the_other_evaluations(tmp_path):
    scores = [0.5, None, 0.7, None]

    def score(completions, references):
        if (value := scores.pop(0)) is None:
            raise ArithmeticError("no score this time")
        return {"score": value}

    settings = {"save_strategy": "steps", "save_steps": 1, "metric_for_best_model": "score", "greater_is_better": True}
    trainer = make_trainer(tmp_path, make_model(), [EarlyStoppingCallback(4)], load_best_model_at_end=True, **settings)
    GenerationEvalCallback(PROMPTS, GREEDY, metrics=[score]).attach(trainer)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-3")
    assert trainer.state.global_step == 4
    assert [entry["step"] for entry in trainer.state.log_history if "eval_score" in entry] == [1, 3]


def test_a_best_metric_that_nobody_computes_is_still_an_error(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "metric_for_best_model": "typo"}
    trainer = make_trainer(tmp_path, make_model(), load_best_model_at_end=True, **settings)
    GenerationEvalCallback(PROMPTS, GREEDY, metrics=[scripted(1)]).attach(trainer)
    with pytest.raises(KeyError, match="eval_typo"):
        trainer.train()


@pytest.mark.slow
def test_a_prompt_that_fails_is_counted_and_named(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(module_of_callback.logger, "error", messages.append)
    trainer = make_trainer(tmp_path, make_model(), max_steps=2)
    callback = GenerationEvalCallback(PROMPTS, GREEDY).attach(trainer)
    trainer.train(), messages.clear()
    callback.generation.prompts = [*PROMPTS[:-1], "D" * 300]  # too long: refused at train begin, but grown since
    metrics = trainer.evaluate()
    assert metrics["eval_error_rate"] == pytest.approx(1 / len(PROMPTS))
    assert "exceed the model's 256 positions" in read(tmp_path, 2)[-1]["error"]
    assert "first prompt 6" in messages[0]
    callback.strict = True
    with pytest.raises(RuntimeError, match="1 of 7 texts failed"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="Prompt 6 cannot be served"):
        trainer.train()


def test_unattached_callback_says_what_to_do(tmp_path):
    callback = GenerationEvalCallback(PROMPTS, GREEDY)
    trainer = make_trainer(tmp_path, make_model(), [callback])
    with pytest.raises(RuntimeError, match="callback.attach"):
        trainer.train()
    with pytest.raises(RuntimeError, match="callback.attach"):
        trainer.evaluate()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"prompts": []}, "prompts"),
        ({"metrics": ["exact_match"]}, "exact_match.*references"),
        ({"references": ["x"]}, "references"),
        ({"prompts": Dataset.from_dict({"words": ["a"]})}, "words"),
        ({"backend": "vllm"}, "vllm"),
        ({"backend_settings": {"draft_model": None}}, "draft_model"),
        ({"params": {"max_new_tokens": 3}}, "params"),
        ({"every": 0}, "every"),
        ({"every": "day"}, "every"),
        ({"every": True}, "every"),
        ({"log_completions": -1}, "log_completions"),
        ({"max_prompts": 0}, "max_prompts"),
        ({"metrics": ["no_such_metric"]}, "no_such_metric"),
        ({"no_such_setting": 1}, "`no_such_setting` is an unknown argument. There are .*'metrics'.*'prompt_column'"),
        ({"metric": ["exact_match"]}, "`metric` is an unknown argument. Did you mean `metrics`?"),
        ({"logcompletions": 3}, "Did you mean `log_completions`?"),
        ({"promt_column": "x"}, "Did you mean `prompt_column`?"),
        ({"max_prompt": 3}, "Did you mean `max_prompts`?"),
        ({"name": "a/b"}, "`name` has to be a text of letters"),
        ({"name": ""}, "`name`"),
        ({"name": 3}, "`name`"),
    ],
)
def test_mistakes_are_refused_when_built(settings, message):
    arguments = {"prompts": PROMPTS, "params": GREEDY} | settings
    with pytest.raises((ValueError, TypeError), match=message):
        GenerationEvalCallback(arguments.pop("prompts"), arguments.pop("params"), **arguments)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"backend": "speculative", "backend_settings": {"draft_model": make_model(vocab_size=32)}}, "vocabular"),
        ({"backend": "dspark"}, "DSparkModel"),
        ({"backend_settings": {"max_batch_size": 0}}, "max_batch_size"),
        ({"params": SamplingParams(max_new_tokens=300)}, "Prompt 0 cannot be served"),
        ({"prompts": [[1, 2], [1, 64]]}, "Prompt 1 cannot be served"),
        ({"prompts": [[{"role": "user", "content": "D"}]]}, "Prompt 0 cannot be served.*template"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_when_training_begins(tmp_path, settings, message):
    arguments = {"prompts": PROMPTS, "params": GREEDY} | settings
    callback = GenerationEvalCallback(arguments.pop("prompts"), arguments.pop("params"), **arguments)
    trainer = make_trainer(tmp_path, make_model())
    callback.attach(trainer)
    with pytest.raises((ValueError, TypeError), match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_tokenizer_is_needed(tmp_path):
    trainer = make_trainer(tmp_path, make_model())
    GenerationEvalCallback(PROMPTS, GREEDY).attach(trainer)
    trainer.callback_handler.processing_class = None
    with pytest.raises(TypeError, match="processing_class=tokenizer"):
        trainer.train()


def test_trackers_get_metrics_and_a_table(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path / "runs"))
    trainer = make_trainer(tmp_path, make_model(), [TensorBoardCallback(writer)], max_steps=1)
    GenerationEvalCallback(PROMPTS, GREEDY, log_completions=2).attach(trainer)
    trainer.train()
    events = accumulators.EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    tags = events.Tags()
    assert "eval/mean_length" in tags["scalars"]
    (tag,) = [tag for tag in tags["tensors"] if "completions" in tag]
    table = events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    first, second, third = read(tmp_path, 1)[:3]
    assert first["completion"] in table and second["prompt"] in table and third["prompt"] not in table


# Several callbacks


def test_two_callbacks_keep_their_metrics_and_files_apart(tmp_path):
    spy = Spy()
    settings = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True, "max_steps": 2}
    settings |= {"metric_for_best_model": "eval_second_score", "greater_is_better": True}
    trainer = make_trainer(tmp_path, make_model(), [spy], **settings)
    GenerationEvalCallback(PROMPTS[:1], GREEDY, metrics=[scripted(0.1, 0.2)]).attach(trainer)
    GenerationEvalCallback(PROMPTS[1:], GREEDY, metrics=[scripted(0.9, 0.8)], name="second").attach(trainer)
    trainer.train()
    assert [e["eval_score"] for e in spy.evaluations] == [0.1, 0.2]
    assert [e["eval_second_score"] for e in spy.evaluations] == [0.9, 0.8]
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert [line["prompt"] for line in read(tmp_path, 1)] == PROMPTS[:1]
    assert [line["prompt"] for line in read(tmp_path, 1, "eval_second")] == PROMPTS[1:]
    logged = [entry for entry in trainer.state.log_history if "eval_second_mean_length" in entry]
    assert len(logged) == 2 and not any("eval_mean_length" in entry for entry in logged)


@pytest.mark.parametrize("name", [None, "mine"])
def test_two_callbacks_of_one_name_are_refused(tmp_path, name):
    first, second = (GenerationEvalCallback(PROMPTS, GREEDY, name=name) for _ in range(2))
    trainer = make_trainer(tmp_path, make_model())
    first.attach(trainer)
    assert first.attach(trainer) is first, "once more is no other one"
    with pytest.raises(ValueError, match=f"with the `name` {name!r} already: .* Give each a `name` of its own"):
        second.attach(trainer)
    assert trainer.callback_handler.callbacks.count(first) == 1 and second not in trainer.callback_handler.callbacks


# Moments that never come


@pytest.mark.parametrize(
    "every, settings, sentence",
    [
        ("evaluate", {"eval_strategy": "no"}, '`eval_strategy` is "no". Set `eval_strategy`, or give `every`'),
        ("evaluate", {"eval_delay": 2}, "`eval_delay` is 2, but it ends at 1"),
        ("evaluate", {"eval_strategy": "epoch", "eval_delay": 5}, "`eval_delay` is 5, but it ends at 1"),
        (2, {}, "`every` is 2, but it ends after 1 steps"),
        ("evaluate", {"eval_strategy": "no", "eval_on_start": True}, None),
        ("evaluate", {"eval_steps": 100}, None),  # the last step evaluates
        ("evaluate", {"eval_strategy": "epoch"}, None),
        ("epoch", {"eval_strategy": "no"}, None),
        (1, {"eval_strategy": "no"}, None),
    ],
)
def test_a_callback_that_never_generates_says_so(tmp_path, monkeypatch, every, settings, sentence):
    messages = []
    monkeypatch.setattr(module_of_callback.logger, "warning", messages.append)
    trainer = make_trainer(tmp_path, make_model(), max_steps=1, **settings)
    GenerationEvalCallback(PROMPTS[:1], GREEDY, every=every).attach(trainer)
    trainer.train()
    has_generated = any("eval_mean_length" in entry for entry in trainer.state.log_history)
    assert has_generated == (sentence is None)
    if sentence is None:
        assert not messages
    else:
        (message,) = messages
        assert "generates nothing in this training" in message and sentence in message


# Logs that cannot be written, and switches that metrics leave


def test_a_folder_that_cannot_be_written_to_is_refused_when_training_begins(tmp_path):
    (tmp_path / "file").write_text("no folder")
    trainer = make_trainer(tmp_path, make_model())
    GenerationEvalCallback(PROMPTS, GREEDY, output_dir=str(tmp_path / "file" / "texts")).attach(trainer)
    with pytest.raises(ValueError, match="cannot be saved in '.*file/texts'.*Give another `output_dir`"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_texts_that_cannot_be_saved_any_more_do_not_end_the_training(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(module_of_callback.logger, "error", messages.append)

    def remove_the_folder(completions, references):
        folder = tmp_path / "completions"
        if folder.is_dir():
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
            folder.write_text("a file in its place")
        return 1.0

    trainer = make_trainer(tmp_path, make_model())
    GenerationEvalCallback(PROMPTS, GREEDY, metrics=[remove_the_folder]).attach(trainer)
    trainer.train()
    assert sum("eval_remove_the_folder" in entry for entry in trainer.state.log_history) == 4
    (message,) = messages
    assert str(tmp_path / "completions" / "eval_step_00000002.jsonl") in message


@pytest.mark.slow
def test_switches_that_a_metric_leaves_are_set_back(tmp_path):
    def careless(completions, references):
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return 1.0

    def train(name, *metrics):
        trainer = make_trainer(tmp_path / name, make_model())
        GenerationEvalCallback(PROMPTS, GREEDY, metrics=metrics).attach(trainer)
        trainer.train()
        return losses(trainer)

    assert train("careless", careless) == train("careful")


def bytes_in_tensors() -> int:
    gc.collect()
    # No subclasses: those of the compiler hold no memory.
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


@pytest.mark.slow
def test_twenty_evaluations_need_no_more_memory_than_two(tmp_path):
    trainer = make_trainer(tmp_path, make_model())
    GenerationEvalCallback([*PROMPTS, "D"], SamplingParams(max_new_tokens=40)).attach(trainer)
    trainer.evaluate(), trainer.evaluate()
    held, peak = bytes_in_tensors(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        trainer.evaluate()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak  # KiB
    print(f"\n{held} bytes in tensors, the peak of the process grew by {grown} KiB")
    assert bytes_in_tensors() == held
    assert grown < 2048, "a cache of 8 rows takes 256 KiB"
