"""A drop-in for SafeAILab's EAGLE (github.com/SafeAILab/EAGLE): its `EaModel` with our drafter and kernels.

Nothing of that repository is imported or copied: objects are recognised by their attributes. docs/upstream.md names
the version that this was tested with, and says what is replaced and what is not.
"""
