from .options import CompareOptions
from .prompts import Prompt, load_prompts
from .recommend import Advice, Comparison
from .report import Answer, CompareReport, Row
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
]
