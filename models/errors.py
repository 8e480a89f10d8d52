"""Errors of the model side: what was wrong, the limit, and what to do."""


class ModelError(Exception):
    """Base of every error that the engine's lower layers raise on purpose; its text is shown to people as it is."""


class UnsupportedModel(ModelError):
    """A checkpoint asks for something that this decoder does not do; names the key, its value and what is supported."""

    def __init__(self, key: str, value: object, supported: str) -> None:
        super().__init__(f"{key} = {value!r} is not supported. Supported: {supported}.")
        self.key = key
        self.value = value


class BadCheckpoint(ModelError):
    """Files of a checkpoint are missing, damaged, or do not match its config."""


class OutputTaken(ModelError):
    """Where a checkpoint is to be written another run writes, or lies something that no stopped run has left."""


class BadPattern(ModelError):
    """A head pattern cannot be read or does not match the model."""


class DoesNotFit(ModelError):
    """Memory for a context is more than there is: `need` and `limit` in bytes, `longest` the context that fits."""

    def __init__(self, message: str, need: int, limit: int, longest: int) -> None:
        super().__init__(message)
        self.need = need
        self.limit = limit
        self.longest = longest


class PoolExhausted(ModelError):
    """No free cache blocks are left for this request; other chats are unharmed."""


class BadLogits(ModelError):
    """The model produced NaN or infinite logits; names the step."""


class BadSnapshot(ModelError):
    """A saved cache cannot be read back: it is damaged, cut short or of another kind."""
