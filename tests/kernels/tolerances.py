"""How close a kernel must come to its fp32 reference, by the narrowest type that enters the products."""

import torch

OP_ATOL = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""One operation (a product, a softmax-weighted sum) on values of order one."""
