"""A batch of prompts of different lengths, with a penalty, a bias and stop strings, candidates from prompt lookup."""

from hf_specgen import FrequencyPenalty, LogitBias, enable_speculation
from hf_specgen.embedded import load_embedded_model

QUESTIONS = [
    "Name three colours, in one line.",
    "Write one sentence about the sea.",
    "What is the capital of France, and which river flows through it?",
]

model, tokenizer = load_embedded_model()
enable_speculation(model)
inputs = tokenizer.apply_chat_template(
    [[{"role": "user", "content": question}] for question in QUESTIONS],
    add_generation_prompt=True,
    padding=True,  # on the left, as the tokenizer was loaded
    return_tensors="pt",
    return_dict=True,
)
star = tokenizer.convert_tokens_to_ids("*")
output = model.generate(
    **inputs,
    prompt_lookup_num_tokens=4,
    max_new_tokens=40,
    do_sample=False,
    logits_processor=[
        FrequencyPenalty(0.3, pad_token_id=tokenizer.pad_token_id),  # padding is not counted
        LogitBias({star: -100}),  # no lists with stars
    ],
    stop_strings=["\n"],  # a row ends at its first one
    tokenizer=tokenizer,
)
new_tokens = output[:, inputs["input_ids"].shape[1] :]
for question, text in zip(QUESTIONS, tokenizer.batch_decode(new_tokens, skip_special_tokens=True)):
    print(f"{question}\n    {text!r}")
print(model.speculation_stats.summary())
