"""A drafter as assistant in transformers' own assisted decoding, on a target that nobody prepared.

That loop calls `generate` on the assistant once per round and hands back the `cache` of the round before, so the cache
is where a call's state lives: a new call comes without one. The target's hidden states are tapped by two hooks that
are set before a pass and gone after it.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from ..arguments import checked_probability
from ..drafters.widths import ConfidenceThreshold
from ..engine.drafter import hidden_state_indices
from ..engine.verification import sample
from ..layers.slot_cache import SlotCache
from .block import DSparkBlockModel

DEFAULT_TOKENS, DEFAULT_THRESHOLD = 20, 0.4  # what transformers fills in where a call says nothing
SPAN = slice(0, 1)  # the one row of a session
POINTER = "call `hf_specgen.enable_speculation(target)` once, then `target.generate` as before"


class Tap:
    """
    Catches the hidden states that a target computes in its next pass, in this thread.

    Args:
        layer_ids (`Sequence[int]`): the layers of the drafter's configuration.
        check (`Callable[[PreTrainedModel], None]`): raises if the target does not fit the drafter.
    """

    def __init__(self, layer_ids: Sequence[int], check: Callable[[PreTrainedModel], None]):
        self.indices = hidden_state_indices(layer_ids)
        self.check = check
        self.target: PreTrainedModel | None = None
        self._hidden_states: tuple[Tensor, ...] = ()
        self._is_prefill = True
        self._cache: Callable[[], Any] = lambda: None  # the target's, by which its passes are known
        self._thread = threading.get_ident()
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles)

    def arm(self) -> None:
        """Sets the hooks: on the target's decoder, or, while no target is known, on whichever model runs next."""
        self.disarm()
        if self.target is None:
            self._handles.append(register_module_forward_pre_hook(self._weakly(Tap._bind)))
            return
        decoder = self.target.get_decoder()
        self._handles.append(decoder.register_forward_pre_hook(self._weakly(Tap._ask), with_kwargs=True))
        self._handles.append(
            decoder.register_forward_hook(self._weakly(Tap._catch), with_kwargs=True, always_call=True)
        )

    def take(self) -> tuple[Tensor, ...]:
        """What the last pass has left, once."""
        taken, self._hidden_states = self._hidden_states, ()
        return taken

    def disarm(self) -> None:
        """Removes the hooks."""
        _remove(self._handles)

    def _weakly(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that does not keep the tap alive and minds its own thread only; copies of a model share it."""
        reference = weakref.ref(self)

        def hook(module: nn.Module, *inputs: Any) -> Any:
            tap = reference()
            if tap is not None and threading.get_ident() == tap._thread:
                return method(tap, module, *inputs)
            return None

        return hook

    def _bind(self, module: nn.Module, args: tuple) -> None:
        if not isinstance(module, PreTrainedModel):
            return
        self.disarm()
        self.check(module)
        self.target = module
        self.arm()

    def _ask(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        cache = kwargs.get("cache")
        if not self._is_prefill and cache is not self._cache():  # a pass of another call: ours ended in an exception
            self.disarm()
            return None
        if cache is not None:
            self._cache = weakref.ref(cache)
        if self._is_prefill and cache is not None and cache.get_seq_length() > 0:
            self.disarm()
            raise ValueError(
                f"A `cache` that is not empty is continued wrongly by transformers' assisted decoding; {POINTER}, and "
                "pass the whole text instead."
            )
        if kwargs.get("output_hidden_states"):
            return None
        return args, {**kwargs, "output_hidden_states": self.indices}

    def _catch(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        self.disarm()
        self._is_prefill = False
        if outputs is not None:  # the pass did not raise
            self._hidden_states = outputs.hidden_states


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


class Session:
    """
    What a drafter knows of one call of `generate`. transformers keeps it as the assistant's `cache`: of no length, so
    it is never cropped.
    """

    def __init__(self, model: DSparkBlockModel):
        self.model = model
        self.threshold = model.confidence_threshold if (said := threshold_of_call()) is None else said
        if self.threshold > 0 and model.confidence_head is None:
            raise ValueError(f"`confidence_threshold` is {self.threshold}, but the drafter has no confidence head.")
        self.context = SlotCache(model.config, num_rows=1)
        self.num_columns = 0  # of the text whose states were taken in
        self.tap = Tap(model.config.target_layer_ids, model.check_target)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0."""
        return 0

    def crop(self, max_length: int) -> None:
        """Does nothing: of a pass only the accepted part is taken in."""

    def take_in(self, num_columns: int, attention_mask: Tensor | None) -> bool:
        """
        Computes the context of the accepted tokens from the target's last pass.

        Args:
            num_columns (`int`): columns of the text before the anchor.
            attention_mask (`torch.LongTensor` of shape `(1, columns)`, *optional*): zeros stand at columns that count
                for nothing, such as padding on the left.

        Returns:
            Whether the context is complete, so that a block can be drafted.
        """
        hidden_states = self.tap.take()
        num_new = num_columns - self.num_columns
        if not hidden_states or not 0 < num_new <= hidden_states[self.tap.indices[0]].shape[1]:  # a pass was not seen
            return False
        states = self.model.tapped_states(hidden_states)[:, :num_new]
        if self.num_columns == 0 and attention_mask is not None:
            states = states[:, attention_mask[0, :num_new].to(states.device) != 0]
        self.num_columns = num_columns
        count = torch.tensor([states.shape[1]])
        write = self.context.begin(SPAN, count, states.shape[1], states.device)
        self.model.write_context(states, self.context, write.position_ids)
        self.context.advance(SPAN, count)
        return True

    def draft(self, choice: "_Choice", max_new_tokens: int) -> int:
        """Chooses the candidates of a block; returns how many of them to verify."""
        model, target = self.model, self.tap.target
        anchor_ids = model.known_ids(choice.input_ids[:, -1])
        assert target is not None, "the states came from a target"
        states = model.draft_block(target, self.context, SPAN, anchor_ids)[:, :max_new_tokens]
        logits = model.base_logits(states, target)
        confidences = model.unroll(states, logits, anchor_ids, choice.choose, has_confidence=self.threshold > 0)
        length = choice.num_possible()
        if confidences is None:
            return length
        scaled = confidences.sigmoid() if model.calibration is None else model.calibration.probabilities(confidences)
        lengths = ConfidenceThreshold(self.threshold).lengths(scaled, torch.tensor([length]), torch.tensor([True]))
        return int(lengths[0])


def threshold_of_call() -> float | None:
    """
    The `assistant_confidence_threshold` of the running call, None if it says nothing. transformers overwrites it in
    what it hands to an assistant, so it is read where its loop holds the call's own settings.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not GenerationMixin._assisted_decoding.__code__:
        frame = frame.f_back
    threshold = None if frame is None else frame.f_locals["generation_config"].assistant_confidence_threshold
    if threshold is None or threshold == DEFAULT_THRESHOLD:
        return None
    return checked_probability("assistant_confidence_threshold", threshold)


class NoScores:
    """
    Stands for the scores of no candidates. transformers stacks what it gets, and takes a result of None for "nothing
    was drafted". torch asks an argument that is no tensor for the result of a function.
    """

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> None:
        return None


@dataclass(frozen=True)
class AssistantOutput:
    """What the loop reads of an assistant: ids `(1, length + k)`, `k` scores `(1, vocab)`, and the session."""

    sequences: Tensor
    scores: tuple[Tensor | NoScores, ...]
    cache: Session


class _Choice:
    """The candidates of a round while they are chosen."""

    def __init__(
        self, input_ids: Tensor, logits_processor: Sequence[Callable[[Tensor, Tensor], Tensor]], do_sample: bool
    ):
        self.input_ids = input_ids  # (1, length)
        self.logits_processor = logits_processor
        self.do_sample = do_sample
        self.token_ids: list[Tensor] = []  # each (1,)
        self.scores: list[Tensor] = []  # each (1, vocab)

    def num_possible(self) -> int:
        """How many candidates come before the first one for which the processors left nothing that is drafted."""
        best = torch.cat([scores.amax(dim=-1) for scores in self.scores])
        return int((best > -torch.inf).long().cumprod(dim=0).sum())

    def choose(self, index: int, logits: Tensor) -> Tensor:
        """The next candidate from its corrected logits `(1, vocab)`, drawn from the softmax of the kept scores."""
        prefix = torch.cat([self.input_ids, *(ids[:, None] for ids in self.token_ids)], dim=1)
        scores = logits
        for processor in self.logits_processor:
            scores = processor(prefix, scores)
        if self.do_sample:
            chosen_ids = sample(scores.softmax(dim=-1).nan_to_num(), torch.rand(1, device=scores.device))
        else:
            chosen_ids = scores.argmax(dim=-1)
        self.token_ids.append(chosen_ids)
        self.scores.append(scores)
        return chosen_ids


class StockAssistant(DSparkBlockModel):
    """A drafter that fulfils what transformers' assisted decoding asks of an assistant."""

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[Callable[[Tensor, Tensor], Tensor]] = (),
        max_new_tokens: int | None = None,
        attention_mask: Tensor | None = None,
        cache: Session | None = None,
        **kwargs: Any,
    ) -> AssistantOutput:
        """
        Called by transformers' assisted decoding, not by users: the candidates of one round.

        In the first round no state of the target is known yet, and the confidence threshold may leave nothing: then
        there are no candidates, and the loop takes a plain step.

        Raises:
            `ValueError`: for what that loop would get wrong, with a pointer to [`enable_speculation`].
            `TypeError`: if a user calls it.
        """
        if generation_config is None or max_new_tokens is None or not generation_config.is_assistant:
            raise TypeError(
                "A DSpark drafter cannot generate alone: give it to its target, `target.generate(..., "
                "assistant_model=drafter)`."
            )
        self.check_generation_config()
        if generation_config.stop_strings is not None:
            raise ValueError(
                f"`stop_strings` are missed inside a block by transformers' assisted decoding; {POINTER}."
            )
        session = Session(self) if cache is None else cache
        choice = _Choice(input_ids, logits_processor, bool(generation_config.do_sample))
        length = 0
        if session.take_in(input_ids.shape[1] - 1, attention_mask):
            length = session.draft(choice, min(max_new_tokens, self._num_asked(generation_config)))
        session.tap.arm()
        sequences = torch.cat([input_ids, *(ids[:, None] for ids in choice.token_ids[:length])], dim=1)
        return AssistantOutput(sequences, tuple(choice.scores[:length]) or (NoScores(),), session)

    def _num_asked(self, generation_config: GenerationConfig) -> int:
        """The candidates that the call asks for; transformers itself reads the drafter's own number only."""
        count = generation_config.num_assistant_tokens
        if count is None or count == DEFAULT_TOKENS:
            return self.config.num_candidates
        return self.config.checked_num_assistant_tokens(count)

    def check_generation_config(self) -> None:
        """Raises `ValueError` if the drafter's own generation config asks for what transformers rewrites in it."""
        own = self.generation_config
        if own.assistant_confidence_threshold:
            raise ValueError(
                f"`assistant_confidence_threshold` of the drafter's generation config is "
                f"{own.assistant_confidence_threshold}; set `confidence_threshold` of the drafter itself."
            )
        if own.num_assistant_tokens_schedule not in (None, "constant"):
            raise ValueError(
                "`num_assistant_tokens_schedule` of the drafter's generation config has to be 'constant', but is "
                f"{own.num_assistant_tokens_schedule!r}."
            )
