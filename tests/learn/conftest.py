"""The fixtures of the learner's tests."""

from learner_batches import batch_of, encoder, model, model_of  # noqa: F401
