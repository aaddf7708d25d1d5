"""Accuracy before and after patching, on labelled images."""

from elsa_core.evaluating.accuracy import Changed, EvalReport, evaluate
from elsa_core.evaluating.labelled import LabelledImages, labelled_images

__all__ = ["Changed", "EvalReport", "LabelledImages", "evaluate", "labelled_images"]
