"""From one published layout of a drafter to another."""

import os

from transformers import PreTrainedModel

from .layouts import LAYOUTS
from .modeling import DSparkModel


def convert(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    layout: str = "released",
    target: PreTrainedModel | None = None,
) -> None:
    """
    Reads a drafter in any layout and writes it in another; the weights keep their type.

    Args:
        source (`str` or `os.PathLike`):
            A folder or a name on the hub.
        destination (`str` or `os.PathLike`):
            The folder to write.
        layout (`str`, *optional*, defaults to `"released"`):
            `"released"`, `"speculators"` or `"dspark"`.
        target ([`~transformers.PreTrainedModel`], *optional*):
            The target, from which embedding and head are taken where the layout holds them and the source does not;
            where the layout leaves them to the target, they are compared with it.

    Raises:
        `ValueError`: if the layout is unknown, cannot express the drafter, or needs the target.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"`layout` has to be one of {LAYOUTS}, but is {layout!r}.")
    model = DSparkModel.from_pretrained(source, dtype="auto")
    if target is not None and layout == "released":
        model.share_weights(target)
    if target is not None and layout == "speculators" and (lost := model.foreign_tables(target)):
        raise ValueError(
            f"The speculators layout takes {' and '.join(lost)} from the target, but those of the drafter differ."
        )
    model.save_pretrained(destination, layout=layout)
