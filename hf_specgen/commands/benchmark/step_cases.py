"""What `benchmark` measures of single steps: grouped attention, processors, and what a round costs beside its pass."""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from hf_specgen import DecodingStats, TokenPenalties, enable_speculation
from hf_specgen.drafters import time_now
from hf_specgen.engine import forward
from hf_specgen.layers import SlotCache, grouped_attention

from .decoding_cases import generate_in_batches
from .measuring import Setting


def attention_case(setting: Setting, cached_lengths: tuple[int, ...] = (200, 3000), new: int = 5) -> list[dict]:
    """A verification pass of `new` positions, through transformers' sdpa with a boolean mask and as in our loop."""
    model, rows, num_tokens = setting.model, slice(0, 1), torch.tensor([new])
    results = []
    for cached in cached_lengths:
        cache = SlotCache(model.config, num_rows=1)
        ids = torch.randint(3, 1000, (1, cached + new), generator=torch.Generator().manual_seed(0))
        ids = ids.to(model.device)
        with torch.no_grad():
            forward(model, cache, rows, ids[:, :cached], torch.tensor([cached]), logits_to_keep=1)
        times: dict[str, list[float]] = {"sdpa": [], "grouped": []}
        logits = {}
        for repeat in range(5 * setting.repeats + 1):
            for name in times:
                start = time_now(model)
                with torch.no_grad():
                    if name == "grouped":
                        with grouped_attention(model):
                            outputs = forward(model, cache, rows, ids[:, cached:], num_tokens)
                    else:
                        write = cache.begin(rows, num_tokens, new, ids.device)
                        mask = cache.attention_mask(is_additive=False, dtype=model.dtype)
                        inputs = {"attention_mask": mask, "position_ids": write.position_ids, "cache": cache}
                        outputs = model(ids[:, cached:], use_cache=True, **inputs)
                if repeat > 0:
                    times[name].append(time_now(model) - start)
                logits[name] = outputs.logits
                cache.truncate(0, cached)
        sdpa, grouped = (statistics.median(times[name]) for name in ("sdpa", "grouped"))
        results.append(
            {
                "cached_tokens": cached,
                "new_positions": new,
                "sdpa_ms": 1e3 * sdpa,
                "grouped_ms": 1e3 * grouped,
                "speedup": sdpa / grouped,
                "max_difference": float((logits["sdpa"] - logits["grouped"]).abs().max()),
            }
        )
    return results


def processors_case(repeats: int, vocab_size: int = 151_936, length: int = 4096, rows: int = 8) -> dict[str, float]:
    """Milliseconds per step of all three penalties at once, against transformers' repetition penalty alone."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (rows, length), generator=generator)
    block = torch.randint(0, vocab_size, (rows, 4), generator=generator)
    scores = {positions: torch.randn(rows, positions, vocab_size) for positions in (1, 5)}
    fused, stock = TokenPenalties(1.3, 0.1, 0.1), RepetitionPenaltyLogitsProcessor(1.3)
    counts, indices = fused.make_counts(ids), list(range(rows))
    calls: dict[str, Callable[[], Any]] = {
        "transformers_repetition": lambda: stock(ids, scores[1][:, 0]),
        "as_processor": lambda: fused(ids, scores[1][:, 0]),
        "in_loop_1_position": lambda: fused.apply_(scores[1], counts, indices, block[:, :0]),
        "in_loop_5_positions": lambda: fused.apply_(scores[5], counts, indices, block),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(20 * repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def overhead_case(setting: Setting, draft_kwargs: dict) -> dict[str, Any]:
    """The share of a round that is not the target's pass, at batch 1 with all penalties on; None without a round."""
    model = enable_speculation(copy.copy(setting.model))
    penalties = [TokenPenalties(1.1, 0.1, 0.1)]
    _, stats = generate_in_batches(model, setting, 1, logits_processor=penalties, **draft_kwargs)
    seconds = (stats or DecodingStats()).seconds
    total = sum(seconds.values())
    own = seconds["processors"] + seconds["other"]
    return {"seconds": dict(seconds), "processors_verification_bookkeeping_share": own / total if total else None}
