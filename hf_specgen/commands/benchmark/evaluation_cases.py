"""What `benchmark` measures of evaluation in a Trainer: a loop over padded batches, and the callback's generation.

Both get the same texts, start from the same weights and end with all texts on all processes.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from hf_specgen import SamplingParams
from hf_specgen.prompts import load_prompts

from .measuring import Setting

NUM_PROMPTS, NUM_NEW_TOKENS, BATCH_SIZE = 64, 64, 8


def evaluation_case(setting: Setting, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """
    Seconds of one evaluation, on the slowest process, in turns; how many texts are equal. Beside the wall time stands
    that of the processor, which says what a busy machine hides.
    """
    from trainers import EvalGeneration, preserved

    prompts = evaluation_prompts(NUM_PROMPTS)
    params = SamplingParams(max_new_tokens=NUM_NEW_TOKENS, temperature=0, ignore_eos=True)
    generations = {
        name: EvalGeneration(prompts, params, name, {"max_batch_size": BATCH_SIZE, "mask_undecodable": False})
        for name in ("batched", "speculative")
    }

    def run_callback(name: str) -> list[str]:
        with preserved([setting.model], tokenizer):
            return [text.text for text in generations[name].generate(setting.model, tokenizer).completions]

    runs: dict[str, Callable[[], list[str]]] = {
        "padded generate": lambda: padded_generate(setting, tokenizer, prompts),
        "callback, batched": lambda: run_callback("batched"),
        "callback, speculative": lambda: run_callback("speculative"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in runs}
    texts: dict[str, list[str]] = {}
    for repeat in range(setting.repeats + 1):
        for name, run in runs.items():
            PartialState().wait_for_everyone()
            start, cpu_start = time.perf_counter(), time.process_time()
            texts[name] = run()
            elapsed = gather_object([(time.perf_counter() - start, time.process_time() - cpu_start)])
            if repeat > 0:
                seconds[name].append(max(wall for wall, _ in elapsed))
                cpu_seconds[name].append(max(cpu for _, cpu in elapsed))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    baseline = medians["padded generate"]
    return {
        "num_prompts": NUM_PROMPTS,
        "num_new_tokens": NUM_NEW_TOKENS,
        "batch_size": BATCH_SIZE,
        "num_prompt_tokens": sum(len(tokenizer(prompt)["input_ids"]) for prompt in prompts),
        "seconds": medians,
        "cpu_seconds": {name: statistics.median(times) for name, times in cpu_seconds.items()},
        "all_seconds": seconds,
        "share_of_baseline": {name: median / baseline for name, median in medians.items()},
        "num_equal": {
            name: sum(a == b for a, b in zip(found, texts["padded generate"])) for name, found in texts.items()
        },
    }


def evaluation_prompts(count: int) -> list[str]:
    """The built-in prompts, turned by one third and by two: no two begin alike, which would be prefilled once."""
    texts = [prompt.turns[0] for prompt in load_prompts("builtin")]
    prompts = [text[cut:] + text[:cut] for third in (1, 2) for text in texts for cut in [third * len(text) // 3]]
    assert count <= len(prompts), "there are more built-in prompts"
    return prompts[:count]


@torch.no_grad()
def padded_generate(setting: Setting, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[str]:
    """The loop of TRL's LogCompletionsCallback, in `eval` mode and with the cache on, without its table."""
    texts: list[str] = []
    with PartialState().split_between_processes(prompts) as share:
        for start in range(0, len(share), BATCH_SIZE):
            batch = tokenizer(
                share[start : start + BATCH_SIZE], return_tensors="pt", padding=True, padding_side="left"
            )
            input_ids = batch["input_ids"].to(setting.model.device)
            outputs = setting.model.generate(
                input_ids=input_ids,
                attention_mask=batch["attention_mask"].to(setting.model.device),
                max_new_tokens=NUM_NEW_TOKENS,
                do_sample=False,
                use_cache=True,
                pad_token_id=setting.pad_token_id,
            )
            texts += tokenizer.batch_decode(outputs[:, input_ids.shape[1] :], skip_special_tokens=True)
    return gather_object(texts)
