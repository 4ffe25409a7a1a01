"""Text in and out: tokenizer, chat template, incremental detokenizer, stop strings."""

from paceline.text.chat import ChatTemplate
from paceline.text.detokenizer import IncrementalDetokenizer
from paceline.text.generation_config import GenerationDefaults, load_generation_defaults
from paceline.text.stop import StopChecker, TextStream, TextUpdate
from paceline.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "GenerationDefaults",
    "IncrementalDetokenizer",
    "StopChecker",
    "TextStream",
    "TextUpdate",
    "Tokenizer",
    "load_generation_defaults",
]
