"""Calls without nn.Module's detours: nothing comes out differently, hooks included."""

from torch import nn

from engines.offload.model.direct_calls import call_directly


class Adds(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        return x + self.number


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Adds(1), Adds(10)
        self.rest = nn.ModuleList([Adds(100), Adds(1000)])

    def forward(self, x):
        for part in (self.first, self.second, *self.rest[:1]):
            x = part(x)
        return x


def test_hooks_and_replaced_methods_of_before_keep_their_effect():
    module = Two()
    module.second.register_forward_hook(lambda module, given, output: output * 2)
    module.rest[0].register_forward_pre_hook(lambda module, given: (-given[0],))
    module.first.forward = lambda x: x + 5
    expected = module(3)
    call_directly(module)
    assert module(3) == expected == -2 * (3 + 5 + 10) + 100
    assert [name for name, _ in module.named_children()] == ["first", "second", "rest"]


def test_a_part_may_be_replaced_afterwards():
    module = Two()
    call_directly(module)
    module.first = Adds(7)
    assert module(0) == 117
