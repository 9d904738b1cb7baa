"""The fixtures of the learner's tests, here for its compiled and captured passes."""

from learner_batches import batch_of, encoder, model_of  # noqa: F401
