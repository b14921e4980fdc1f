"""No tensor that the product makes follows the defaults of the process that it runs in."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
MAKERS = {
    *('tensor', 'as_tensor', 'asarray', 'scalar_tensor', 'empty', 'zeros', 'ones', 'full'),
    *('arange', 'range', 'linspace', 'logspace', 'eye', 'rand', 'randn', 'randint', 'randperm'),
}


def _calls_that_follow_defaults(source: str) -> list[str]:
    return [
        ast.unparse(call)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == 'torch'
        and call.func.attr in MAKERS
        and not {'dtype', 'device'} <= {keyword.arg for keyword in call.keywords}
    ]


@pytest.mark.parametrize('folder', ['megatron', 'megatron_overlay', 'tools'])
def test_dtype_and_device_are_named(folder):
    found = {
        str(file.relative_to(REPOSITORY)): calls
        for file in sorted((REPOSITORY / folder).rglob('*.py'))
        if (calls := _calls_that_follow_defaults(file.read_text()))
    }
    assert not found


def test_a_call_that_names_one_of_them_is_found():
    source = "torch.zeros(3, dtype=d)\ntorch.empty(3, dtype=d, device='cpu')\ntorch.zeros_like(x)"
    assert _calls_that_follow_defaults(source) == ['torch.zeros(3, dtype=d)']
