"""Prompts to measure and check with: built-in ones, JSONL files, data sets."""

from .prompt import Prompt, encode_prompt
from .sources import load_prompts

__all__ = ["Prompt", "encode_prompt", "load_prompts"]
