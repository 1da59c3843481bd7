"""Makes calls of transformers' modules cheap: a pass of one row makes hundreds, and computes little in most of them."""

from torch import nn


def call_directly(module: nn.Module) -> None:
    """Has a module's parts, itself among them, call their forward methods without looking for hooks, but for those that
    have some now; and has Python find the parts of each as attributes before nn.Module's own search, lists of them as
    plain lists, which are cut quickly.

    Hooks that are registered, and forward methods that are replaced, later have no effect.
    """
    for each in module.modules():
        for name, part in each._modules.items():
            vars(each)[name] = [*part] if type(part) is nn.ModuleList else part
        if not each._forward_hooks and not each._forward_pre_hooks:
            each._compiled_call_impl = each.forward
