from .comparison_options import CompareOptions
from .prompts import Prompt, load_prompts
from .report import Advice, Answer, Comparison, ComparisonRow
from .run import compare

__all__ = ["Advice", "Answer", "CompareOptions", "Comparison", "ComparisonRow", "Prompt", "compare", "load_prompts"]
