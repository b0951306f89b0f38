"""DSparkDrafter: a DSparkModel behind the `Drafter` contract, for any number of rows.

Context keys and values live in a slot cache: written once per token, when the target has just computed its states;
those of a block lie behind them and are overwritten by what comes next.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..drafters.causal_lm import with_vocab
from ..drafters.widths import VerifyAll
from ..engine.batch import Rows
from ..engine.drafter import Drafter
from ..engine.noise import draft_noise
from ..engine.scoring import score
from ..engine.verification import Candidates, sample
from ..engine.width import DraftLengthPolicy
from ..layers.slot_cache import SlotCache
from .modeling import DSparkModel


class DSparkDrafter(Drafter):
    """
    Drafts a block per round in one pass of a [`DSparkModel`].

    The target's processors and warpers are applied to the corrected logits of each candidate, in fp32, and a sampling
    row draws from exactly the distribution that it passes on.

    Args:
        draft_model ([`DSparkModel`]):
            The drafter.
        num_assistant_tokens (`int`, *optional*):
            The most candidates that are verified per round; the block's own number by default, and at most that.
        draft_length ([`DraftLengthPolicy`], *optional*):
            Decides how many candidates each row verifies: all by default.
        is_calibrated (`bool`, *optional*, defaults to `True`):
            Whether confidences are scaled by the model's calibration, if it has one.
        keep_confidence (`bool`, *optional*, defaults to `False`):
            Whether `confidence_logits` are computed although no policy asks for them.

    Attributes:
        confidence_logits (`torch.FloatTensor` of shape `(rows, k)`, *optional*): raw logits of the last block's
            confidences.
        num_context_tokens (`int`): positions whose context was computed so far, refused candidates included.

    Raises:
        `ValueError`: for more candidates than a block gives, or a policy that needs a confidence head.
        `TypeError`: for a model or policy of another kind.
    """

    def __init__(
        self,
        draft_model: DSparkModel,
        num_assistant_tokens: int | None = None,
        draft_length: DraftLengthPolicy | None = None,
        is_calibrated: bool = True,
        keep_confidence: bool = False,
    ):
        if not isinstance(draft_model, DSparkModel):
            raise TypeError(f"`draft_model` has to be a `DSparkModel`, but is a {type(draft_model).__name__!r}.")
        if draft_length is not None and not isinstance(draft_length, DraftLengthPolicy):
            raise TypeError(
                f"`draft_length` has to be a policy such as `ConfidenceThreshold(0.5)`, but is {draft_length!r}."
            )
        config = draft_model.config
        self.draft_model = draft_model
        self.num_assistant_tokens = (
            config.num_candidates
            if num_assistant_tokens is None
            else config.checked_num_assistant_tokens(num_assistant_tokens)
        )
        self.draft_length = VerifyAll() if draft_length is None else draft_length
        self.keep_confidence = keep_confidence
        if (keep_confidence or self.draft_length.needs_confidence) and draft_model.confidence_head is None:
            raise ValueError(
                f"`{type(self.draft_length).__name__}` needs confidences, but the drafter has no confidence head."
            )
        self.calibration = draft_model.calibration if is_calibrated else None
        self.target_layer_ids = tuple(config.target_layer_ids)
        self.confidence_logits: Tensor | None = None
        self.num_context_tokens = 0
        self.num_forwards = 0

    def __repr__(self) -> str:
        return (
            f"DSparkDrafter({type(self.draft_model).__name__}, num_assistant_tokens={self.num_assistant_tokens}, "
            f"draft_length={self.draft_length!r}, is_calibrated={self.calibration is not None})"
        )

    def bind(self, target: PreTrainedModel) -> None:
        self.draft_model.check_target(target)

    def make_cache(self, rows: int) -> SlotCache:
        return SlotCache(self.draft_model.config, rows)

    def observe(self, rows: Rows, candidates: Candidates, outputs: ModelOutput) -> None:
        cache = rows.draft_cache
        num_tokens = rows.cache.lengths[rows.span] - cache.lengths[rows.span]
        states = self.draft_model.tapped_states(outputs.hidden_states)
        assert int(num_tokens.max()) <= states.shape[1], "the context lacks no token but those of this pass"
        write = cache.begin(rows.span, num_tokens, states.shape[1], states.device)
        self.draft_model.write_context(states, cache, write.position_ids)
        cache.advance(rows.span, num_tokens)
        self.num_context_tokens += int(num_tokens.sum())

    def draft(self, rows: Rows, max_tokens: Tensor) -> Candidates:
        self.confidence_logits = None
        limits = max_tokens.clamp(max=self.num_assistant_tokens)
        k = int(limits.max())
        if k == 0:
            return Candidates.none(rows.num_spanned, rows.device)
        model, device = self.draft_model, self.draft_model.fc.weight.device
        anchors = [0 if r is None else r.committed_from(r.num_committed - 1)[0] for r in rows.spanned]
        anchor_ids = model.known_ids(torch.tensor(anchors).to(device, non_blocking=True))
        states = model.draft_block(rows.model, rows.draft_cache, rows.span, anchor_ids)[:, :k]
        self.num_forwards += 1
        block = _Block(rows, limits, model)
        logits = model.base_logits(states, rows.model)
        self.confidence_logits = model.unroll(states, logits, anchor_ids, block.choose, self._has_confidence())
        is_live = torch.tensor([request is not None for request in rows.spanned])
        lengths = self.draft_length.lengths(self._confidences(), block.limits, is_live)
        return Candidates(block.token_ids, lengths, torch.stack(block.probs, dim=1) if block.probs else None)

    def _has_confidence(self) -> bool:
        return self.keep_confidence or self.draft_length.needs_confidence

    def _confidences(self) -> Tensor | None:
        logits = self.confidence_logits
        if not self.draft_length.needs_confidence or logits is None:
            return None
        return logits.sigmoid() if self.calibration is None else self.calibration.probabilities(logits)


class _Block:
    """The candidates of a round while they are chosen, one per call of `choose`."""

    def __init__(self, rows: Rows, limits: Tensor, model: DSparkModel):
        self.rows = rows
        self.model = model
        self.vocab_size = rows.model.config.get_text_config().vocab_size
        self.is_known = self.vocab_size <= model.config.vocab_size
        self.limits = limits.clone()
        self.do_sample = [request is not None and request.rules.do_sample for request in rows.spanned]
        self.is_sampling = any(self.do_sample)
        if self.is_sampling:
            self.sampling_rows = torch.tensor(self.do_sample).to(rows.device, non_blocking=True)
            noise = draft_noise(rows.noises, limits.tolist(), int(limits.max()))
            self.noise = noise.to(rows.device, non_blocking=True)
        has_processors = any(request.rules.logits_processor for _, request in rows.live())
        self.is_plain = self.is_known and not has_processors and not self.is_sampling
        self.chosen_ids: list[Tensor] = []  # each (rows,)
        self.probs: list[Tensor] = []

    @property
    def token_ids(self) -> Tensor:
        """The candidates chosen so far, `(rows, number)`."""
        if not self.chosen_ids:
            return torch.zeros(self.rows.num_spanned, 0, dtype=torch.long, device=self.rows.device)
        return torch.stack(self.chosen_ids, dim=1)

    def choose(self, index: int, logits: Tensor) -> Tensor:
        """Candidate `index` of every row from its corrected logits `(rows, vocab)`."""
        rows = self.rows
        if logits.shape[-1] != self.vocab_size:
            logits = with_vocab(logits, self.vocab_size)
        if self.is_plain:  # nothing changes the order of the scores
            chosen_ids = logits.argmax(dim=-1)
            self.chosen_ids.append(chosen_ids.to(rows.device))
            return chosen_ids
        scored = score(
            rows, logits.to(rows.device)[:, None], self.token_ids, self.limits.clamp(max=index), first=index
        )
        scores = scored.values[:, 0]
        for row in scored.failures:  # whether it matters is for the verification to find out
            self.limits[row] = min(int(self.limits[row]), index)
        chosen_ids = scores.argmax(dim=-1)
        if self.is_sampling:
            probs = scores.softmax(dim=-1)
            sampled_ids = sample(probs.nan_to_num(), self.noise[:, index])
            chosen_ids = torch.where(self.sampling_rows, sampled_ids, chosen_ids)
            self.probs.append(probs)
        self.chosen_ids.append(chosen_ids)
        chosen_ids = chosen_ids.to(logits.device)
        return chosen_ids if self.is_known else self.model.known_ids(chosen_ids)
