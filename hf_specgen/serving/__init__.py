"""The second entry point: text in, text out, for serving and evaluation."""

from .backend import GenerationBackend
from .backends import check_backend_settings, get_generation_backend
from .completion import Completion
from .detokenizer import TextAssembler
from .openai_request import from_openai
from .prompt_encoder import Prompt, PromptEncoder
from .sampling_params import SamplingParams

__all__ = [
    "Completion",
    "GenerationBackend",
    "Prompt",
    "PromptEncoder",
    "SamplingParams",
    "TextAssembler",
    "check_backend_settings",
    "from_openai",
    "get_generation_backend",
]
