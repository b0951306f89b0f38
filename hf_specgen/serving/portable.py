"""What transformers leaves on a model that has run, and cannot be pickled. Knows no backend."""

from torch import nn

CAPTURING = "transformers.utils.output_capturing"
INSTALLED = "_output_capturing_hooks_installed"


def remove_capturing_hooks(model: nn.Module) -> None:
    """
    Takes out the hooks with which a transformers model returns hidden states. They are local functions, which cannot
    be pickled, and the model puts them back when it needs them. Not to be called during a pass.
    """
    for module in model.modules():
        if vars(module).pop(INSTALLED, False):
            for part in module.modules():
                for key in [key for key, hook in part._forward_hooks.items() if hook.__module__ == CAPTURING]:
                    del part._forward_hooks[key]
