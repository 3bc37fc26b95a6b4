from .answers import Answer
from .options import CompareOptions
from .prompt_file import Prompt, load_prompts
from .recommend import Advice
from .report import CompareReport, Row
from .result import Comparison, prepare_folder
from .run import compare

__all__ = [
    "Advice",
    "Answer",
    "CompareOptions",
    "CompareReport",
    "Comparison",
    "Prompt",
    "Row",
    "compare",
    "load_prompts",
    "prepare_folder",
]
