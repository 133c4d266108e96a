"""The tasks that come with hftune. A bare ``task.type`` is looked up here."""

from hftune.tasks.sequence_classification import SequenceClassification

__all__ = ["SequenceClassification"]
