from .options import CompareOptions
from .prompts import Prompt, load_prompts
from .report import Advice, Answer, Comparison, Row
from .run import compare

__all__ = ["Advice", "Answer", "CompareOptions", "Comparison", "Prompt", "Row", "compare", "load_prompts"]
