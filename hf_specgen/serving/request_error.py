"""RequestError: why a request is refused, in words and with the codes of OpenAI's API."""

# What `code` can be, besides those that a server adds.
INVALID_VALUE = "invalid_value"
INVALID_TYPE = "invalid_type"
UNSUPPORTED_PARAMETER = "unsupported_parameter"
UNSUPPORTED_VALUE = "unsupported_value"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class RequestError(ValueError):
    """
    A request is refused, before anything is computed.

    Args:
        message (`str`):
            What is wrong and what to do.
        code (`str`):
            The kind of mistake: `"invalid_value"`, `"invalid_type"`, `"unsupported_parameter"`,
            `"unsupported_value"` or `"context_length_exceeded"`.
        param (`str`, *optional*):
            The field of the request that has to change.
    """

    def __init__(self, message: str, code: str = INVALID_VALUE, param: str | None = None):
        super().__init__(message)
        self.code = code
        self.param = param


class RequestTypeError(RequestError, TypeError):
    """A [`RequestError`] over a value of a wrong type."""

    def __init__(self, message: str, code: str = INVALID_TYPE, param: str | None = None):
        super().__init__(message, code, param)


def refused(
    error: Exception, param: str | None = None, message: str | None = None, code: str | None = None
) -> RequestError:
    """The `RequestError` that says what a ValueError or TypeError says, or `message` in its place."""
    words = str(error) if message is None else message
    if isinstance(error, RequestError):
        return type(error)(words, code or error.code, param or error.param)
    if isinstance(error, TypeError):
        return RequestTypeError(words, code or INVALID_TYPE, param)
    return RequestError(words, code or INVALID_VALUE, param)
