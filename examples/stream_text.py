"""Text in, text out: a stream that is read to its end, one that is closed early, and completions side by side."""

from hf_specgen import SamplingParams, get_generation_backend
from hf_specgen.embedded import load_embedded_model

backend = get_generation_backend("speculative", *load_embedded_model())  # candidates from the text's own n-grams
chat = [{"role": "user", "content": "Write one sentence about the sea."}]

stream = backend.stream(chat, SamplingParams(max_new_tokens=48, temperature=0.7, top_p=0.9, seed=0))
for piece in stream:
    print(piece, end="", flush=True)
print(f"\n[{stream.completion.finish_reason}, {len(stream.completion.token_ids)} tokens]\n")

with backend.stream("Once upon a time", SamplingParams(max_new_tokens=200, temperature=0)) as stream:
    for number, piece in enumerate(stream):
        print(piece, end="", flush=True)
        if number == 9:
            break  # the request ends here, and the next one takes its slot
print(" ...\n")

params = SamplingParams(max_new_tokens=24, temperature=0, stop=["\n"])
for completion in backend.generate(["The capital of Italy is", "Two plus two is", "A haiku has"], params):
    print(f"{completion.prompt!r} -> {completion.text!r} [{completion.finish_reason}]")
