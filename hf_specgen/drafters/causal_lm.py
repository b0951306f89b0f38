"""CausalLMDrafter: candidates from a smaller causal language model over the target's vocabulary."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..arguments import check_count, checked_number, checked_probability
from ..engine.batch import Rows, forward, forward_last, padded
from ..engine.drafter import MAX_CANDIDATES, Drafter
from ..engine.model_facts import execution_device, num_input_ids, vocab_size
from ..engine.noise import draft_noise
from ..engine.request import Request
from ..engine.scoring import score
from ..engine.verification import Candidates, sample
from ..layers.slot_cache import SlotCache

LONG_PREFILL = 16  # tokens; rows that lack more than this are fed apart from rows that lack less


class CausalLMDrafter(Drafter):
    """
    Drafts with a causal language model over the target's vocabulary.

    The target's processors and warpers are applied to the draft's scores once, so under sampling a draft equal to the
    target is accepted whole.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The draft model. Its vocabulary may be padded to another size than the target's.
        num_assistant_tokens (`int`, *optional*, defaults to 5):
            Candidates per round, at most 63; at the start if the schedule is heuristic.
        probability_threshold (`float`, *optional*, defaults to 0.0):
            In [0, 1], `assistant_confidence_threshold` of `generate`. A row stops drafting after a candidate whose
            probability under the draft is below this; that candidate is kept, since dropping it would bias the output.
        schedule (`str`, *optional*, defaults to `"constant"`):
            `"heuristic"` adds 2 candidates to a row's block after a round in which all were accepted and takes 1 away
            otherwise; `"heuristic_transient"` is the same here, since nothing outlives a request.
        temperature (`float`, *optional*, defaults to 1.0):
            Divides the draft's processed scores in sampling rows; 0 drafts the best token. What is emitted follows
            the target's distribution either way.

    Raises:
        `ValueError` or `TypeError`: for settings outside these ranges.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_assistant_tokens: int = 5,
        probability_threshold: float = 0.0,
        schedule: str = "constant",
        temperature: float = 1.0,
    ):
        if not isinstance(model, nn.Module) or not hasattr(model, "generate"):
            raise TypeError(f"A draft model has to be a causal language model, but is {type(model).__name__!r}.")
        if schedule not in ("constant", "heuristic", "heuristic_transient"):
            raise ValueError(
                "`num_assistant_tokens_schedule` has to be 'constant', 'heuristic' or 'heuristic_transient', "
                f"but is {schedule!r}."
            )
        if checked_number("temperature", temperature) < 0:
            raise ValueError(f"`temperature` of a drafter has to be at least 0, but is {temperature!r}.")
        self.model: PreTrainedModel = model
        self.num_assistant_tokens = check_count("num_assistant_tokens", num_assistant_tokens, maximum=MAX_CANDIDATES)
        self.probability_threshold = checked_probability("assistant_confidence_threshold", probability_threshold)
        self.is_heuristic = schedule != "constant"
        self.temperature = temperature
        self.num_forwards = 0

    def __repr__(self) -> str:
        return (
            f"CausalLMDrafter({type(self.model).__name__}, num_assistant_tokens={self.num_assistant_tokens}, "
            f"probability_threshold={self.probability_threshold}, is_heuristic={self.is_heuristic}, "
            f"temperature={self.temperature})"
        )

    def make_cache(self, rows: int) -> SlotCache:
        return SlotCache(self.model.config, rows)

    def observe(self, rows: Rows, candidates: Candidates, outputs: ModelOutput) -> None:
        pass

    def draft(self, rows: Rows, max_tokens: Tensor) -> Candidates:
        block_sizes = self._block_sizes(rows)
        limits = torch.minimum(max_tokens, block_sizes)
        k = int(limits.max())
        if k == 0:
            return Candidates.none(rows.num_spanned, rows.device)
        do_sample = [request is not None and request.rules.do_sample for request in rows.spanned]
        is_sampling = any(do_sample) and self.temperature > 0
        noise = draft_noise(rows.noises, limits.tolist(), k).to(rows.device)
        lengths = torch.zeros_like(limits)
        is_open = limits > 0
        candidate_ids = torch.zeros(rows.num_spanned, 0, dtype=torch.long, device=rows.device)
        distributions = []
        logits = self._feed_pending(rows)
        for step in range(k):
            scored = score(rows, logits, candidate_ids, lengths, first=step)
            scores = scored.values[:, 0]
            is_open[list(scored.failures)] = False  # whether it matters is for the verification to find out
            if not bool(is_open.any()):
                break
            lengths += is_open
            token_ids = scores.argmax(dim=-1)
            if is_sampling or self.probability_threshold > 0:
                probs = (scores / self.temperature if is_sampling else scores).softmax(dim=-1)
            if is_sampling:
                sampling_rows = torch.tensor(do_sample, device=rows.device)
                token_ids = torch.where(sampling_rows, sample(probs.nan_to_num(), noise[:, step]), token_ids)
                distributions.append(probs)
            candidate_ids = torch.cat([candidate_ids, token_ids[:, None]], dim=1)
            is_open = is_open & (lengths < limits)
            if self.probability_threshold > 0:
                probability = probs.gather(1, token_ids[:, None])[:, 0]
                is_open = is_open & (probability >= self.probability_threshold).cpu()
            if step + 1 == k or not bool(is_open.any()):
                break
            logits = self._feed(rows, rows.span, token_ids[:, None], is_open.long())
        self._remember(rows, block_sizes, lengths)
        return Candidates(candidate_ids, lengths, torch.stack(distributions, dim=1) if distributions else None)

    def _block_sizes(self, rows: Rows) -> Tensor:
        """How many candidates each row's schedule asks for."""
        if not self.is_heuristic:
            return torch.full((rows.num_spanned,), self.num_assistant_tokens)
        return torch.tensor([self._scheduled(request) for request in rows.spanned])

    def _scheduled(self, request: Request | None) -> int:
        if request is None:
            return 0
        block = request.state.get("block_size", self.num_assistant_tokens)
        # Every round that ends brings a token: with none, the last round has failed and is repeated.
        if "num_drafted" in request.state and request.state["num_generated"] < len(request.token_ids):
            num_accepted = len(request.token_ids) - request.state["num_generated"] - 1
            block = block + 2 if num_accepted >= request.state["num_drafted"] else max(1, block - 1)
        return block

    def _remember(self, rows: Rows, block_sizes: Tensor, lengths: Tensor) -> None:
        for row, request in rows.live():
            request.state["block_size"] = int(block_sizes[row])
            request.state["num_drafted"] = int(lengths[row])
            request.state["num_generated"] = len(request.token_ids)

    def _feed_pending(self, rows: Rows) -> Tensor:
        """Feeds every row what its cache lacks; returns the scores after its last token. (rows, 1, vocab)"""
        cache = rows.draft_cache
        missing = [len(tokens) for tokens in rows.pending(cache)]
        if max(missing) > LONG_PREFILL and any(0 < n <= LONG_PREFILL for n in missing):
            for row, count in enumerate(missing):
                if count > LONG_PREFILL:
                    slot = slice(rows.span.start + row, rows.span.start + row + 1)
                    token_ids, num_tokens = padded([rows.pending(cache, slot)[0][:-1]], rows.device)
                    self._feed(rows, slot, token_ids, num_tokens)
        token_ids, num_tokens = padded(rows.pending(cache), rows.device)
        return self._feed(rows, rows.span, token_ids, num_tokens)

    def _feed(self, rows: Rows, span: slice, token_ids: Tensor, num_tokens: Tensor) -> Tensor:
        self.num_forwards += 1
        is_known = token_ids < num_input_ids(self.model)
        token_ids = torch.where(is_known, token_ids, 0).to(execution_device(self.model))
        run = forward if token_ids.shape[1] == 1 else forward_last
        logits = run(self.model, rows.draft_cache, span, token_ids, num_tokens).logits
        return with_vocab(logits, vocab_size(rows.model)).to(rows.device)


def with_vocab(logits: Tensor, num_ids: int) -> Tensor:
    """Cut or filled with -inf to the target's vocabulary: paddings of one tokenizer differ at the end only."""
    missing = num_ids - logits.shape[-1]
    if missing <= 0:
        return logits[..., :num_ids]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
