"""Accuracy against speed over several draft vocabularies."""
