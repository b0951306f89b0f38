"""A drafter of your own: it knows a text that the model is likely to write, and proposes it piece by piece."""

import torch

from hf_specgen import Candidates, Drafter, enable_speculation
from hf_specgen.embedded import load_embedded_model


class KnownTextDrafter(Drafter):
    """Proposes what follows a row's last token in a known text. Wrong candidates cost time, never a token."""

    def __init__(self, token_ids, num_tokens=4):
        self.num_tokens = num_tokens
        self.next_ids = {token: token_ids[i + 1 : i + 1 + num_tokens] for i, token in enumerate(token_ids)}

    def make_cache(self, rows):
        return None  # it runs no model

    def draft(self, rows, max_tokens):
        token_ids = torch.zeros(rows.num_spanned, self.num_tokens, dtype=torch.long, device=rows.device)
        lengths = torch.zeros(rows.num_spanned, dtype=torch.long)
        for row, request in rows.live():
            block = self.next_ids.get(request.committed_from(0)[-1], [])[: int(max_tokens[row])]
            token_ids[row, : len(block)] = torch.tensor(block, dtype=torch.long)
            lengths[row] = len(block)
        return Candidates(token_ids, lengths)  # without `probs`: each is proposed for certain

    def observe(self, rows, candidates, outputs):
        pass  # a drafter that learns from the model's output would do it here


model, tokenizer = load_embedded_model()
drafter = KnownTextDrafter(tokenizer("The capital of France is Paris.")["input_ids"])
chat = [{"role": "user", "content": "What is the capital of France?"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = enable_speculation(model).generate(**inputs, assistant_model=drafter, max_new_tokens=12, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
print(model.speculation_stats.summary())
