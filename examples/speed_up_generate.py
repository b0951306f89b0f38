"""Decode with `model.generate`, plainly and with prompt lookup: the same tokens in fewer passes of the model."""

import time

from hf_specgen import enable_speculation
from hf_specgen.embedded import load_embedded_model
from hf_specgen.prompts import load_prompts

model, tokenizer = load_embedded_model()
enable_speculation(model)
prompt = load_prompts(categories=["code_editing"], limit=1)[0]  # "Rewrite the whole function ..."
chat = [{"role": "user", "content": prompt.turns[0]}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
settings = {"max_new_tokens": 96, "do_sample": False}
model.generate(**inputs, max_new_tokens=4, do_sample=False)  # the first call is slower than the others

start = time.perf_counter()
plain = model.generate(**inputs, **settings)
plain_seconds = time.perf_counter() - start

start = time.perf_counter()
output = model.generate(**inputs, **settings, prompt_lookup_num_tokens=3)
seconds = time.perf_counter() - start

print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"\nThe same tokens: {output.tolist() == plain.tolist()}")
print(f"Plain {plain_seconds:.2f} s, with prompt lookup {seconds:.2f} s")
print(model.speculation_stats.summary())
