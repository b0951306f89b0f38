"""The heads that make a block sequential: Markov heads correct the base logits token by token, the confidence head
estimates whether the next token will be accepted.

DSpark, section 3 (DeepSeek 2026, https://arxiv.org/abs/2607.05147). `step` takes any leading
dimensions, so that training can call it as drafting does.
"""

import torch
from torch import Tensor, nn

from .configuration import DSparkConfig


class MarkovHead(nn.Module):
    """
    The vanilla head: a low-rank table of bigrams, `bias = W2 W1[previous token]`.

    Args:
        config ([`DSparkConfig`]): with a `markov_rank` above 0.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        rank, draft_vocab_size = config.markov_rank, config.draft_vocab_size or config.vocab_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def embed(self, previous_ids: Tensor) -> Tensor:
        """`W1` of the tokens before: `(...)` to `(..., rank)`."""
        return self.markov_w1(previous_ids)

    def step(self, embedding: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """
        The correction of one slot.

        Args:
            embedding (`torch.Tensor` of shape `(..., rank)`):
                `embed` of the token before.
            states (`torch.Tensor` of shape `(..., hidden_size)`):
                The slot's state behind the drafter's final norm.
            memory (`torch.Tensor` of shape `(..., rank)`, *optional*):
                What the step of the slot before returned, None at the first slot of a block.

        Returns:
            What to add to the base logits, of shape `(..., draft_vocab)`, and the memory for the next slot.
        """
        return self.markov_w2(embedding), None


class GatedMarkovHead(MarkovHead):
    """Bigrams behind a gate that sees the slot's state: `bias = W2 (sigmoid(Wg [h; e] + b) * e)`."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def step(self, embedding: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        gate = torch.sigmoid(self.gate_proj(torch.cat([states, embedding], dim=-1)))
        return self.markov_w2(gate * embedding), None


class RNNMarkovHead(MarkovHead):
    """
    A gated recurrent state over the block. `[a, c, o] = Wj [s; e; h] + b`; the next state is `g s + (1 - g) tanh(c)`
    with `g = sigmoid(a)`, and `bias = W2 tanh(o)` comes from the state before it.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        rank = config.markov_rank
        self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def step(self, embedding: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        memory = torch.zeros_like(embedding) if memory is None else memory
        gate, update, output = self.joint_proj(torch.cat([memory, embedding, states], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return self.markov_w2(torch.tanh(output)), gate * memory + (1 - gate) * torch.tanh(update)


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNMarkovHead}


class ConfidenceHead(nn.Module):
    """
    Estimates, before a token is drawn, the probability that it will be accepted given that those before it are.

    Args:
        config ([`DSparkConfig`]): says whether the token before is among the features.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        rank = config.markov_rank if config.confidence_head_with_markov else 0
        self.proj = nn.Linear(config.hidden_size + rank, 1)

    def forward(self, states: Tensor, embedding: Tensor | None) -> Tensor:
        """
        Logits of shape `(...)` in fp32 from states `(..., hidden_size)` and the Markov embedding `(..., rank)` of the
        token before, None if the head does not see it.
        """
        features = states if embedding is None else torch.cat([states, embedding.to(states.dtype)], dim=-1)
        weight, bias = self.proj.weight.float(), self.proj.bias.float()
        return nn.functional.linear(features.float(), weight, bias)[..., 0]
