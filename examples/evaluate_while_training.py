"""Fine-tune SmolLM2 for a few steps to judge reviews in one word, and evaluate it by what it writes."""

import tempfile

from transformers import DataCollatorForSeq2Seq, PrinterCallback, Trainer, TrainingArguments

from hf_specgen import SamplingParams
from hf_specgen.embedded import load_embedded_model
from trainers import GenerationEvalCallback

GOOD = ["I loved it", "A great film", "Wonderful music", "We laughed a lot", "Superb acting", "A joy to watch"]
BAD = ["I hated it", "A dull film", "Horrible music", "We fell asleep", "Wooden acting", "A waste of time"]
PROMPTS = [f"{text}. Verdict:" for pair in zip(GOOD, BAD) for text in pair]
ANSWERS = [" good", " bad"] * len(GOOD)

model, tokenizer = load_embedded_model()


def tokenize(prompt, answer):
    num_prompt = len(tokenizer(prompt)["input_ids"])
    input_ids = tokenizer(prompt + answer + tokenizer.eos_token)["input_ids"]
    return {"input_ids": input_ids, "labels": [-100] * num_prompt + input_ids[num_prompt:]}


examples = [tokenize(prompt, answer) for prompt, answer in zip(PROMPTS, ANSWERS)]
settings = {"max_steps": 12, "learning_rate": 1e-4, "eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True}
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(folder, **settings, save_strategy="no", disable_tqdm=True, seed=0)
    collator = DataCollatorForSeq2Seq(tokenizer)
    trainer = Trainer(model, arguments, collator, examples[:8], examples[8:], processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    params = SamplingParams(max_new_tokens=8, temperature=0)
    callback = GenerationEvalCallback(PROMPTS[8:], params, references=ANSWERS[8:], metrics=["exact_match"])
    callback.attach(trainer)
    trainer.train()
for log in trainer.state.log_history:
    if "eval_exact_match" in log:
        print(f"step {log['step']}: {log['eval_exact_match']:.0%} right, {log['eval_mean_length']:.1f} tokens each")
