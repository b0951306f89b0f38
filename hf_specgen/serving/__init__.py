"""The second entry point: text in, text out, for serving and evaluation."""

from .backend import GenerationBackend
from .backends import check_backend_settings, get_generation_backend
from .completion import Completion
from .detokenizer import TextAssembler
from .messages import are_messages, are_parts, text_of
from .openai_request import from_openai
from .prompt_encoder import Prompt, PromptEncoder
from .request_error import RequestError
from .sampling_params import DEFAULT_BUDGET, SamplingParams, mixed_seed

__all__ = [
    "DEFAULT_BUDGET",
    "Completion",
    "GenerationBackend",
    "Prompt",
    "PromptEncoder",
    "RequestError",
    "SamplingParams",
    "TextAssembler",
    "are_messages",
    "are_parts",
    "check_backend_settings",
    "from_openai",
    "get_generation_backend",
    "mixed_seed",
    "text_of",
]
